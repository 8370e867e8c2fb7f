#!/usr/bin/env python3
"""Tiny random models that ComfyUI's own loaders recognise, so that tests and the demo need no downloads.

Every tensor is drawn from a generator seeded by (seed, tensor name): the same name and seed give the same weights in
every file, and a file is a pure function of its recipe. The recipe's digest is kept in the file's metadata; a file
whose digest still fits is left alone.

    python tools/tiny_models.py --comfyui PATH --models DIR [--input DIR] [names]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import struct
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiny_recipes import RECIPES, Part, Recipe
from tiny_transformers import (
    Shapes,
    anima_lllite_shapes,
    anima_shapes,
    flux_controlnet_shapes,
    flux_pixel_controlnet_shapes,
    flux_shapes,
    hunyuan_shapes,
    krea2_shapes,
    ltx2_shapes,
    ltx_vae_shapes,
    minimax_h3_shapes,
    plain_lora_shapes,
    qwen_image21_shapes,
    qwen_image_control_shapes,
    qwen_image_shapes,
    shapes_of,
    wan_shapes,
    zimage_lora_shapes,
    zimage_shapes,
)

if TYPE_CHECKING:
    import torch

METADATA_KEY = "tiny_recipe"


def make(models_dir: Path, names: Iterable[str] | None = None,
         say: Callable[[str], None] = lambda text: None, recipes: dict[str, Recipe] | None = None) -> dict[str, Path]:
    """Make the named models (all of them without names) and return their paths by name.

    ComfyUI must be on sys.path when something is missing; when all files are there nothing heavy is imported.
    """
    recipes = RECIPES if recipes is None else recipes
    chosen = list(recipes) if names is None else list(names)
    if unknown := [name for name in chosen if name not in recipes]:
        raise ValueError(f"no such model: {', '.join(unknown)}; there are {', '.join(recipes)}")
    paths = {name: Path(models_dir) / recipes[name].file for name in chosen}
    missing = [name for name in chosen if _digest_of(paths[name]) != recipes[name].digest]
    if missing:
        import_comfy_on_cpu()
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            for name in missing:
                _write(recipes[name], paths[name], pool)
                say(f"made {paths[name]} ({paths[name].stat().st_size / 1e6:.0f} MB)")
    return paths


def make_images(input_dir: Path) -> dict[str, Path]:
    """Write two control images, white lines on black like an edge detector's: 128x128, different, deterministic."""
    from PIL import Image, ImageDraw

    Path(input_dir).mkdir(parents=True, exist_ok=True)
    paths = {}
    for name in ("control_a", "control_b"):
        image = Image.new("RGB", (128, 128))
        draw = ImageDraw.Draw(image)
        if name == "control_a":
            draw.ellipse((20, 24, 92, 96), outline="white", width=3)
            draw.line((0, 112, 60, 60, 127, 100), fill="white", width=2)
            draw.rectangle((96, 8, 118, 40), outline="white", width=2)
        else:
            draw.polygon([(64, 8), (118, 104), (12, 88)], outline="white", width=3)
            for x in range(8, 128, 24):
                draw.line((x, 127, x + 12, 100), fill="white", width=2)
            draw.arc((40, 30, 90, 80), 30, 250, fill="white", width=2)
        paths[name] = Path(input_dir) / f"{name}.png"
        temporary = paths[name].with_suffix(f".{os.getpid()}.tmp")
        image.save(temporary, "PNG")
        os.replace(temporary, paths[name])
    return paths


def make_video(input_dir: Path) -> Path:
    """Write a video of three frames of 128x128 in which a square moves."""
    import av
    import numpy

    path = Path(input_dir) / "tiny_video.mp4"
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    with av.open(str(temporary), "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width = stream.height = 128
        for n in range(3):
            pixels = numpy.full((128, 128, 3), 40, numpy.uint8)
            pixels[40:88, 16 + 24 * n : 64 + 24 * n] = (200, 120, 60)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    os.replace(temporary, path)
    return path


def import_comfy_on_cpu() -> None:
    """Let ComfyUI's modules be imported on a machine without a GPU; someone who imported them before has decided."""
    if "comfy.model_management" in sys.modules:
        return
    try:
        import comfy.cli_args  # parses no sys.argv unless main.py asked for it
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"{missing}: making tiny models needs ComfyUI on sys.path and its requirements installed") from missing
    comfy.cli_args.args.cpu = True


