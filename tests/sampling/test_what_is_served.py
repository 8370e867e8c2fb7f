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
    FUN,
    FUN_PARTS,
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

MODELS = Path(__file__).resolve().parents[2] / "docs" / "models.md"
LIMIT = 1e-5
BUILD = {"when_missing": "build now"}
XL = Scenario("sdxl", width=64, height=64, controls=(), settings=BUILD, steps=2)
FLUX = XL.but(family="flux1", cfg=1.0)
FLUX_VAE = "tiny_flux_kl"
SD15 = Scenario(width=64, height=64, controls=(), settings=BUILD, steps=2)
QWEN = SD15.but(family="qwen", unet="tiny_qwen_image", loader="TestTokenNetwork")
QWEN21 = SD15.but(family="qwen_image21", unet="tiny_qwen_image21", loader="TestTokenNetwork", cfg=4.0)
EDIT = {
    "text": node("TestConditioning", tokens=30, width=48, pooled=0, seed=1),
    "reference": node("TestLatent", seed=3, width=5, height=7, channels=64),
    "positive": node("ReferenceLatent", conditioning=["text", 0], latent=["reference", 0]),
}
KREA2 = SD15.but(family="krea2", unet="tiny_krea2")
ANIMA = SD15.but(family="anima", unet="tiny_anima", loader="TestTokenNetwork")
HUNYUAN = SD15.but(family="hunyuan", unet="tiny_hunyuan_video15", length=9)
WAN = SD15.but(family="wan", unet="tiny_wan", length=9)
LTX2 = SD15.but(family="ltx2", unet="tiny_ltx2", length=9)
MINIMAX = SD15.but(family="minimax_h3", unet="tiny_minimax_h3", length=5)

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
WITH_FUN = ZIMAGE.but(unet="tiny_zimage_16", loras_before=[FUN], parts=FUN_PARTS)
LLLITE = ("AnimaLLLiteApply", {"model_patch": ["lllite", 0], "image": ["lllite_image", 0], "strength": 0.7,
                               "start_percent": 0.0, "end_percent": 1.0})  # fmt: skip
