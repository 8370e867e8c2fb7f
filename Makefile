# Everything here prepares its own environment at the first use: see tools/environment.py.
#
#   make demo                     a ControlNet image, native and with engines, side by side
#   make demo ARGS=zimage_text_to_image  the same with another shipped workflow; ARGS=--help names them
#   make test                     ruff, then all tests
#   make test ARGS="-k fallback"  some tests
#   make test-newest              the tests with the newest packages there are, and what differs from the pinned ones
#   make test-torch TORCH=2.7.1   the tests of what touches torch's internals, with that torch
#   make benchmark-builds         what building full-size engines takes: see benchmarks/README.md
#   make env                      only prepare
#   make clean                    remove what was made in this clone (not the shared cache)
#
# Variables: COMFYUI_PATH (your own ComfyUI), HYBRID_TRT_CACHE (default ~/.cache/hybrid-trt), PYTHON (3.10 to 3.13).

PYTHON ?= python3
ARGS ?=
TORCH ?= 2.7.1
ENVIRONMENT = $(PYTHON) tools/environment.py
OTHER_VERSIONS = $(PYTHON) tools/other_versions.py
# They use torch's internals, and ComfyUI's modules without its server.
TORCH_TESTS = $(addprefix tests/*/test_,$(addsuffix .py,\
	any_size choices compiled_files compute_dtype cuda_graphs decompositions export file_session_graphs \
	graph_memory helpers kept_weights live_torch memory_layout one_size recorded_launchers unet_blocks weights_hashes))

.DEFAULT_GOAL := help
.PHONY: help demo test test-newest test-torch benchmark-builds env clean

help:
	@sed -n 's/^#   //p' Makefile

demo:
	@$(ENVIRONMENT) run -- python tools/demo.py $(ARGS)

# `pytest`, not `python -m pytest`: the latter puts the root on sys.path, where our `nodes` hides ComfyUI's.
test:
	@$(ENVIRONMENT) --browser run -- ruff check .
	@$(ENVIRONMENT) --browser --farm run -- pytest $(ARGS)

test-newest:
	@$(OTHER_VERSIONS) newest -- pytest $(ARGS)

test-torch:
	@$(OTHER_VERSIONS) torch==$(TORCH) -- pytest $(TORCH_TESTS) $(ARGS)

benchmark-builds:
	@$(ENVIRONMENT) run -- python benchmarks/build_times.py $(ARGS)

env:
	@$(ENVIRONMENT) --browser --farm

clean:
	rm -rf build .hypothesis .pytest_cache .ruff_cache
	find . -name .git -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +
