"""What Inductor's settings and ours give: one network compiled with each of them, replayed in turn.

    python benchmarks/sweep_flags.py --family sd15 --network unet --comfyui ~/ComfyUI --base /tmp/benchmark \\
        --compile plain autotune_gemm                       # may run beside others: it measures nothing
    python benchmarks/sweep_flags.py ... --out sweep.json   # replays all that were compiled, several turns

Compiled files stay below ``--base``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import networks
import profile_kernels
import torch

TURNS = 3
GEMM = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "ATEN,TRITON"}
TUNED = {"max_autotune_pointwise": True, "combo_kernels": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tuned": TUNED,
    "inductors_norm": {"left_to_inductor": ("aten::native_group_norm",)},
    "inductors_gelu": {"left_to_inductor": ("aten::gelu",)},
    "inductors_silu": {"left_to_inductor": ("aten::silu",)},
    "inductors_products": {"left_to_inductor": ("aten::addmm", "aten::convolution")},
    "inductors_convolutions": {"left_to_inductor": ("aten::convolution",)},
    "tiles_of_4096": {"most_summed": 4096},
    "no_lines": {"by_lines": 1 << 30},
    "lines_from_4096": {"by_lines": 4096},
    "lines_from_256": {"by_lines": 256},
    "joined_as_is": {"joined_as_is": True},
    "inductors_rows": {"inductors_rows": True},
    "autotune_gemm": GEMM,
    "conv_as_mm": {"conv_1x1_as_mm": True},
    "gemm_and_conv_as_mm": GEMM | {"conv_1x1_as_mm": True},
    "coordinate_descent": {"coordinate_descent_tuning": True},
    "everything": GEMM | TUNED | {"conv_1x1_as_mm": True, "coordinate_descent_tuning": True},
    "pointwise_autotune": {"max_autotune_pointwise": True},
    "no_layout_change": {"layout_optimization": False},
    "autotune_all": GEMM | {"max_autotune": True},
    "benchmark_fusion": {"benchmark_fusion": True},
    "combo_kernels": {"combo_kernels": True},
    "one_tile": {"triton.max_tiles": 1},
    "nd_tiling": {"triton.prefer_nd_tiling": True},
}
"""Inductor's settings, and ours: ``left_to_inductor`` names what of ``decompositions.TABLE`` is not used; ``by_lines``
and ``most_summed`` take the place of its constants; ``joined_as_is`` leaves the layout of channels put together to
Inductor; with ``inductors_rows`` it alone decides how rows and lines are read (``choices``). Of cuDNN nothing is swept
here: torch keeps the first algorithm that it took for a shape in this process (``results/products_h200.json``)."""
OURS = ("left_to_inductor", "by_lines", "most_summed", "joined_as_is", "inductors_rows")


@contextlib.contextmanager
def settings(flags: dict[str, Any]) -> Iterator[None]:
    """Inductor and what we write out with a variant's settings."""
    import torch._inductor.config
    from hybrid_trt.backends.torch_inductor import choices, inductor_tuning

    ours: list[tuple[Any, str, Any]] = []
    if "most_summed" in flags:
        ours.append((inductor_tuning, "MOST_SUMMED", flags["most_summed"]))
    if "by_lines" in flags:
        ours.append((inductor_tuning, "BY_LINES", flags["by_lines"]))
    if "joined_as_is" in flags:
        ours.append((inductor_tuning, "keep_channels_last", lambda _: None))
    if "inductors_rows" in flags:
        ours.append((choices, "our_rows", contextlib.nullcontext))
    if "left_to_inductor" in flags:
        table = {o: how for o, how in inductor_tuning.TABLE.items() if o.name() not in flags["left_to_inductor"]}
        ours.append((inductor_tuning, "TABLE", table))
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in ours]
    try:
        for place in ours:
            setattr(*place)
        with torch._inductor.config.patch({k: v for k, v in flags.items() if k not in OURS}):
            yield
    finally:
        for place in before:
            setattr(*place)