LLLITE_PARTS = {
    "lllite": node("ModelPatchLoader", name="tiny_anima_lllite.safetensors"),
    "lllite_image": node("TestImage", seed=3, width=72, height=64, batch=1, channels=3),
}
WITH_LLLITE = ANIMA.but(loras_before=[LLLITE], parts=LLLITE_PARTS)
ADAPTER = Control("tiny_sd15_t2i", 3, 0.9, engine=False)
KINDS = {
    "SD1.5 and SD2": Kind([SD15.but(controls=(A,))]),
    "SDXL": Kind([XL.but(controls=(Control("tiny_sdxl_a", 1, 0.7),))]),
    "inpainting and instruct-pix2pix UNets": Kind([SD15.but(unet="tiny_sd15_ip2p_unet")]),
    "LCM and Turbo": Kind([
        SD15.but(patches=(("ModelSamplingDiscrete", {"sampling": "lcm", "zsnr": False}),), sampler="lcm", cfg=1.0,
                 controls=(A,)),
    ]),
    "union ControlNets": Kind([
        XL.but(controls=(union("depth"),)),
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
    "Qwen-Image and Qwen-Image-Edit": Kind([
        QWEN.but(tokens=(9, 30)),
        QWEN.but(width=136, height=120, batch=2, tokens=(77, 77)),
        QWEN.but(tokens=(130, 9), settings=TORCH),
    ]),
    "Qwen-Image 2.1 and its Turbo": Kind([
        QWEN21.but(tokens=(9, 30)),
        QWEN21.but(width=208, height=176, batch=2, tokens=(77, 77)),
        QWEN21.but(tokens=(130, 9), settings=TORCH),
        QWEN21.but(parts=EDIT, settings=TORCH),
        QWEN21.but(parts=EDIT, settings=TORCH, cfg=1.0, unet="tiny_qwen_image21_unfused"),
    ]),
    "Krea 2": Kind([
        KREA2.but(tokens=(9, 30)),
        KREA2.but(width=136, height=120, batch=2, tokens=(77, 77)),
        KREA2.but(tokens=(130, 9), settings=TORCH),
    ]),
    "Anima": Kind([
        ANIMA, ANIMA.but(width=136, height=120, batch=2), ANIMA.but(settings=TORCH, tokens=(130, 9)),
    ]),
    "Anima with LLLite": Kind([
        WITH_LLLITE,
        WITH_LLLITE.but(width=136, height=120, batch=2, loras_before=[
            (LLLITE[0], LLLITE[1] | {"strength": 1.0, "end_percent": 0.5})], steps=4),
        WITH_LLLITE.but(settings=TORCH, tokens=(130, 9)),
        WITH_LLLITE.but(settings=TORCH, width=104, parts=LLLITE_PARTS | {
            "lllite": node("ModelPatchLoader", name="tiny_anima_lllite_inpaint.safetensors")}),
    ]),
    "Wan 2.1 and 2.2 (text and image to video)": Kind([
        WAN.but(width=104, height=72),
        WAN.but(unet="tiny_wan22_i2v", batch=2),
        WAN.but(unet="tiny_wan22_5b", length=0, width=96),
        WAN.but(settings=TORCH, length=13, tokens=(130, 130)),
    ]),
    "VACE of Wan": Kind([WAN.but(unet="tiny_wan_vace"), WAN.but(unet="tiny_wan_vace", settings=TORCH, cfg=1.0)]),
    "HunyuanVideo 1.5": Kind([
        HUNYUAN.but(width=112, height=80),
        HUNYUAN.but(tokens=(30, 9), batch=2),
        HUNYUAN.but(unet="tiny_hunyuan_video15_sr", settings=TORCH, length=13, cfg=1.0),
    ]),
    "HunyuanVideo, HunyuanImage 2.1": Kind([
        HUNYUAN.but(unet="tiny_hunyuan_video", tokens=(30, 9)),
        HUNYUAN.but(unet="tiny_hunyuan_image21", length=0, width=160, height=96),
        HUNYUAN.but(unet="tiny_hunyuan_image21_refiner", settings=TORCH),
    ]),
    "LTX-2.0 and 2.3": Kind([
        LTX2.but(width=96, length=17, tokens=(30, 9)),
        LTX2.but(unet="tiny_ltx23", batch=2, settings=TORCH, cfg=1.0),
    ]),
    "MiniMax H3": Kind([
        MINIMAX.but(width=96, length=22, tokens=(30, 9)),
        MINIMAX.but(unet="tiny_minimax_h3_pruned", settings=TORCH, cfg=1.0),
    ]),
    "fp8 checkpoints (`comfy_quant`, `scaled_fp8`)": Kind([
        QUANTISED.but(unet="tiny_sdxl_fp8_unet"),
        SD15.but(unet="tiny_sd15_quantised_unet", settings=TORCH, controls=(Control("tiny_sd15_flat_a", 1, 0.7),)),
    ]),
    "int8 checkpoints (`comfy_quant`)": Kind([QUANTISED.but(unet="tiny_sdxl_int8_unet")], limit=INT8),
    "Z-Image, Turbo and base": Kind([
        ZIMAGE,
        ZIMAGE.but(width=136, height=104, batch=2, tokens=(31, 40), cfg=1.0),
        ZIMAGE.but(width=72, tokens=(20, 90), area=True, loras_before=[Z_LORA]),
        ZIMAGE.but(settings=TORCH, width=88, tokens=(20, 20), loras_before=[Z_LORA]),
        ZIMAGE.but(settings=TORCH, batch=2, tokens=(31, 40),
                   patches=[Z_LORA, ("ModelSamplingAuraFlow", {"shift": 3.0})]),
    ]),
    "Z-Image with Fun control": Kind([
        WITH_FUN,
        WITH_FUN.but(width=136, height=104, batch=2, tokens=(31, 40), cfg=1.0, loras_before=[Z_LORA, FUN]),
        WITH_FUN.but(settings=TORCH, parts=FUN_PARTS | {"fun": node("TestFunPatch", version="1")}),
        WITH_FUN.but(settings=TORCH, batch=2, tokens=(31, 40), patches=[Z_LORA]),
    ]),
    "Z-Image in fp8": Kind([ZIMAGE.but(unet="tiny_zimage_fp8", settings=TORCH, loras_before=[Z_LORA])]),
    "Z-Image in int8": Kind([ZIMAGE.but(unet="tiny_zimage_int8", settings=TORCH)], limit=INT8),
    "Flux.1 (dev, schnell, Kontext, Fill)": Kind([
        FLUX, FLUX.but(cfg=3.0, width=136, height=120), FLUX.but(unet="tiny_flux1_schnell_unet", batch=2),
        FLUX.but(unet="tiny_flux1_fill_unet"), FLUX.but(settings=TORCH, tokens=(154, 77), cfg=3.0),
    ]),
    "Flux.2 (dev, klein)": Kind([
        FLUX.but(unet="tiny_flux2_klein_unet"), FLUX.but(unet="tiny_flux2_klein_unet", settings=TORCH, cfg=3.0),
    ]),
    "ControlNets of Flux.1 (InstantX, Union)": Kind([
        FLUX.but(controls=(Control("tiny_flux1_a", 1, 0.7),), vae=FLUX_VAE),
        FLUX.but(controls=(Control("tiny_flux1_a", 1, 0.7), Control("tiny_flux1_b", 2, 0.5, 0.0, 0.5)), vae=FLUX_VAE,
                 cfg=3.0, width=120, height=72),
        FLUX.but(controls=(union("depth", 2, 0.6, file="tiny_flux1_union"), Control("tiny_flux1_a", 1, 0.4)),
                 vae=FLUX_VAE, batch=2, apply="stock", settings=TORCH),
    ]),
    "ControlNets of Flux.1 (XLabs, Mistoline)": Kind([
        FLUX.but(controls=(Control("tiny_flux1_xlabs", 1, 0.7),)),
        FLUX.but(controls=(Control("tiny_flux1_mistoline", 1, 0.7), Control("tiny_flux1_xlabs", 2, 0.5, 0.0, 0.5)),
                 cfg=3.0, width=144, height=80),
        FLUX.but(controls=(Control("tiny_flux1_mistoline", 2, 0.6), Control("tiny_flux1_a", 1, 0.4)), vae=FLUX_VAE,
                 batch=2, apply="stock", settings=TORCH),
    ]),
    "Control-LoRAs": Kind([SD15.but(controls=(Control("tiny_sd15_control_lora", 1, 0.5), A))], "unsupported model"),
}  # fmt: skip


ONE = {name: (name, kind.scenarios[:1]) for name, kind in KINDS.items()}
ALL = {f"all of {name}": (name, kind.scenarios) for name, kind in KINDS.items() if len(kind.scenarios) > 1}


ELSEWHERE = {
    "SD1.5 and SD2", "SDXL",  # ``test_parity.py``
    "inpainting and instruct-pix2pix UNets", "union ControlNets",  # further below
    "Qwen-Image and Qwen-Image-Edit",  # ``test_family_prompts.py``
    "Qwen-Image 2.1 and its Turbo",  # ``test_family_prompts.py``
    "Krea 2",  # ``test_family_prompts.py``
    "Anima",  # ``test_family_prompts.py``
    "Anima with LLLite",  # ``test_absorbed_patches.py``
    "Wan 2.1 and 2.2 (text and image to video)", "VACE of Wan",  # ``test_family_prompts.py``
    "HunyuanVideo 1.5", "HunyuanVideo, HunyuanImage 2.1",  # ``test_family_prompts.py``
    "LTX-2.0 and 2.3",  # ``test_family_prompts.py``
    "MiniMax H3",  # ``test_family_prompts.py``
    "Flux.1 (dev, schnell, Kontext, Fill)",  # ``test_family_prompts.py``
    "Z-Image, Turbo and base",  # ``test_family_prompts.py``
    "Z-Image with Fun control",  # ``test_absorbed_patches.py``
    "int8 checkpoints (`comfy_quant`)",  # further below
    "fp8 checkpoints (`comfy_quant`, `scaled_fp8`)",  # ``test_family_prompts.py``, ``test_quantised_engines.py``
    "Control-LoRAs",  # ``test_fallback.py``
}
"""Kinds of which other tests compare a whole prompt with native too."""


@pytest.mark.parametrize(("name", "scenarios"), slow.cases(ONE | ALL, ALL.keys() | ELSEWHERE))
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
    kinds = ("depth", "auto", "depth")
    latents = []
    for kind in kinds:
        result = compare(sdxl, XL.but(controls=(union(kind),)))
        assert result.error <= LIMIT
        latents.append(latent_of(result.history))  # the next prompt writes to the same file
    depth, auto, again = latents
    assert relative_difference(depth, auto) > 0.01
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
OTHER_VAES = "other videos, sound"
"""The row of those without an engine; ``test_vae.py`` tries one. ``test_video_vaes.py`` and ``test_hunyuan_vaes.py``
try those that have some on ``torch`` alone."""


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
    for tiled, *size in ((False, 101, 139, 3), (True, 200, 168, 1)):
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
    assert rows_of("## Supported models") == {name: kind.reason is None for name, kind in KINDS.items()}
    assert rows_of("## VAEs") == dict.fromkeys(VAES, True) | {OTHER_VAES: False}
