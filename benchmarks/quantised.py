"""SDXL's UNet with 8-bit weights on the torch backend against native's, both against the same weights in float32.

    python benchmarks/quantised.py --comfyui ~/ComfyUI --base /tmp/benchmark --out quantised.json

Native and engine are timed in one process, batch 2 at 1024 px. Each row is a case: ``native_ms`` and ``engine_ms`` are
medians of a call, ``error_*_fp32`` relative errors, ``error_to_native`` the engine's, ``vram_ratio`` the most GPU
memory in use during calls by native's. ``fp16`` is the same network without quantisation. Weights are random.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networks
import torch
from timing import PeakMemory, gpu_ms
from vae import relative_error

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sdxl_unet_fp16": ("full_sdxl", {}),
    "sdxl_unet_fp8_scaled": ("full_sdxl_fp8", {}),
    "sdxl_unet_fp8_plain": ("full_sdxl", {"dtype": torch.float8_e4m3fn}),
    "sdxl_unet_int8": ("full_sdxl_int8", {}),
}
"""Name -> file and options of ComfyUI's loader."""


def measure(case: str, comfyui: Path, base: Path) -> dict[str, Any]:
    """Return a case's row; the engine is built first, unless the library has it."""
    import comfy.sd
    import models
    from comfy import model_management
    from hybrid_trt.comfy_model.torch_kernels import results_in_float32

    file, options = CASES[case]
    (path,) = models.make(comfyui, base, [file]).values()
    memory = PeakMemory()
    model = comfy.sd.load_diffusion_model(str(path), model_options=dict(options))
    model_management.load_models_gpu([model], force_full_load=True)
    bench = Bench(model, base)
    given = bench.given("unet", 2)
    row: dict[str, Any] = {"case": case, "dtype": bench.networks["unet"].precision}
    native = bench.native_call("unet", given)[0]
    row["native_ms"] = gpu_ms(lambda: bench.native_call("unet", given))["median"]
    row["native_peak_mb"] = peak(memory, lambda: bench.native_call("unet", given))
    session = bench.session("unet")  # kept: whoever holds it has the compiled files
    row["build_s"], row["build_error"] = bench.build("unet")
    session.begin_run(model)
    for _ in range(4):
        engine = session.run(given)["out"]
    row["engine_ms"] = gpu_ms(lambda: session.run(given))["median"]
    row["engine_peak_mb"] = peak(memory, lambda: session.run(given))
    row |= {"compiled": session.uncovered is None, "graph": session.graphs.plain is None}
    row["vram_ratio"] = round(row["engine_peak_mb"] / row["native_peak_mb"], 3)
    live = session._live
    tensors = [given[spec.name].to(getattr(torch, spec.dtype)) if spec.name in given else
               torch.zeros(spec.shape({"B": 2, "H": 128, "W": 128, "T": 77}), dtype=getattr(torch, spec.dtype),
                           device="cuda") for spec in live.inputs]  # fmt: skip
    plain = live.function(*tensors)[0]
    (exact,) = results_in_float32(live.function, tensors) or (None,)
    row |= {"error_to_native": relative_error(engine, native.float()),
            "error_plain_to_native": relative_error(plain, native.float())}  # fmt: skip
    if exact is not None:
        row |= {"error_native_fp32": relative_error(native, exact), "error_engine_fp32": relative_error(engine, exact)}
    session.unload()
    return row


def peak(memory: PeakMemory, call: Callable[[], Any]) -> float:
    """Return the MB of GPU memory in use at the height of some calls, less what was there before the model."""
    gc.collect()
    torch.cuda.empty_cache()
    with memory:
        for _ in range(10):
            call()
        torch.cuda.synchronize()
    return memory.peak


class Bench(networks.Bench):
    """One UNet, native and as a session."""

    def __init__(self, model: Any, base: Path):
        from hybrid_trt.architectures.shapes import Profile, Range
        from hybrid_trt.backends import backends
        from hybrid_trt.backends.lookup import EngineChoice
        from hybrid_trt.comfy_model.network import NativeNetwork
        from hybrid_trt.engine_library import Library

        self.model, self.size, self.nets = model, 128, []
        self.library, self.backend = Library([base / "models" / "trt_engines"]), backends()["torch"]
        size = Range(128, 128, 128)
        profile = Profile({"B": Range(2, 2, 2), "H": size, "W": size, "T": Range(77, 77, 77)})
        self.choice = EngineChoice(profile, "auto", "torch")
        self.networks = {"unet": NativeNetwork.of_model(model, "unet")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    networks.import_pack(options.comfyui)
    rows = []
    with torch.inference_mode():
        for case in options.cases:
            rows.append(measure(case, options.comfyui, options.base))
            print(json.dumps(rows[-1]), flush=True)
            meta = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__}
            options.out.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