def _digest_of(path: Path) -> str | None:
    """The digest of the recipe that an existing file was made from, read from its header alone."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            return json.loads(file.read(length)).get("__metadata__", {}).get(METADATA_KEY)
    except (OSError, ValueError, struct.error):
        return None


def _write(recipe: Recipe, path: Path, pool: ThreadPoolExecutor) -> None:
    """Draw all tensors of a recipe and put the file in place in one step."""
    from safetensors.torch import save_file

    jobs = {}
    for part in recipe.parts:
        draw = _DRAW.get(part.network, _draw)
        for name, shape in _SHAPES[part.network](part.config).items():
            jobs[part.prefix + name] = pool.submit(draw, part, name, shape)
    tensors = {key: job.result() for key, job in jobs.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        config = {_IN_METADATA[part.network]: part.config for part in recipe.parts if part.network in _IN_METADATA}
        settings = {"config": json.dumps(config)} if config else {}
        save_file(tensors, temporary, metadata={METADATA_KEY: recipe.digest, **settings})
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _draw(part: Part, name: str, shape: tuple[int, ...], gain: float = 1.0) -> torch.Tensor:
    """Random fp16 values that keep activations near one: weights by fan-in, norms about one, no bias quite zero.

    A ControlNet's zero convolutions are drawn like any other weight: at zero it would have no effect to test.
    """
    import torch

    seed = int.from_bytes(hashlib.sha256(f"{part.seed}/{name}".encode()).digest()[:7], "little")
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if len(shape) > 1:
        values *= gain / math.sqrt(math.prod(shape[1:]))
    else:
        values *= 0.05
        if name.endswith("weight"):  # the scale of a norm layer
            values += 1.0
    return values.half()


def _draw_taesd(part: Part, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """As `_draw`, with the family's latent scale, and pictures that are neither black nor white."""
    import torch

    if name == "vae_scale":
        return torch.tensor(part.config["scale"])
    if name == "vae_shift":
        return torch.tensor(0.0)
    # Quiet last convolutions (of each residual block, of the decoder) keep pixels off the limits of 0 and 1.
    gain = 0.3 if name == "taesd_decoder.19.weight" else 0.3 if name.endswith(".conv.4.weight") else 1.0
    values = _draw(part, name, shape, gain)
    return values + 0.5 if name == "taesd_decoder.19.bias" else values


