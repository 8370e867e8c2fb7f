"""A VAE's calls on the torch backend's engines against native's, and both against native in float32.

    python benchmarks/vae.py --comfyui ~/ComfyUI --base /tmp/benchmark --out benchmarks/results/vae_h200.json

Native and engine are timed in one process. Each row is a case: ``native_ms`` and ``engine_ms`` are medians of a call,
``error_*_fp32`` relative errors, ``psnr_*`` and ``worst_pixel_*`` those of the decoded 8-bit picture,
``vram_ratio`` the engine's peak of GPU memory by native's. Weights are random.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import time
from pathlib import Path
from typing import Any

import models
import networks
import torch
from timing import gpu_ms

CASES = {
    "vae_decode_1024": ("full_kl", "decode", 1024), "vae_decode_512": ("full_kl", "decode", 512),
    "vae_encode_1024": ("full_kl", "encode", 1024), "taesd_decode_512": ("full_taesd", "decode", 512),
}


def measure(case: str, comfyui: Path, base: Path) -> dict[str, Any]:
    """Return a case's row; the engine is built first, unless the library has it."""
    import comfy.sd
    import comfy.utils
    from comfy import model_management

    file, call, side = CASES[case]
    (path,) = models.make(comfyui, base, [file]).values()
    vae = comfy.sd.VAE(sd=comfy.utils.load_torch_file(str(path)))
    model_management.load_models_gpu([vae.patcher])
    shape = (1, vae.latent_channels, side // 8, side // 8) if call == "decode" else (1, 3, side, side)
    given = torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(vae.device, vae.vae_dtype)
    if call == "encode":
        given = given.clamp(-1, 1)
    exact = reference(vae, call, given)
    row: dict[str, Any] = {"case": case, "dtype": str(vae.vae_dtype)}
    for name in ("native", "engine"):  # native first: the engine's session puts shared weights into its own layout
        if name == "engine":
            backed, row["build_s"] = accelerated(vae, call, side, base)
        run = getattr((vae if name == "native" else backed).first_stage_model, call)
        result = run(given)
        row[f"error_{name}_fp32"] = relative_error(result, exact)
        if call == "decode":
            row[f"psnr_{name}"], row[f"worst_pixel_{name}"] = picture_errors(result, exact)
        del result
        row[f"{name}_ms"] = gpu_ms(lambda: run(given))["median"]  # noqa: B023
        row[f"{name}_peak_mb"] = peak(lambda: run(given))  # noqa: B023
    stats = next(iter(backed.first_stage_model.handles.values())).stats
    row |= {"calls_on_engine": stats.engine, "calls_on_native": stats.native, "reasons": stats.details}
    row["vram_ratio"] = round(row["engine_peak_mb"] / row["native_peak_mb"], 3)
    return row


def accelerated(vae: Any, call: str, side: int, base: Path) -> tuple[Any, float]:
    """Return the VAE with an engine for pictures of a size, and the seconds that its build took."""
    from hybrid_trt.architectures import Role
    from hybrid_trt.architectures.shapes import Picture, RequestedSizes
    from hybrid_trt.backends import backends
    from hybrid_trt.backends.lookup import EngineChoice
    from hybrid_trt.comfy_model.network import NativeNetwork
    from hybrid_trt.engine_builder.build import build_engine
    from hybrid_trt.engine_builder.order import BuildOrder
    from hybrid_trt.engine_library import Library
    from hybrid_trt.sampling.engine_handle import EngineHandle
    from hybrid_trt.sampling.vae import vae_with_engines

    role = Role.VAE_DECODER if call == "decode" else Role.VAE_ENCODER
    network, library = NativeNetwork.of_vae(vae, role, call), Library([base / "models" / "trt_engines"])
    profile = network.architecture().profile(RequestedSizes())
    calls = network.architecture().calls(profile, Picture(side, side, (1,)))
    order = BuildOrder(network, network.precision, profile.around(calls), backends()["torch"], calls=tuple(calls))
    started = time.perf_counter()
    build_engine(order, library, lambda *_: None)
    seconds = round(time.perf_counter() - started, 1)
    handle = EngineHandle.look_up(network, EngineChoice(profile, backend="torch"), library, "benchmark")
    return vae_with_engines(vae, {role: handle}), seconds


def reference(vae: Any, call: str, given: torch.Tensor) -> torch.Tensor:
    """Return what native computes in float32."""
    exact = copy.deepcopy(vae.first_stage_model).float()
    return getattr(exact, call)(given.float())


def relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return float((result.float() - exact).norm() / exact.norm())


def picture_errors(result: torch.Tensor, exact: torch.Tensor) -> tuple[float, int]:
    """Return the PSNR of a decoded picture in decibels, and the largest difference of an 8-bit pixel."""
    one, other = ((t.float() / 2 + 0.5).clamp(0, 1) for t in (result, exact))
    error = float((one - other).square().mean())
    worst = ((255 * one).round() - (255 * other).round()).abs().max()
    return round(-10 * math.log10(max(error, 1e-12)), 2), int(worst)


def peak(run: Any) -> float:
    """Return the MB of GPU memory that torch takes at the height of a call."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return round(torch.cuda.max_memory_allocated() / 1e6, 1)


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


if __name__ == "__main__":
    main()
