"""Large models, from Flux.1 to MiniMax H3, at full size: a sampling step, native and on a torch engine.

    python benchmarks/large_models.py --comfyui ~/ComfyUI --base /tmp/benchmark --out large.json --cases flux1_1024

Each row is a case: ``native_ms`` and ``engine_ms`` are medians of the steps of whole samplings in one process, with
cfg 1 or ``--cfg``. ``rel_err`` compares a latent after one step; ``native_error`` and ``engine_error`` hold both
against float32. ``*_peak_mb`` is the most GPU memory in use while sampling, ``build_mb`` the most main memory of all
processes during the build, less what this one had before, and ``build_phases_s`` tells what took how long.
``first_step_s`` is a sampling of one step right after the build: the compiled file is opened. Weights are random, made
on the GPU, in no file. ``--profile`` adds the kernels of one step, native and on the engine, by their GPU milliseconds.
``--compiled`` adds core's *TorchCompileModel*: ``compiled_first_s`` is its first sampling of one step, ``compiled_ms``
a later step.

``--again`` builds nothing: it times the first step on an engine of an earlier process, with another checkpoint and with
a LoRA. Native's step comes first each time, and puts the weights on the GPU. A case that fails has its ``error`` in its
row, and the next one runs. ``--tiny`` tries all of it with tiny models on a CPU: its figures mean nothing.

Older ComfyUIs lack Qwen-Image 2.1: the tests' network stands for native's there, and a ``remark`` in the row says so.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import networks  # before torch, whose allocator it chooses

# isort: split
import large_calls
import tiny_models
import tiny_transformers as small
import torch
from large_cases import CASES, PRO2, Case
from large_weights import HintEncoder, drawn, with_fun, with_lllite
from timing import MainMemory, PeakMemory, kernels

STEPS = 12


class Model:
    """A case's model with its conditioning, native and on an engine."""

    def __init__(self, case: Case, base: Path, tiny: bool, cfg: float = 1.0):
        import comfy.controlnet
        import comfy.sd
        from hybrid_trt.backends import backends
        from hybrid_trt.backends.lookup import EngineChoice
        from hybrid_trt.comfy_model.network import NativeNetwork
        from hybrid_trt.engine_library import Library

        self.case, self.side, self.cfg = case, 128 if tiny else case.side, cfg
        self.height = self.side if tiny or not case.height else case.height
        device = "cpu" if tiny else "cuda"
        config, width = (case.tiny, case.tiny_width) if tiny else (case.config, case.width)
        self.remark = large_calls.let_comfyui_know(case.network)
        weights = drawn(case.network, config, case.eight_bit, device)
        metadata = {"config": json.dumps({"transformer": config})} if case.network == "ltx2" else None
        with small.small_anima_adapter():
            self.native = comfy.sd.load_diffusion_model_state_dict(weights, metadata=metadata)
        self.control = None
        if case.control:
            control = config | (PRO2 | {"depth": 1} if tiny else PRO2)
            self.control = comfy.controlnet.load_controlnet_state_dict(
                drawn("flux_controlnet", control, "", device))
        del weights
        if case.fun is not None:
            self.native = with_fun(self.native, config, case.fun, self.side, device)
        if case.lllite:
            self.native = with_lllite(self.native, config, self.side, device)
        pooled = {"pooled_output": torch.randn(1, config.get("vec_in_dim") or case.pooled)} if case.pooled else {}
        referring = large_calls.referring(case, self.native, (self.side, self.height))
        self.prompt = torch.randn(1, case.tokens, width), pooled | referring
        self.network = NativeNetwork.of_model(self.native, "model")
        self.library, self.backend = Library([base / "models" / "trt_engines"]), backends()["torch"]
        self.choice = EngineChoice(self._profile(), "auto", "torch")
        self.patched: Any = None

    def _profile(self) -> Any:
        from hybrid_trt.architectures.shapes import Profile

        return Profile.around(self._calls(self.network))

    def _calls(self, network: Any) -> list[dict[str, int]]:
        from hybrid_trt.architectures.shapes import Picture, RequestedSizes

        architecture = network.architecture()
        specs = architecture.engine_inputs(network.module, network.precision)
        own = {symbol for spec in specs for dim in spec.dims if not isinstance(dim, int) for symbol in dim.symbols}
        profile = architecture.profile(RequestedSizes(max_tokens=self.case.tokens)).only(own)
        unit = architecture.symbols["T"].step
        calls = architecture.calls(profile, Picture(self.side, self.height, (1,), length=self.case.length))
        before = self.case.tokens + sum(one[0, 0].numel() for one in self.prompt[1].get("reference_latents", ()))
        return [call | {"T": -(-before // unit)} for call in calls]

    def build(self) -> float:
        """Build the engines of the backbone and of the ControlNet; return the error that the first build measured."""
        errors, self.phases = [], {}
        for network in self._networks():
            built = self._built(network)
            errors.append(built.parity["rel_err"])
            self.phases[network.label] = {name: round(value, 1) for name, value in built.seconds.items()}
        if self.control is not None:  # its engine holds weights of its own; a prompt would not load native's
            from comfy import model_management

            model_management.unload_model_and_clones(self.control.control_model_wrapped)
        self.use_engines()
        return errors[0]

    def _networks(self) -> list[Any]:
        from hybrid_trt.comfy_model.network import NativeNetwork

        control = [] if self.control is None else [NativeNetwork.of_controlnet(self.control, "control")]
        return [NativeNetwork.of_model(self.native, "model"), *control]

    def use_engines(self) -> None:
        """Have the library's engines serve the model, and its ControlNet."""
        from hybrid_trt.sampling.controlnet import back_with_engine
        from hybrid_trt.sampling.engine_handle import EngineHandle
        from hybrid_trt.sampling.model_wrapper import patch_model

        self.handles = [EngineHandle.look_up(one, self.choice, self.library, one.label) for one in self._networks()]
        self.patched = patch_model(self.native, self.handles[0])
        self.backed = None if self.control is None else back_with_engine(self.control, self.handles[1])

    def add_lora(self) -> None:
        """Put a LoRA of rank 16 on the attention layers."""
        from comfy.weight_adapter import LoRAAdapter

        self.native = self.native.clone()
        patches = {}
        for name, weight in self.native.model.diffusion_model.named_parameters():
            if weight.ndim == 2 and any(part in name for part in (".qkv", "_qkv", "linear1", "to_q", "wq", "q_proj")):
                up, down = (0.05 * torch.randn(size) for size in ((weight.shape[0], 16), (16, weight.shape[1])))
                patches[f"diffusion_model.{name}"] = LoRAAdapter(set(), (up, down, 16.0, None, None, None))
        assert self.native.add_patches(patches), "no layer takes the LoRA"

    def _built(self, network: Any) -> Any:
        from hybrid_trt.architectures.shapes import Profile
        from hybrid_trt.engine_builder.build import build_engine
        from hybrid_trt.engine_builder.order import BuildOrder

        order = BuildOrder(network, network.precision, Profile.around(self._calls(network)), self.backend)
        return build_engine(order, self.library, lambda *_: None, log_line=print).manifest

    def sample(self, engines: bool, steps: int, seed: int = 1) -> tuple[torch.Tensor, list[float]]:
        """A sampling by ComfyUI's code: the latent, and the milliseconds from one step to the next."""
        import comfy.sample

        size, call = (self.side, self.height), self._calls(self.network)[0]
        noise = large_calls.noise(self.case, self.native, size, call, seed)
        tokens, options = self.prompt
        options = dict(options)
        net = self.backed if engines else self.control
        if net is not None:
            image = torch.rand(1, 3, self.side, self.side, generator=torch.Generator().manual_seed(2))
            options |= {"control": self._with_image(net, image), "control_apply_to_uncond": False}
        stamps: list[Any] = []
        conds = [[tokens, options]]
        latent = comfy.sample.sample(
            self.patched if engines else self.native, noise, steps, self.cfg, "euler", "simple", conds, conds,
            noise * 0.0, callback=lambda *_: stamps.append(_now()), disable_pbar=True, seed=seed)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return large_calls.flat(latent), [_between(a, b) for a, b in zip(stamps[:-1], stamps[1:], strict=True)]

    def sample_in_float32(self) -> torch.Tensor:
        """The latent after a native step that computes in float32, with the same weights."""
        own, self.native = self.native, self.native.clone()
        self.native.set_model_compute_dtype(torch.float32)
        try:
            return self.sample(False, 1)[0]
        finally:
            self.native = own

    def use_torch_compile_model(self) -> None:
        """Have core's node compile the native model."""
        from comfy_extras.nodes_torch_compile import TorchCompileModel

        self.native = TorchCompileModel.execute(self.native, "inductor").result[0]

    def _with_image(self, net: Any, image: torch.Tensor) -> Any:
        encoder = HintEncoder(self.native.get_model_object("latent_format").latent_channels)
        return net.copy().set_cond_hint(image, 0.7, (0.0, 1.0), vae=encoder)


def _now() -> Any:
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(start: Any, end: Any) -> float:
    return 1000 * (end - start) if isinstance(start, float) else start.elapsed_time(end)


def measure(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Return a case's row."""
    from hybrid_trt.engine_library.engine import relative_error

    tiny = options.tiny
    memory = None if tiny else PeakMemory()
    steps = 3 if tiny else options.steps
    model = Model(case, options.base, tiny, options.cfg)
    row: dict[str, Any] = {"cfg": options.cfg, "precision": model.network.precision, "side": model.side,
                           "height": model.height, "length": case.length, "tokens": case.tokens, "remark": model.remark}
    wanted, _ = model.sample(False, 1)
    row["native_ms"], row["native_peak_mb"] = timed(memory, lambda: model.sample(False, steps)[1])
    started = time.perf_counter()
    with MainMemory() as main:
        row["build_error"] = model.build()
    row |= {"build_s": round(time.perf_counter() - started, 1), "build_phases_s": model.phases,
            "build_mb": round(main.peak)}
    started = time.perf_counter()
    found, _ = model.sample(True, 1)
    row["first_step_s"] = round(time.perf_counter() - started, 2)
    row["rel_err"] = relative_error(found, wanted)
    model.sample(True, 3)
    row["engine_ms"], row["engine_peak_mb"] = timed(memory, lambda: model.sample(True, steps)[1])
    row["faster"] = round(row["native_ms"] / row["engine_ms"], 3)
    row["served"] = [(handle.stats.kind, handle.stats.engine_name, handle.stats.engine, handle.stats.native,
                      dict(handle.stats.details), handle.stats.why_plain) for handle in model.handles]  # fmt: skip
    if options.profile:
        for way in ("native", "engine"):
            row[f"{way}_kernels"] = kernels(lambda way=way: model.sample(way == "engine", 1))
    try:
        exact = model.sample_in_float32()
    except Exception as error:  # ComfyUI cannot do so for each kind of weights
        row["not_in_float32"] = f"{type(error).__name__}: {error}"[:200]
    else:
        row |= {"native_error": relative_error(wanted, exact), "engine_error": relative_error(found, exact)}
    if options.compiled:
        print(json.dumps(row), flush=True)  # in case that compiling takes too long
        model.use_torch_compile_model()
        started = time.perf_counter()
        model.sample(False, 1)
        row["compiled_first_s"] = round(time.perf_counter() - started, 1)
        row["compiled_ms"], row["compiled_peak_mb"] = timed(memory, lambda: model.sample(False, steps)[1])
    return row


def measure_again(case: Case, base: Path, tiny: bool) -> dict[str, Any]:
    """Return the seconds of first steps on an engine of an earlier process: its own, another checkpoint's, a LoRA's."""
    from hybrid_trt.engine_library.engine import relative_error

    row: dict[str, Any] = {}
    model = Model(case, base, tiny)
    for what in ("new_process", "other_checkpoint", "lora"):
        if what == "other_checkpoint":
            model = Model(case, base, tiny)
        elif what == "lora":
            model.add_lora()
        model.use_engines()
        latents = []
        for way in ("native", "engine"):  # native comes first and puts the weights on the GPU
            started = time.perf_counter()
            latents.append(model.sample(way == "engine", 1)[0])
            row[f"{what}_{way}_s"] = round(time.perf_counter() - started, 2)
        row[f"{what}_rel_err"] = relative_error(latents[1], latents[0])
        row[f"{what}_calls"] = [(one.stats.engine, one.stats.native, one.stats.why_plain) for one in model.handles]
    return row


def timed(memory: PeakMemory | None, sample: Callable[[], list[float]]) -> tuple[float, float | None]:
    """Return the median milliseconds of a step, the first two left out, and the most GPU memory in MB."""
    gc.collect()
    if memory is None:
        return round(statistics.median(sample()), 2), None
    with memory:
        steps = sample()
    return round(statistics.median(steps[2:]), 2), round(memory.peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of a sampling, the first two untimed")
    parser.add_argument("--cfg", type=float, default=1.0)
    parser.add_argument("--profile", action="store_true", help="also the kernels of a step")
    parser.add_argument("--compiled", action="store_true", help="also core's TorchCompileModel")
    parser.add_argument("--again", action="store_true", help="with engines that an earlier process has built")
    parser.add_argument("--tiny", action="store_true", help="tiny models on a CPU, to try the script")
    options = parser.parse_args()
    networks.import_pack(options.comfyui)
    if options.tiny:
        tiny_models.import_comfy_on_cpu()
        small.let_comfyui_load_tiny_models()
    meta = {"gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "a CPU", "torch": torch.__version__,
            "date": datetime.now(timezone.utc).date().isoformat(),
            "command": " ".join(["python benchmarks/large_models.py", *sys.argv[1:]])}  # fmt: skip
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for name in options.cases:
            try:
                row = (measure_again(CASES[name], options.base, options.tiny) if options.again else
                       measure(CASES[name], options))
            except Exception as error:
                traceback.print_exc()
                row = {"error": f"{type(error).__name__}: {error}"[:400]}
            rows.append({"case": name} | row)
            print(json.dumps(rows[-1]), flush=True)
            options.out.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