def _draw_vae(part: Part, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """As `_draw`, with statistics of the latent that are not 0 and 1."""
    values = _draw(part, name, shape)
    return 10 * values if name == "bn.running_mean" else 1 + 10 * values.abs() if name == "bn.running_var" else values


def _draw_controlnet(part: Part, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """As `_draw`, with a loud hint encoder: eight plain layers would leave under 1 % of the image in the residuals."""
    loud = name.startswith(("input_hint_block.", "input_cond_block."))
    return _draw(part, name, shape, gain=1.65 if loud else 1.0)


def _draw_quantised(part: Part, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """As `_draw`, in eight bits with one scale, the same for all layers, where `_quantised_shapes` has one."""
    import torch

    kind, (dtype, scale) = part.config["format"], _QUANTISED[part.config["format"]]
    if name.endswith(".comfy_quant"):
        return torch.tensor(list(_quantised_as(kind)), dtype=torch.uint8)
    if name.endswith(".weight_scale"):
        return torch.tensor(scale)
    values = _draw(part, name, shape)
    if not _is_quantised(name, shape):
        return values
    codes = values.float() / scale
    return (codes if dtype.startswith("float8") else codes.round().clamp(-127, 127)).to(getattr(torch, dtype))


def _draw_low_rank(part: Part, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """As `_draw`, plus alpha and marker. Up's fan-in is the rank, so up x down is as large as the weight it changes."""
    import torch

    if name.endswith(".alpha"):
        return torch.tensor(float(part.config["rank"]))
    if name == "lora_controlnet":
        return torch.empty(0)
    return _draw_controlnet(part, name, shape)


def _unet_shapes(config: dict[str, Any]) -> Shapes:
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    return shapes_of(lambda: UNetModel(**config))


_QUANTISED = {"float8_e4m3fn": ("float8_e4m3fn", 1 / 1024), "int8_tensorwise": ("int8", 1 / 384)}
"""ComfyUI's formats -> dtype and scale of their weights here."""


def _quantised_as(kind: str) -> bytes:
    """The tensor by which a file says that a layer is quantised."""
    return json.dumps({"format": kind}).encode()


def _is_quantised(name: str, shape: tuple[int, ...]) -> bool:
    """Attention and feed-forward layers are."""
    marks = (".transformer_blocks.", ".attention.", ".feed_forward.", "double_blocks.", "single_blocks.")
    return len(shape) == 2 and any(part in name for part in marks)


def _quantised_shapes(config: dict[str, Any], of: Callable[[dict[str, Any]], Shapes] = _unet_shapes) -> Shapes:
    """A network whose attention and feed-forward layers are in one of ComfyUI's quantised formats."""
    shapes: Shapes = {}
    config = dict(config)
    marker = _quantised_as(config.pop("format"))
    for name, shape in of(config).items():
        shapes[name] = shape
        if _is_quantised(name, shape):
            layer = name.removesuffix(".weight")
            shapes |= {f"{layer}.weight_scale": (), f"{layer}.comfy_quant": (len(marker),)}
    return shapes


def _controlnet_shapes(config: dict[str, Any]) -> Shapes:
    from comfy.cldm.cldm import ControlNet

    config = {key: value for key, value in config.items() if key not in ("out_channels", "transformer_depth_output")}
    return shapes_of(lambda: ControlNet(hint_channels=3, **config))


def _taesd_shapes(config: dict[str, Any]) -> Shapes:
    from comfy.taesd.taesd import TAESD

    return shapes_of(TAESD)


def _vae_shapes(config: dict[str, Any]) -> Shapes:
    """A KL autoencoder at its full size, or with a decoder of ``decoder_ch`` channels; with 16 as SD3 and Flux.1."""
    from comfy.ldm.models.autoencoder import AutoencoderKL

    channels = config.get("z_channels", 4)
    layers = {"double_z": True, "z_channels": channels, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128,
              "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0,
              "batch_norm_latent": "statistics" in config}
    decoder = layers | {"ch": config.get("decoder_ch", layers["ch"])}
    shapes = shapes_of(lambda: AutoencoderKL(ddconfig=layers, decoder_ddconfig=decoder, embed_dim=channels))
    return {name: shape for name, shape in shapes.items() if channels != 16 or "quant_conv" not in name}


def _video_vae_shapes(config: dict[str, Any]) -> Shapes:
    """The autoencoder of Wan 2.1, Qwen-Image and Krea 2, whose width ComfyUI reads off the file."""
    from comfy.ldm.wan.vae import WanVAE

    return shapes_of(lambda: WanVAE(**config, temperal_downsample=[False, True, True]))


def _nothing_shapes(config: dict[str, Any]) -> Shapes:
    return {"nothing": (1,)}


def _clip_l_shapes(config: dict[str, Any]) -> Shapes:
    """CLIP-L at its full size (ComfyUI fixes it): only the projection, which SD1.5 files lack, is left out."""
    import comfy.clip_model
    import comfy.ops
    import torch

    clip = json.loads(Path(comfy.clip_model.__file__).with_name("sd1_clip_config.json").read_text(encoding="utf-8"))
    shapes = shapes_of(lambda: comfy.clip_model.CLIPTextModel(
        clip, torch.float32, torch.device("meta"), comfy.ops.disable_weight_init))
    return {name: shape for name, shape in shapes.items() if name.startswith("text_model.")}


def _t2i_adapter_shapes(config: dict[str, Any]) -> Shapes:
    from comfy.t2i_adapter.adapter import Adapter_light

    return shapes_of(lambda: Adapter_light(cin=3 * 8 * 8, channels=[320, 640, 1280, 1280], nums_rb=4))


def _control_lora_shapes(config: dict[str, Any]) -> Shapes:
    """Low-rank changes of what a ControlNet shares with its UNet, and whole weights for what it has alone."""
    config = dict(config)
    rank = config.pop("rank")
    shared = _unet_shapes(config)
    shapes: Shapes = {"lora_controlnet": (0,)}
    for name, shape in _controlnet_shapes(config).items():
        if name not in shared:
            shapes[name] = shape
        elif len(shape) > 1:
            stem = name.removesuffix(".weight")
            shapes[f"{stem}.up"] = (shape[0], rank)
            shapes[f"{stem}.down"] = (rank, math.prod(shape[1:]))
    return shapes


def _lora_shapes(config: dict[str, Any]) -> Shapes:
    return _lora(_unet_shapes, config)


def _flux_lora_shapes(config: dict[str, Any]) -> Shapes:
    return _lora(flux_shapes, config)


def _lora(of: Callable[[dict[str, Any]], Shapes], config: dict[str, Any]) -> Shapes:
    """A LoRA in kohya's naming on all attention and feed-forward layers."""
    config = dict(config)
    rank = config.pop("rank")
    shapes: Shapes = {}
    for name, shape in of(config).items():
        if _is_quantised(name, shape):
            stem = "lora_unet_" + name.removesuffix(".weight").replace(".", "_")
            shapes[f"{stem}.lora_up.weight"] = (shape[0], rank)
            shapes[f"{stem}.lora_down.weight"] = (rank, shape[1])
            shapes[f"{stem}.alpha"] = ()
    return shapes


_SHAPES: dict[str, Callable[[dict[str, Any]], Shapes]] = {
    "unet": _unet_shapes, "controlnet": _controlnet_shapes, "taesd": _taesd_shapes, "vae": _vae_shapes,
    "video_vae": _video_vae_shapes, "nothing": _nothing_shapes, "ltx_vae": ltx_vae_shapes,
    "clip_l": _clip_l_shapes, "t2i_adapter": _t2i_adapter_shapes, "control_lora": _control_lora_shapes,
    "lora": _lora_shapes, "zimage": zimage_shapes, "quantised_unet": _quantised_shapes,
    "quantised_zimage": partial(_quantised_shapes, of=zimage_shapes), "zimage_lora": zimage_lora_shapes,
    "flux": flux_shapes, "flux_controlnet": flux_controlnet_shapes, "flux_lora": _flux_lora_shapes,
    "flux_pixel_controlnet": flux_pixel_controlnet_shapes,
    "quantised_flux": partial(_quantised_shapes, of=flux_shapes),
    "qwen_image": qwen_image_shapes, "krea2": krea2_shapes, "qwen_image_control": qwen_image_control_shapes,
    "wan": wan_shapes, "anima": anima_shapes, "anima_lllite": anima_lllite_shapes, "hunyuan": hunyuan_shapes,
    "minimax_h3": minimax_h3_shapes, "ltx2": ltx2_shapes, "qwen_image21": qwen_image21_shapes,
    "krea2_lora": partial(plain_lora_shapes, of=krea2_shapes, ends=(".attn.wq", ".mlp.up")),
    "wan_lora": partial(plain_lora_shapes, of=wan_shapes, ends=(".self_attn.q", ".ffn.2"))}
_IN_METADATA = {"ltx2": "transformer", "ltx_vae": "vae"}
"""Networks whose sizes are in a file's metadata, and by which name."""
_DRAW: dict[str, Callable[[Part, str, tuple[int, ...]], torch.Tensor]] = {
    "taesd": _draw_taesd, "vae": _draw_vae, "controlnet": _draw_controlnet,
    "flux_pixel_controlnet": _draw_controlnet, "control_lora": _draw_low_rank,
    "lora": _draw_low_rank, "flux_lora": _draw_low_rank,
    **dict.fromkeys(("quantised_unet", "quantised_zimage", "quantised_flux"), _draw_quantised)}


def main(arguments: list[str] | None = None) -> None:
    """Command line: make models, and control images when an input directory is given."""
    parser = argparse.ArgumentParser(description="Make tiny random models that ComfyUI's own loaders recognise.")
    parser.add_argument("--comfyui", type=Path, required=True, help="where ComfyUI's source lies")
    parser.add_argument("--models", type=Path, required=True, help="ComfyUI's models directory")
    parser.add_argument("--input", type=Path, help="ComfyUI's input directory: put two control images there")
    parser.add_argument("names", nargs="*", help=f"which ones (default: all): {', '.join(RECIPES)}")
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(options.comfyui.resolve()))
    make(options.models, options.names or None, lambda text: print(text, flush=True))
    if options.input:
        make_images(options.input)
        make_video(options.input)


if __name__ == "__main__":
    main()