class Sweep:
    """One network's live session, and the places of its compiled variants."""

    def __init__(self, bench: networks.Bench, name: str):
        from comfy import model_management

        self.network = bench.networks[name]
        self.folder = bench.library.roots[0].parent / "sweep" / f"{bench.family}_{name}"
        self.folder.mkdir(parents=True, exist_ok=True)
        model_management.load_models_gpu([self.network.patcher])
        self.session = bench.session(name)
        self.session.begin_run(self.network.patcher)
        self.given = bench.given(name, 2)
        self.reference = list(self.session.run(self.given).values())  # uncompiled; the weights are in place now
        live = self.session.live
        given = live.passes.run(self.given, {}, live.weights.version)
        self.symbols = self.session._plan(given).symbols
        self.inputs = self.session._prepared(given, self.symbols)

    def compile(self, variant: str) -> float:
        """Compile a variant and keep it; the seconds that took."""
        from hybrid_trt.backends.torch_inductor.compiled import compile_to_file

        live, started = self.session.live, time.perf_counter()
        given = [self.inputs[spec.name].clone() for spec in live.inputs]
        with settings(VARIANTS[variant]):
            compile_to_file(live.function, live.flat_weights(), live.names, given, self.folder / f"{variant}.bin")
        seconds = time.perf_counter() - started
        (self.folder / f"{variant}.json").write_text(json.dumps({"compile_s": round(seconds, 1)}))
        return seconds

    def replay(self, variant: str) -> dict[str, Any]:
        """Record a compiled variant and time its replay."""
        from hybrid_trt.backends.torch_inductor.compiled import open_file

        live = self.session.live
        self.session.graphs.clear()
        with settings(VARIANTS[variant]):
            live.add_compiled(frozenset(self.symbols.items()), open_file(self.folder / f"{variant}.bin"))
            results = list(self.session.run(self.given).values())
            self.session.run(self.given)
        if self.session.graphs.failure is not None:  # what comes after such a failure cannot be trusted either
            raise SystemExit(f"{variant} cannot be recorded: {self.session.graphs.failure}; leave it out")
        return {"ms": networks.replay_ms(self.session), "rel_err": networks.worst_error(results, self.reference)}

    def kernels(self) -> dict[str, Any]:
        """The kernels of what was replayed last."""
        graph = next(reversed(self.session.graphs._captured.values()))
        found = profile_kernels.launches(graph.replay.replay)
        return {"families": profile_kernels.grouped(found, profile_kernels.REPLAYS),
                "longest": profile_kernels.longest(found, profile_kernels.REPLAYS)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=networks.SIZES, required=True)
    parser.add_argument("--network", choices=["unet", "controlnet"], required=True)
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--compile", nargs="+", choices=VARIANTS, default=[])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--kernels", action="store_true", help="also where each variant's time goes, family by family")
    options = parser.parse_args()
    networks.import_pack(options.comfyui)
    with torch.inference_mode():
        sweep = Sweep(networks.Bench(options.family, options.base, options.network == "controlnet"), options.network)
        for variant in options.compile:
            print(variant, f"compiled in {sweep.compile(variant):.0f} s", flush=True)
        if not options.out:
            return
        there = [variant for variant in VARIANTS if (sweep.folder / f"{variant}.json").exists()]
        turns: dict[str, list[float]] = {variant: [] for variant in there}
        rows = {v: {"variant": v, **json.loads((sweep.folder / f"{v}.json").read_text())} for v in there}
        for turn in range(TURNS):
            for variant in there:
                found = sweep.replay(variant)
                if options.kernels and turn == TURNS - 1:
                    rows[variant] |= sweep.kernels()
                turns[variant].append(found["ms"])
                rows[variant] |= {"rel_err": found["rel_err"], "turns_ms": turns[variant],
                                  "ms": statistics.median(turns[variant])}
    for row in rows.values():
        print({name: value for name, value in row.items() if name != "longest"}, flush=True)
    found = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "rows": list(rows.values())}
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
