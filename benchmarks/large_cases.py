"""Models at full size and their calls, as cases by name; for ``large_models.py`` and what measures whole prompts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import tiny_transformers as small
from models import CONFIGS
from tiny_recipes import SDXL

_FLUX1 = small.FLUX1 | {"hidden_size": 3072, "num_heads": 24, "context_in_dim": 4096, "vec_in_dim": 768, "depth": 19,
                  "depth_single_blocks": 38}  # fmt: skip
_ZIMAGE = small.ZIMAGE | {"dim": 3840, "n_layers": 30, "n_heads": 30, "n_kv_heads": 30, "cap_feat_dim": 2560,
                    "axes_dims": [32, 48, 48]}  # fmt: skip
_QWEN = {"in_channels": 64, "num_layers": 60, "attention_head_dim": 128, "num_attention_heads": 24,
         "joint_attention_dim": 3584, "axes_dims_rope": [16, 56, 56]}  # fmt: skip
_KREA2 = {"features": 6144, "heads": 48, "kvheads": 12, "layers": 28, "txtdim": 2560, "txtlayers": 12}
_WAN = small.WAN | {"dim": 5120, "ffn_dim": 13824, "num_heads": 40, "num_layers": 40}
_WAN_5B = small.WAN_5B | {"dim": 3072, "ffn_dim": 14336, "num_heads": 24, "num_layers": 30}
_HUNYUAN15 = small.HUNYUAN_VIDEO15 | {"hidden_size": 2048, "num_heads": 16, "context_in_dim": 3584, "depth": 54,
                                "depth_single_blocks": 0}  # fmt: skip
_QWEN21 = {"width": 4096, "head": 128, "layers": 32, "prompt": 4096, "channels": 64}
_H3 = {"adaln_curve_grid": 1025, "time_embed_dim": 8}
_LTX23 = small.LTX23 | {
    "num_layers": 48, "num_attention_heads": 32, "attention_head_dim": 128, "cross_attention_dim": 4096,
    "audio_num_attention_heads": 32, "audio_attention_head_dim": 64, "audio_cross_attention_dim": 2048,
    "caption_channels": 3840, "connector_num_layers": 8, "connector_num_attention_heads": 32,
    "connector_attention_head_dim": 128, "audio_connector_num_attention_heads": 32,
    "audio_connector_attention_head_dim": 64}
_KLEIN9 = small.FLUX2 | {"hidden_size": 4096, "num_heads": 32, "context_in_dim": 12288, "depth": 8,
                         "depth_single_blocks": 24}  # fmt: skip
_DEV2 = small.FLUX2 | {"hidden_size": 6144, "num_heads": 48, "context_in_dim": 15360, "depth": 8,
                       "depth_single_blocks": 48, "guidance_embed": True}  # fmt: skip
PRO2 = {"depth": 6, "depth_single_blocks": 0, "control_latent_channels": 16}
_FUN = {"n_control_layers": 15, "additional_in_dim": 17, "refiner_control": True}


@dataclass(frozen=True)
class Case:
    """A model and its calls.

    Attributes:
        network: kind of network, as ``tiny_models`` names it.
        width: features of a prompt's token; ``pooled`` those of the prompt as a whole.
        side: pixels along the width; ``height`` is another where it is not 0. A video has ``length`` frames.
        eight_bit: attention and feed-forward layers are ``fp8`` or ``int8``.
        control: one Flux ControlNet as large as Union Pro 2 acts in each step.
        fun: a Fun control of Z-Image, of these blocks, which one engine computes with the model.
        lllite: an LLLite acts on all layers of Anima that it can; one engine computes both.
        references: pictures that the prompt refers to.
    """

    network: str
    config: dict[str, Any]
    tiny: dict[str, Any]
    side: int
    tokens: int
    width: int
    tiny_width: int
    pooled: int = 0
    eight_bit: str = ""
    control: bool = False
    fun: dict[str, Any] | None = None
    lllite: bool = False
    height: int = 0
    length: int = 1
    references: int = 0


_FLUX = Case("flux", _FLUX1, small.FLUX1, 1024, 512, 4096, 64, pooled=768)
_Z = Case("zimage", _ZIMAGE, small.ZIMAGE, 1024, 128, 2560, 64)
_KREA = Case("krea2", _KREA2, small.KREA2, 1024, 64, 12 * 2560, 240, eight_bit="fp8")
_KLEIN = Case("flux", _KLEIN9, small.FLUX2, 1024, 512, 12288, 64)
_FLUX2_DEV = Case("flux", _DEV2, small.FLUX2, 1024, 512, 15360, 64)
_ANIMA = Case("anima", small.ANIMA | {"model_channels": 2048, "num_blocks": 28, "num_heads": 16},
              small.ANIMA | {"model_channels": 256}, 1024, 512, 1024, 1024)  # fmt: skip
_VIDEO = Case("wan", _WAN, small.WAN, 832, 512, 4096, 4096, height=480, length=17)
_MINIMAX = Case("minimax_h3", _H3, small.MINIMAX_H3_PRUNED, 832, 256, 5120, 64, height=480, length=124)
_QWEN_IMAGE = Case("qwen_image", _QWEN, small.QWEN_IMAGE | {"in_channels": 64, "num_layers": 2}, 1328, 64, 3584, 48,
                   eight_bit="fp8")  # fmt: skip
CASES = {
    "flux1_1024": _FLUX, "flux1_512": replace(_FLUX, side=512), "flux1_1024_fp8": replace(_FLUX, eight_bit="fp8"),
    "flux1_1024_cn": replace(_FLUX, control=True), "zimage_1024": _Z, "zimage_512": replace(_Z, side=512),
    "klein9_1024": _KLEIN, "klein9_1024_fp8": replace(_KLEIN, eight_bit="fp8"),
    "flux2_dev_1024": _FLUX2_DEV, "flux2_dev_1024_fp8": replace(_FLUX2_DEV, eight_bit="fp8"),
    "zimage_1024_fp8": replace(_Z, eight_bit="fp8"), "zimage_1024_int8": replace(_Z, eight_bit="int8"),
    "zimage_1024_fun": replace(_Z, tiny=small.ZIMAGE | {"n_layers": 29}, fun=_FUN),
    "krea2_1024_fp8": _KREA, "krea2_1024_int8": replace(_KREA, eight_bit="int8"),
    "qwen_1328_fp8": _QWEN_IMAGE,
    "qwen_edit_1024_fp8": replace(_QWEN_IMAGE, side=1024, references=1),
    "qwen_edit_1024_int8": replace(_QWEN_IMAGE, side=1024, eight_bit="int8", references=1),
    "anima_1024": _ANIMA, "anima_1024_lllite": replace(_ANIMA, lllite=True),
    "wan22_480": _VIDEO, "wan22_480_fp8": replace(_VIDEO, eight_bit="fp8"),
    "wan22_480_49_fp8": replace(_VIDEO, eight_bit="fp8", length=49),
    "wan22_480_81_fp8": replace(_VIDEO, eight_bit="fp8", length=81),
    "wan22_480_81_int8": replace(_VIDEO, eight_bit="int8", length=81),
    "wan22_720_81_fp8": replace(_VIDEO, eight_bit="fp8", side=1280, height=720, length=81),
    "wan22_5b_704_121": replace(_VIDEO, config=_WAN_5B, tiny=small.WAN_5B, side=1280, height=704, length=121),
    "sdxl_1024": Case("unet", CONFIGS["sdxl"], SDXL, 1024, 77, 2048, 2048, pooled=1280),
    "hunyuan15_480": Case("hunyuan", _HUNYUAN15, small.HUNYUAN_VIDEO15, 848, 128, 3584, 64, 768, height=480, length=33),
    "h3_480_124": _MINIMAX, "h3_480_124_int8": replace(_MINIMAX, eight_bit="int8"),
    "ltx23_720_121_fp8": Case("ltx2", _LTX23, small.LTX23, 1280, 1024, 6144, 96, eight_bit="fp8", height=704,
                              length=121),
    "qwen21_1024_edit": Case("qwen_image21", _QWEN21, small.QWEN_IMAGE21, 1024, 128, 4096, 48, references=1),
}  # fmt: skip
