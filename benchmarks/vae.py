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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import networks
import torch
from timing import gpu_ms, kernels

WAN = {"dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "temperal_downsample": [False, True, True]}
WAN21, WAN22 = {**WAN, "dim": 96, "z_dim": 16}, {**WAN, "dim": 160, "dec_dim": 256, "z_dim": 48}
SHOWN = 9
"""Frames of a video that are compared with float32."""


@dataclass(frozen=True)
class Case:
    """A call of a VAE for a picture or video of a size; ``file`` is of ``models.py``, or names a VAE below."""

    file: str
    call: str
    width: int
    height: int
    frames: int = 1


CASES = {
    "vae_decode_1024": Case("full_kl", "decode", 1024, 1024), "vae_decode_512": Case("full_kl", "decode", 512, 512),
    "vae_encode_1024": Case("full_kl", "encode", 1024, 1024),
    "taesd_decode_512": Case("full_taesd", "decode", 512, 512),
    "wan_vae_decode_480_81": Case("wan21", "decode", 832, 480, 81),
    "wan_vae_decode_1024": Case("wan21", "decode", 1024, 1024),
    "wan_vae_encode_480_81": Case("wan21", "encode", 832, 480, 81),
    "wan22_vae_decode_704_121": Case("wan22", "decode", 1280, 704, 121),
    "h3_vae_decode_480_124": Case("h3", "decode", 832, 480, 124),
    "ltx2_vae_decode_704_121": Case("ltx2", "decode", 1280, 704, 121),
    "hunyuan15_vae_decode_480_81": Case("hunyuan15", "decode", 832, 480, 81),
    "hunyuan_image_vae_decode_2048": Case("hunyuan_image", "decode", 2048, 2048),
}
VIDEOS = ("wan21", "wan22", "h3", "ltx2", "hunyuan15")
UNITS = {"wan22": 16, "h3": 16, "ltx2": 32, "hunyuan15": 16, "hunyuan_image": 32}
"""Pixels of a latent element along each side, where these are not 8."""
HUNYUAN = {"in_channels": 3, "out_channels": 3, "num_res_blocks": 2}
HUNYUAN15 = {**HUNYUAN, "block_out_channels": [128, 256, 512, 1024, 1024], "z_channels": 32, "ffactor_spatial": 16,
             "ffactor_temporal": 4}  # fmt: skip
HUNYUAN_IMAGE = {**HUNYUAN, "block_out_channels": [128, 256, 512, 512, 1024, 1024], "z_channels": 64,
                 "ffactor_spatial": 32}  # fmt: skip


def loaded(case: Case, comfyui: Path, base: Path) -> Any:
    """Return ComfyUI's VAE with random weights."""
    import comfy.sd
    import comfy.utils
    from comfy.ldm.lightricks.vae.causal_video_autoencoder import VideoVAE

    if case.file not in (*VIDEOS, "hunyuan_image"):
        (path,) = models.make(comfyui, base, [case.file]).values()
        return comfy.sd.VAE(sd=comfy.utils.load_torch_file(str(path)))
    return comfy.sd.VAE(sd=drawn(case.file), metadata={"config": json.dumps({"vae": ltx2(VideoVAE)})})


def drawn(kind: str) -> dict[str, torch.Tensor]:
    """Return random weights of a VAE that no file of ``models.py`` has."""
    from comfy.ldm.lightricks.vae.causal_video_autoencoder import VideoVAE
    from comfy.ldm.minimax.vae import MiniMaxH3VideoVAE
    from comfy.ldm.wan import vae as wan21
    from comfy.ldm.wan import vae2_2 as wan22

    with torch.device("meta"):
        module = {"wan21": lambda: wan21.WanVAE(**WAN21), "wan22": lambda: wan22.WanVAE(**WAN22),
                  "h3": MiniMaxH3VideoVAE, "ltx2": lambda: VideoVAE(config=ltx2(VideoVAE)),
                  "hunyuan15": lambda: hunyuan("vae_refiner", "EmptyRegularizer", HUNYUAN15),
                  "hunyuan_image": lambda: hunyuan("vae", "DiagonalGaussianRegularizer", HUNYUAN_IMAGE),
                  }[kind]()  # fmt: skip
    generator, weights = torch.Generator().manual_seed(3), {}
    for name, weight in module.state_dict().items():
        draw = torch.randn(weight.shape, generator=generator)
        kernel = weight.ndim > 1 and "gamma" not in name
        weights[name] = draw * weight[0].numel() ** -0.5 if kernel else 0.05 * draw + (0.0 if "bias" in name else 1.0)
    return weights


def ltx2(kind: Any) -> dict[str, Any]:
    """Return the settings of LTX-2's VAE, which its file holds."""
    return kind.get_default_config(None, 2) | {"timestep_conditioning": False}


def hunyuan(place: str, regularizer: str, sizes: dict[str, Any]) -> torch.nn.Module:
    """Return a VAE of HunyuanVideo 1.5 or HunyuanImage 2.1."""
    from comfy.ldm.models.autoencoder import AutoencodingEngine

    halves = {f"{half.lower()}_config": {"target": f"comfy.ldm.hunyuan_video.{place}.{half}", "params": sizes}
              for half in ("Encoder", "Decoder")}  # fmt: skip
    return AutoencodingEngine(regularizer_config={"target": f"comfy.ldm.models.autoencoder.{regularizer}"}, **halves)


def given_to(case: Case, vae: Any) -> torch.Tensor:
    """Return random latents, or pixels from -1 to 1."""
    unit = UNITS.get(case.file, 8)
    video = case.file in VIDEOS
    sides, frames = (case.height, case.width), [case.frames] if video else []
    if case.call == "decode":
        latents = (case.frames - 1) // (8 if case.file == "ltx2" else 4) + 1
        latents = (case.frames - 5) // 17 * 5 + 2 if case.file == "h3" else latents
        sides, frames = tuple(side // unit for side in sides), [latents] if video else []
    shape = (1, vae.latent_channels if case.call == "decode" else 3, *frames, *sides)
    given = torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(vae.device, vae.vae_dtype)
    return given.clamp(-1, 1) if case.call == "encode" else given


def measure(name: str, comfyui: Path, base: Path, profile: bool) -> dict[str, Any]:
    """Return a case's row; the engine is built first, unless the library has it."""
    from comfy import model_management

    case = CASES[name]
    vae = loaded(case, comfyui, base)
    model_management.load_models_gpu([vae.patcher])
    given = given_to(case, vae)
    shown = given[:, :, :SHOWN if case.call == "encode" else SHOWN // 4 + 1] if case.frames > 1 else given
    exact = reference(vae, case.call, shown)
    row: dict[str, Any] = {"case": name, "dtype": str(vae.vae_dtype)}
    calls = {"warm": 1, "repeats": 5} if case.frames > 1 else {}
    for way in ("native", "engine"):  # native first: the engine's session puts shared weights into its own layout
        if way == "engine":
            backed, row["build_s"] = accelerated(vae, case, base)
        run = getattr((vae if way == "native" else backed).first_stage_model, case.call)
        result = run(shown)
        row[f"error_{way}_fp32"] = relative_error(result, exact)
        if case.call == "decode":
            row[f"psnr_{way}"], row[f"worst_pixel_{way}"] = picture_errors(result, exact)
        del result
        row[f"{way}_ms"] = gpu_ms(lambda: run(given), **calls)["median"]  # noqa: B023
        row[f"{way}_peak_mb"] = peak(lambda: run(given))  # noqa: B023
    (handle,) = backed.first_stage_model.handles.values()
    stats = handle.stats
    if profile:
        row["engine_kernels"] = kernels(lambda: run(given))
        row["plain_blocks"] = handle.session.active.live.compiled.plain
    row |= {"calls_on_engine": stats.engine, "calls_on_native": stats.native, "reasons": stats.details}
    row["vram_ratio"] = round(row["engine_peak_mb"] / row["native_peak_mb"], 3)
    return row


def accelerated(vae: Any, case: Case, base: Path) -> tuple[Any, float]:
    """Return the VAE with an engine for a case, and the seconds that its build took."""
    from hybrid_trt.architectures import Role
    from hybrid_trt.architectures.shapes import RequestedSizes
    from hybrid_trt.backends import backends
    from hybrid_trt.backends.lookup import EngineChoice
    from hybrid_trt.comfy_model.network import NativeNetwork
    from hybrid_trt.engine_builder.build import build_engine
    from hybrid_trt.engine_builder.order import BuildOrder
    from hybrid_trt.engine_library import Library
    from hybrid_trt.sampling.engine_handle import EngineHandle
    from hybrid_trt.sampling.vae import vae_with_engines

    role = Role.VAE_DECODER if case.call == "decode" else Role.VAE_ENCODER
    network, library = NativeNetwork.of_vae(vae, role, case.call), Library([base / "models" / "trt_engines"])
    profile = network.architecture().profile(RequestedSizes())
    order = BuildOrder(network, network.precision, profile, backends()["torch"])
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
    exact = exact.to(result.device)  # native may give frames in main memory
    return float((result.float() - exact).norm() / exact.norm())


def picture_errors(result: torch.Tensor, exact: torch.Tensor) -> tuple[float, int]:
    """Return the PSNR of a decoded picture in decibels, and the largest difference of an 8-bit pixel."""
    one, other = ((t.float().to(result.device) / 2 + 0.5).clamp(0, 1) for t in (result, exact))
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
    parser.add_argument("--profile", action="store_true", help="also the kernels of a call of the engine")
    options = parser.parse_args()
    networks.import_pack(options.comfyui)
    rows = []
    with torch.inference_mode():
        for case in options.cases:
            rows.append(measure(case, options.comfyui, options.base, options.profile))
            print(json.dumps(rows[-1]), flush=True)
            meta = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__}
            options.out.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
