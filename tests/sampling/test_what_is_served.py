"""Kinds of models that engines serve: each is tried in a real ComfyUI, and docs/models.md has just these."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import slow
from comfy_process import ComfyProcess
from scenarios import (
    A,
    Control,
    Prompt,
    Scenario,
    compare,
    control_effect,
    latent_of,
    node,
    prompt,
    relative_difference,
)

TESTS = Path(__file__).resolve().parents[1]
MODELS = TESTS.parent / "docs" / "models.md"
LIMIT = 1e-5
BUILD = {"when_missing": "build now"}
XL = Scenario("sdxl", width=64, height=64, controls=(), settings=BUILD, steps=2)
FLUX = XL.but(family="flux1", cfg=1.0)
SD15 = Scenario(width=64, height=64, controls=(), settings=BUILD, steps=2)


def union(kind: str, image: int = 1, strength: float = 0.8, before: bool = False, file: str = "tiny_sdxl_a") -> Control:
    """A union ControlNet whose type is set in front of its engine node, or behind it."""
    parts = (("TestUnionControlNet", {"types": 8}),) if file == "tiny_sdxl_a" else ()  # other files are such themselves
    kinds = (("SetUnionControlNetType", {"type": kind}),)
    ways = {"before": parts + kinds} if before else {"before": parts, "after": kinds}
    return Control(file, image, strength, **ways)


@dataclass(frozen=True)
class Kind:
    """A row of the table in docs/models.md.

    Attributes:
        scenarios: tried one after the other on the same engines; each ControlNet of them has to act.
        reason: why the first ControlNet runs native, and is counted nowhere; None when all is served.
        limit: the largest error.
    """

    scenarios: Sequence[Scenario]
    reason: str | None = None
    limit: float = LIMIT


TORCH = {"backend": "torch"}
QUANTISED = XL.but(
    controls=(Control("tiny_sdxl_a", 1, 0.7), Control("tiny_sdxl_b", 2, 0.5)), settings=TORCH,
    loras_before=[("LoraLoaderModelOnly", {"lora_name": "tiny_sdxl_lora.safetensors", "strength_model": 0.8})],
)  # fmt: skip
INT8 = 0.05
"""Of layers that round their inputs, see ``test_int8_on_an_engine_is_as_near_to_the_plain_model_as_native_is``."""
ZIMAGE = Scenario("zimage", "tiny_zimage", controls=(), width=64, height=64, settings=BUILD, steps=2)
Z_LORA = ("LoraLoaderModelOnly", {"lora_name": "tiny_zimage_lora.safetensors", "strength_model": 0.8})
ADAPTER = Control("tiny_sd15_t2i", 3, 0.9, engine=False)
KINDS = {
    "LCM and Turbo": Kind([
        SD15.but(patches=(("ModelSamplingDiscrete", {"sampling": "lcm", "zsnr": False}),), sampler="lcm", cfg=1.0,
                 controls=(A,)),
    ]),
    "union ControlNets": Kind([
        XL.but(controls=(union("depth", before=True),)),
        XL.but(controls=(union("canny/lineart/anime_lineart/mlsd"), Control("tiny_sdxl_a", 2, 0.5))),
        XL.but(controls=(union("auto", 3), union("tile", 2, 0.4)), batch=2),
        XL.but(controls=(Control("tiny_sdxl_a", 2, 0.5, 0.0, 0.5), union("repaint")), apply="stock", width=136),
    ]),
    "T2I-adapters": Kind([
        SD15.but(unet="tiny_sd15_t2i_unet", controls=(ADAPTER,)),
        SD15.but(unet="tiny_sd15_t2i_unet", controls=(ADAPTER, Control("tiny_sd15_flat_a", 1, 0.6)), batch=2),
        SD15.but(unet="tiny_sd15_t2i_unet", apply="stock", controls=(
            Control("tiny_sd15_flat_a", 1, 0.6), Control("tiny_sd15_t2i", 2, 0.7, 0.0, 0.6, engine=False))),
    ]),
    "ControlNet shuffle (averaged residuals)": Kind([
        SD15.but(controls=(Control("tiny_sd15_shuffle", 2, 1.0), A)),
    ]),
    "Z-Image in fp8": Kind([ZIMAGE.but(unet="tiny_zimage_fp8", settings=TORCH, loras_before=[Z_LORA])]),
    "Z-Image in int8": Kind([ZIMAGE.but(unet="tiny_zimage_int8", settings=TORCH)], limit=INT8),
    "Flux.1 (dev, schnell, Kontext, Fill)": Kind([FLUX.but(tokens=(154, 77), cfg=3.0, settings=TORCH)]),
    "Flux.2 (dev, klein)": Kind([FLUX.but(unet="tiny_flux2_klein_unet")]),
    "ControlNets of Flux.1 (InstantX, Union)": Kind([
        FLUX.but(controls=(union("depth", 2, 0.6, file="tiny_flux1_union"), Control("tiny_flux1_a", 1, 0.4)),
                 vae="tiny_flux_kl"),
    ]),
    "ControlNets of Flux.1 (XLabs, Mistoline)": Kind([
        FLUX.but(controls=(Control("tiny_flux1_mistoline", 1, 0.7), Control("tiny_flux1_xlabs", 2, 0.5, 0.0, 0.5)),
                 cfg=3.0, width=144, height=80),
    ]),
    "Control-LoRAs": Kind([SD15.but(controls=(Control("tiny_sd15_control_lora", 1, 0.5), A))], "unsupported model"),
}  # fmt: skip


ELSEWHERE = {
    "SD1.5 and SD2": "sampling/test_parity.py",
    "SDXL": "sampling/test_parity.py",
    "inpainting and instruct-pix2pix UNets": "sampling/test_what_is_served.py",
    "int8 checkpoints (`comfy_quant`)": "sampling/test_what_is_served.py",
    "fp8 checkpoints (`comfy_quant`, `scaled_fp8`)": "backends/test_quantised_engines.py",
    "Anima with LLLite": "families/test_absorbed_patches.py",
    "Z-Image with Fun control": "families/test_absorbed_patches.py",
} | dict.fromkeys((
    "Qwen-Image and Qwen-Image-Edit", "Krea 2", "Anima", "Wan 2.1 and 2.2 (text and image to video)", "VACE of Wan",
    "HunyuanVideo 1.5", "HunyuanVideo, HunyuanImage 2.1", "Z-Image, Turbo and base",
), "families/test_family_prompts.py")  # fmt: skip
"""Kinds of which other tests compare whole prompts with native; ``test_random_families.py`` does in a server too."""


ONE = {name: (name, kind.scenarios[:1]) for name, kind in KINDS.items()}
ALL = {f"all of {name}": (name, kind.scenarios) for name, kind in KINDS.items() if len(kind.scenarios) > 1}


@pytest.mark.parametrize(("name", "scenarios"), slow.cases(ONE | ALL, ALL))
def test_it_gives_natives_latent(sdxl: ComfyProcess, name: str, scenarios: Sequence[Scenario]) -> None:
    kind = KINDS[name]
    for number, scenario in enumerate(scenarios):
        result = compare(sdxl, scenario)
        assert result.error <= kind.limit, number
        assert result.all_on_engines(), (number, result.report)
        assert result.unet["engine"] > 0
        for i in range(len(scenario.controls)):
            assert control_effect(sdxl, scenario, without=i) > 0.01, (number, i)
        if kind.reason is None:
            continue
        (status,) = result.history.output(f"engine_{scenario.controls[0].file}", "text")
        assert kind.reason in status
        assert scenario.controls[0].file not in result.controlnets, "it is not counted as ours"


def test_int8_on_an_engine_is_as_near_to_the_plain_model_as_native_is(sdxl: ComfyProcess) -> None:
    """A layer rounds its inputs anew in each call, so a last bit changes codes: native's own result moves by 1.5 %
    when a strength changes by 1e-4."""
    scenario = QUANTISED.but(unet="tiny_sdxl_int8_unet")
    plain = latent_of(sdxl.queue(prompt(QUANTISED, False, "plain")))
    native = latent_of(sdxl.queue(prompt(scenario, False, "int8")))
    history = sdxl.queue(prompt(scenario, True, "int8"))
    engine = latent_of(history)
    assert all(row["native"] == 0 < row["engine"] for row in history.output("report", "report")[0]["rows"])
    assert relative_difference(engine, plain) <= 1.2 * relative_difference(native, plain)
    assert relative_difference(engine, native) <= relative_difference(native, plain)


def test_types_of_a_union_controlnet_give_other_pictures_on_one_engine(sdxl: ComfyProcess) -> None:
    kinds = ("depth", "tile", "auto", "depth")
    latents = []
    for kind in kinds:
        result = compare(sdxl, XL.but(controls=(union(kind),)))
        assert result.error <= LIMIT
        latents.append(latent_of(result.history))  # the next prompt writes to the same file
    depth, tile, auto, again = latents
    assert min(relative_difference(depth, other) for other in (tile, auto)) > 0.01
    assert relative_difference(depth, again) == 0


def test_an_instruct_pix2pix_picture_is_natives(sdxl: ComfyProcess) -> None:
    """Its UNet gets the picture to change as further channels of the latent."""
    scenario = SD15.but(unet="tiny_sd15_ip2p_unet")

    def graph(engines: bool) -> Prompt:
        built: dict[str, Any] = prompt(scenario, engines, "ip2p")
        built["vae"] = node("CheckpointLoaderSimple", ckpt_name="tiny_sd15.safetensors")
        built["picture"] = node("TestImage", seed=4, width=128, height=128, batch=1, channels=3)
        built["edit"] = node("InstructPixToPixConditioning", positive=["positive", 0], negative=["negative", 0],
                             vae=["vae", 2], pixels=["picture", 0])
        built["sampler"]["inputs"] |= {"positive": ["edit", 0], "negative": ["edit", 1], "latent_image": ["edit", 2]}
        return built

    native = latent_of(sdxl.queue(graph(False)))
    history = sdxl.queue(graph(True))
    assert relative_difference(latent_of(history), native) <= LIMIT
    assert history.output("report", "report")[0]["unet"] == {"engine": 2, "native": 0, "reasons": {}}


VAES = {
    "KL autoencoders of SD1.5, SD2 and SDXL": "tiny_kl",
    "KL autoencoders of SD3, Flux.1 and Z-Image": "tiny_flux_kl",
    "KL autoencoder of Flux.2": "tiny_flux2_kl",
    "TAESD": "tiny_sdxl_taesd",
}
"""Row of the table of VAEs -> the file that is tried."""
OTHER_VAES = "videos, sound"
"""The row of those without an engine; ``test_vae.py`` tries one."""


def through_vae(file: str, engines: bool, tiled: bool, width: int, height: int, batch: int) -> Prompt:
    """Pictures that a VAE encodes and decodes."""
    vae, kind = ["node" if engines else "loader", 0], "Tiled" if tiled else ""
    last = {"tile_size": 128, "overlap": 32, "temporal_size": 64, "temporal_overlap": 8} if tiled else {}
    built = {
        "loader": node("VAELoader", vae_name=f"{file}.safetensors"),
        "image": node("TestImage", seed=1, width=width, height=height, batch=batch, channels=3),
        "encode": node(f"VAEEncode{kind}", pixels=["image", 0], vae=vae, **last),
        "decode": node(f"VAEDecode{kind}", samples=["encode", 0], vae=vae, **last),
        "pixels": node("TestPixels", image=["decode", 0]),
        "save": node("TestSaveLatent", latent=["pixels", 0], name="vae"),
    }
    if engines:
        settings = {**BUILD, "min_size": 32, "opt_size": 128, "max_size": 256, "backend": "onnxruntime"}
        built["node"] = node("TRTVAEEngine", vae=["loader", 0], **settings)
        built["report"] = node("TRTReport", after=["decode", 0])
    return built


@pytest.mark.parametrize("name", slow.cases({name: name for name in VAES}, VAES.keys() - {"TAESD"}))
def test_a_vae_gives_natives_picture(sdxl: ComfyProcess, name: str) -> None:
    for tiled, *size in ((False, 136, 120, 3), (False, 101, 139, 1), (True, 200, 168, 1)):
        native = latent_of(sdxl.queue(through_vae(VAES[name], False, tiled, *size)))
        history = sdxl.queue(through_vae(VAES[name], True, tiled, *size), timeout=300)
        assert relative_difference(latent_of(history), native) <= LIMIT
        rows = history.output("report", "report")[0]["rows"]
        assert {row["kind"] for row in rows} == {"vae_decoder", "vae_encoder"}
        assert all(row["native"] == 0 and row["engine"] >= size[2] for row in rows), rows


def rows_of(heading: str) -> dict[str, bool]:
    """A table of docs/models.md: its rows, and whether engines serve them."""
    text = MODELS.read_text(encoding="utf-8").partition(heading)[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+?) \| (on engines|normal speed: [^|]+?) \|", text, re.MULTILINE)
    return {name: verdict == "on engines" for name, verdict in rows}


def test_the_tables_of_models_have_just_what_was_tried() -> None:
    tried = {name: kind.reason is None for name, kind in KINDS.items()} | dict.fromkeys(ELSEWHERE, True)
    assert rows_of("## Supported models") == tried
    assert all((TESTS / module).is_file() for module in ELSEWHERE.values())
    assert rows_of("## VAEs") == dict.fromkeys(VAES, True) | {OTHER_VAES: False}
