"""Each network alone, and steps inside ComfyUI's own sampling code: native, as CUDA graph, compiled.

A process of its own, with ComfyUI's non-dynamic loading (``--disable-dynamic-vram``) and its choice of allocator.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import types
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")  # what ComfyUI sets for CUDA 13

import models
import torch
from timing import gpu_ms, host_us, kernels, matmul_tflops

SIZES = {"sd15": 64, "sdxl": 128}
"""Height and width of the latent."""


def import_pack(comfyui: Path) -> None:
    """Make ComfyUI's modules and the pack importable."""
    sys.path.append(str(comfyui))
    package = types.ModuleType("hybrid_trt")
    package.__path__ = [str(models.ROOT)]
    sys.modules["hybrid_trt"] = package


class Bench:
    """The models of one family, native and as sessions."""

    def __init__(self, family: str, base: Path, controls: int):
        import comfy.controlnet
        import comfy.sd
        from hybrid_trt.architectures.shapes import Profile, Range
        from hybrid_trt.backends import backends
        from hybrid_trt.comfy_model.network import NativeNetwork
        from hybrid_trt.engine_library import Library
        from hybrid_trt.sampling.engine_handle import EngineChoice

        self.family, self.size = family, SIZES[family]
        paths = models.make(Path(comfy.sd.__file__).parents[1], base, [
            "full_sd15" if family == "sd15" else "full_sdxl",
            *(f"full_{family}_{'abcd'[i]}" for i in range(controls))])
        first, *nets = (str(p) for p in paths.values())
        if family == "sd15":
            self.model = comfy.sd.load_checkpoint_guess_config(first, output_vae=False, output_clip=False)[0]
        else:
            self.model = comfy.sd.load_diffusion_model(first)
        self.nets = [comfy.controlnet.load_controlnet(path) for path in nets]
        self.library = Library([base / "models" / "trt_engines"])
        size = Range(8, self.size, 128)
        self.choice = EngineChoice(
            Profile({"B": Range(1, 2, 8), "H": size, "W": size, "T": Range(77, 77, 616), "HB": Range(1, 1, 8)}),
            "auto", "torch")
        self.backend = backends()["torch"]
        self.networks = {"unet": NativeNetwork.of_model(self.model, "unet")}
        if self.nets:
            self.networks["controlnet"] = NativeNetwork.of_controlnet(self.nets[0], "controlnet")

    def given(self, name: str, batch: int) -> dict[str, torch.Tensor]:
        """Random inputs of a network on the GPU."""
        from hybrid_trt.architectures.shapes import sample_inputs

        network = self.networks[name]
        specs = [
            spec for spec in network.architecture().inputs(network.module, network.precision)
            if not spec.name.startswith("control_input")  # what T2I-adapters add
        ]
        symbols = {"B": batch, "H": self.size, "W": self.size, "T": 77, "HB": 1}
        given = {n: t.cuda() for n, t in sample_inputs(specs, symbols, seed=batch).items()}
        given["timesteps"] = torch.full_like(given["timesteps"], 500)
        return given

    def native_call(self, name: str, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """The native module's own forward."""
        module = self.networks[name].module
        if name == "controlnet":
            given = {**given, "timesteps": given["timesteps"].to(given["x"].dtype)}
            result = module(**given)
            return [*result["output"], *result["middle"]]
        residuals = [t for n, t in given.items() if n.startswith("control_")]
        control = {"input": [], "output": residuals[:-1], "middle": residuals[-1:]}
        rest = {n: t for n, t in given.items() if not n.startswith("control_")}
        return [module(**rest, control=control, transformer_options={})]

    def session(self, name: str) -> Any:
        from hybrid_trt.backends.torch_inductor.session import live_session

        return live_session(self.networks[name], self.backend, self.networks[name].precision)

    def build(self, name: str) -> tuple[float, dict[str, float]]:
        """Compile a network unless the library has it; return the seconds, all and of each phase."""
        from hybrid_trt.engine_builder.build import build_engine
        from hybrid_trt.engine_builder.order import BuildOrder

        network, session = self.networks[name], self.session(name)
        order = BuildOrder(network, network.precision, self.choice.profile, self.backend)
        started = time.perf_counter()
        engine = build_engine(order, self.library, lambda *_: None)
        seconds = time.perf_counter() - started
        session.use([*session.engines, engine])
        return seconds, {phase: round(value, 1) for phase, value in engine.manifest.seconds.items()}

    def conditioning(self, controls: int, backed: bool) -> tuple[Any, list, list]:
        """Model, positive and negative conditioning with a stack of ControlNets."""
        from hybrid_trt.comfy_model.network import NativeNetwork
        from hybrid_trt.sampling.controlnet import back_with_engine
        from hybrid_trt.sampling.engine_handle import EngineHandle
        from hybrid_trt.sampling.model_wrapper import patch_model

        model, previous = self.model, None
        if backed:
            model = patch_model(model, EngineHandle.look_up(self.networks["unet"], self.choice, self.library, "unet"))
        for i, net in enumerate(self.nets[:controls]):
            if backed:
                network = NativeNetwork.of_controlnet(net, f"net{i}")
                handle = EngineHandle.look_up(network, self.choice, self.library, f"cn{i}")
                net = back_with_engine(net, handle)
            generator = torch.Generator().manual_seed(i)
            image = torch.rand(1, 3, self.size * 8, self.size * 8, generator=generator)
            control = net.copy().set_cond_hint(image, 0.7 / (i + 1), (0.0, 1.0))
            control.set_previous_controlnet(previous)
            previous = control
        width = {"sd15": 768, "sdxl": 2048}[self.family]
        conds = []
        for seed in (1, 2):
            generator = torch.Generator().manual_seed(seed)
            extra: dict[str, Any] = {"pooled_output": torch.randn(1, 1280, generator=generator)}
            if previous is not None:
                extra |= {"control": previous, "control_apply_to_uncond": False}
            conds.append([[torch.randn(1, 77, width, generator=generator), extra]])
        return model, *conds

    def sample(self, setup: tuple[Any, list, list], seed: int, steps: int = 20) -> tuple[torch.Tensor, list[float]]:
        """A whole sampling by ComfyUI's code: the latent, and the milliseconds of each step by CUDA events."""
        import comfy.sample

        events = []

        def callback(*_: Any) -> None:
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record()

        model, positive, negative = setup
        latent = torch.zeros(1, 4, self.size, self.size)
        noise = torch.randn(latent.shape, generator=torch.Generator().manual_seed(seed))
        result = comfy.sample.sample(model, noise, steps, 7.5, "euler", "normal", positive, negative, latent,
                                     callback=callback, disable_pbar=True, seed=seed)
        torch.cuda.synchronize()
        return result, [a.elapsed_time(b) for a, b in zip(events[:-1], events[1:], strict=True)]


def worst_error(values: list[torch.Tensor], references: list[torch.Tensor]) -> float:
    """Largest relative error of any output."""
    from hybrid_trt.engine_library.engine import relative_error

    return max(relative_error(v, r) for v, r in zip(values, references, strict=True))


def network_rows(bench: Bench, tflops: float, batches: tuple[int, ...], profiled: bool) -> list[dict[str, Any]]:
    """Native, graph and compiled times of each network alone."""
    from comfy import model_management
    from torch.utils.flop_counter import FlopCounterMode

    rows = []
    for name, network in bench.networks.items():
        with torch.inference_mode():
            model_management.load_models_gpu([network.patcher])
            session = bench.session(name)
            session.begin_run(network.patcher)
            found: dict[int, dict[str, Any]] = {}
            for batch in batches:
                given = bench.given(name, batch)
                reference = bench.native_call(name, given)
                with FlopCounterMode(display=False) as flops:
                    bench.native_call(name, given)
                row = found[batch] = {
                    "case": f"{bench.family}_{name}" + ("" if batch == 2 else f"_b{batch}"), "batch": batch,
                    "tflop": round(flops.get_total_flops() / 1e12, 3),
                    "floor_ms": round(flops.get_total_flops() / 1e9 / tflops, 3)}
                row["native"] = gpu_ms(lambda: bench.native_call(name, given))  # noqa: B023
                session.use([])
                row["graph"] = gpu_ms(lambda: session.run(given))  # noqa: B023
                row["graph_rel_err"] = worst_error(list(session.run(given).values()), reference)
            seconds, phases = bench.build(name)
            for batch in batches:
                given, row = bench.given(name, batch), found[batch]
                reference = bench.native_call(name, given)
                session.begin_run(network.patcher)
                row["engine"] = gpu_ms(lambda: session.run(given))  # noqa: B023
                row["rel_err"] = worst_error(list(session.run(given).values()), reference)
                row["host_us"] = host_us(lambda: session.run(given))  # noqa: B023
                row["replay_only_ms"] = replay_ms(session)
                row["build_s"], row["build_phases_s"] = round(seconds, 1), phases
                if profiled:
                    row["kernels"] = kernels(lambda: session.run(given))  # noqa: B023
                rows.append(row)
    for row in rows:
        row.update({f"{level}_ms": row[level]["median"] for level in ("native", "graph", "engine")})
        print({k: v for k, v in row.items() if not isinstance(v, dict)}, flush=True)
    return rows


def replay_ms(session: Any) -> float:
    """The latest graph's replay without copies in and out: what the kernels take."""
    graph = next(reversed(session.graphs._captured.values()), None)
    return gpu_ms(graph.replay.replay)["median"] if graph else 0.0


def step_rows(bench: Bench, counts: list[int]) -> list[dict[str, Any]]:
    """Median time of a step of a real sampling with several ControlNets, and the error of the final latent."""
    rows = []
    for count in counts:
        with torch.inference_mode():
            row: dict[str, Any] = {"case": f"{bench.family}_step_{count}cn", "batch": 2}
            latents = {}
            for level, backed in (("native", False), ("engine", True)):
                setup = bench.conditioning(count, backed)
                bench.sample(setup, 1)
                times = []
                for seed in (2, 3):
                    latents[level, seed], steps = bench.sample(setup, seed)
                    times += steps[2:]
                row[f"{level}_ms"] = round(statistics.median(times), 3)
            row["rel_err"] = max(worst_error([latents["engine", s]], [latents["native", s]]) for s in (2, 3))
            print(row, flush=True)
            rows.append(row)
    return rows


def overlap_row(bench: Bench) -> dict[str, Any]:
    """Measure what running networks at once saves: two ControlNets, and the UNet beside them as if without them.

    The last one is a bound on what splitting the UNet into encoder and decoder could save: only the encoder may run
    beside the ControlNets.
    """
    from hybrid_trt.backends.torch_inductor.session import live_session
    from hybrid_trt.comfy_model.network import NativeNetwork

    nets = (NativeNetwork.of_controlnet(net, f"net{i}") for i, net in enumerate(bench.nets[:2]))
    networks = [bench.networks["unet"], *nets]
    with torch.inference_mode():
        sessions = [live_session(network, bench.backend, network.precision) for network in networks]
        for session, network in zip(sessions, networks, strict=True):
            session.use([engine for engine in bench.library.engines() if engine.manifest.kind == network.role
                         and engine.manifest.identity.weights == bench.backend.weights(network)])
        given = [bench.given("unet", 2), bench.given("controlnet", 2), bench.given("controlnet", 2)]
        streams = [torch.cuda.Stream() for _ in sessions]

        def together(*which: int) -> None:
            here = torch.cuda.current_stream()
            for i in which:
                streams[i].wait_stream(here)
                with torch.cuda.stream(streams[i]):
                    sessions[i].run(given[i])
                here.wait_stream(streams[i])

        def at_once(*which: int) -> None:
            here = torch.cuda.current_stream()
            start = here.record_event()
            for i in which:
                streams[i].wait_event(start)
                with torch.cuda.stream(streams[i]):
                    sessions[i].run(given[i])
            for i in which:
                here.wait_stream(streams[i])

        row = {"case": f"{bench.family}_overlap", "batch": 2,
               "one_after_the_other_ms": gpu_ms(lambda: together(1, 2, 0))["median"],
               "controlnets_at_once_ms": gpu_ms(lambda: (at_once(1, 2), together(0)))["median"],
               "all_at_once_ms": gpu_ms(lambda: at_once(1, 2, 0))["median"]}
    print(row, flush=True)
    return row


def warm_start(bench: Bench, started: float) -> dict[str, Any]:
    """Seconds until the first step of a process whose library has the engines, from different starting points."""
    loaded = time.perf_counter()
    with torch.inference_mode():
        setup = bench.conditioning(1, True)
        bench.sample(setup, 1, steps=1)
        first = time.perf_counter()
        bench.sample(setup, 2, steps=3)
    row = {"case": f"{bench.family}_warm_start", "first_step_s": round(first - loaded, 2),
           "with_model_files_s": round(first - started, 2)}
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=SIZES, required=True)
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--controls", type=int, default=4)
    parser.add_argument("--steps", type=int, nargs="*", default=[0, 1, 2, 3, 4],
                        help="ControlNets in a sampling; none: networks alone")
    parser.add_argument("--warm", action="store_true", help="only the start of a process that finds its engines")
    parser.add_argument("--profile", action="store_true", help="also the kernels of a call")
    options = parser.parse_args()
    import_pack(options.comfyui)
    started = time.perf_counter()
    with torch.inference_mode():
        bench = Bench(options.family, options.base, options.controls)
    if options.warm:
        rows = [warm_start(bench, started)]
    else:
        tflops = matmul_tflops()
        print({"matmul_tflops": round(tflops)}, flush=True)
        rows = network_rows(bench, tflops, (2, 1), options.profile)
        options.out.write_text(json.dumps(rows, indent=1))
        if len(bench.nets) > 1 and options.steps:
            rows.append(overlap_row(bench))
        rows += step_rows(bench, options.steps)
    options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
