# Everything here prepares its own environment at the first use: see tools/environment.py.
#
#   make demo                     a ControlNet image, native and with engines, side by side
#   make test                     ruff, then all tests
#   make test ARGS="-k fallback"  some tests
#   make benchmark-builds         what building full-size engines takes: see benchmarks/README.md
#   make env                      only prepare
#   make clean                    remove what was made in this clone (not the shared cache)
#
# Variables: COMFYUI_PATH (your own ComfyUI), HYBRID_TRT_CACHE (default ~/.cache/hybrid-trt), PYTHON (3.10 to 3.13).

PYTHON ?= python3
ARGS ?=
ENVIRONMENT = $(PYTHON) tools/environment.py

.DEFAULT_GOAL := help
.PHONY: help demo test benchmark-builds env clean

help:
	@sed -n 's/^#   //p' Makefile

demo:
	@$(ENVIRONMENT) run -- python tools/demo.py $(ARGS)

# `pytest`, not `python -m pytest`: the latter puts the root on sys.path, where our `nodes` hides ComfyUI's.
test:
	@$(ENVIRONMENT) --browser run -- ruff check .
	@$(ENVIRONMENT) --browser run -- pytest $(ARGS)

benchmark-builds:
	@$(ENVIRONMENT) run -- python benchmarks/build_times.py $(ARGS)

env:
	@$(ENVIRONMENT) --browser

clean:
	rm -rf build .pytest_cache .ruff_cache
	find . -name .git -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +
