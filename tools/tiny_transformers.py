"""Tiny transformers for ``tiny_models``: the shapes of their weights, and what ComfyUI needs to load them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Shapes = dict[str, tuple[int, ...]]

#: ComfyUI has the other sizes of Z-Image in a table, by its width of 3840; a test puts these there. 256 is the smallest
#: width that its modulation takes.
ZIMAGE = {"patch_size": 2, "in_channels": 16, "dim": 256, "n_layers": 2, "n_refiner_layers": 2, "n_heads": 4,
          "n_kv_heads": 4, "multiple_of": 256, "ffn_dim_multiplier": 8 / 3, "norm_eps": 1e-5, "qk_norm": True,
          "cap_feat_dim": 64, "axes_dims": [16, 24, 24], "axes_lens": [1536, 512, 512], "rope_theta": 256.0,
          "z_image_modulation": True, "time_scale": 1000.0, "pad_tokens_multiple": 32}


_FLUX = {"in_channels": 16, "out_channels": 16, "context_in_dim": 64, "hidden_size": 256, "num_heads": 2,
         "axes_dim": [16, 56, 56], "theta": 10000, "mlp_ratio": 4.0, "depth": 2, "depth_single_blocks": 2,
         "qkv_bias": True, "txt_ids_dims": []}
#: Flux.1 with two heads, which is all that ComfyUI lets a file choose besides depths and what goes in.
FLUX1 = _FLUX | {"vec_in_dim": 32, "patch_size": 2, "guidance_embed": True}
FLUX2 = _FLUX | {"in_channels": 128, "out_channels": 128, "axes_dim": [32] * 4, "theta": 2000, "mlp_ratio": 3.0,
                 "qkv_bias": False, "txt_ids_dims": [3], "vec_in_dim": None, "patch_size": 1, "guidance_embed": False,
                 "global_modulation": True, "mlp_silu_act": True, "ops_bias": False}

#: What ComfyUI reads off no file of Qwen-Image; its own loader has to be told. Two layers of two heads.
QWEN_IMAGE = {"attention_head_dim": 32, "num_attention_heads": 2, "joint_attention_dim": 48,
              "axes_dims_rope": [8, 12, 12]}

#: All sizes of Qwen-Image 2.1 are in its file, but for heads' 128 features of rotary embeddings.
QWEN_IMAGE21 = {"width": 256, "head": 128, "layers": 3, "prompt": 48, "channels": 64}

#: ComfyUI has heads of 128 features in Krea 2, and 20 heads in what reads the prompt. Two queries share keys here.
KREA2 = {"features": 256, "heads": 2, "kvheads": 1, "layers": 2, "txtdim": 80, "txtlayers": 3}

#: ComfyUI has heads of 128 features in Wan, and prompts of 4096 features.
WAN = {"model_type": "t2v", "dim": 256, "ffn_dim": 256, "num_heads": 2, "num_layers": 2, "in_dim": 16, "out_dim": 16}
WAN_I2V = WAN | {"model_type": "i2v", "in_dim": 36}
WAN_VACE = WAN | {"model_type": "vace", "num_layers": 4, "vace_layers": 2, "vace_in_dim": 96}
WAN_5B = WAN | {"in_dim": 48, "out_dim": 48}

#: ComfyUI has heads of 128 features in HunyuanVideo's network. Text by byT5 and pictures have just one size.
_HUNYUAN = {"vec_in_dim": None, "context_in_dim": 64, "hidden_size": 256, "mlp_ratio": 4.0, "num_heads": 2, "depth": 2,
            "depth_single_blocks": 1, "theta": 256, "qkv_bias": True, "guidance_embed": False, "byt5": True,
            "meanflow": False, "use_cond_type_embedding": False, "vision_in_dim": None, "meanflow_sum": False,
            "axes_dim": [16, 56, 56]}
HUNYUAN_VIDEO15 = _HUNYUAN | {"in_channels": 65, "out_channels": 32, "patch_size": [1, 1, 1], "vision_in_dim": 1152,
                              "use_cond_type_embedding": True, "meanflow_sum": True}
HUNYUAN_VIDEO = _HUNYUAN | {"in_channels": 16, "out_channels": 16, "patch_size": [1, 2, 2], "vec_in_dim": 768,
                            "guidance_embed": True, "byt5": False}
HUNYUAN_IMAGE21 = _HUNYUAN | {"in_channels": 64, "out_channels": 64, "patch_size": [1, 1], "axes_dim": [64, 64],
                              "meanflow": True, "guidance_embed": True}
HUNYUAN_REFINER = _HUNYUAN | {"in_channels": 128, "out_channels": 64, "patch_size": [1, 1, 1], "byt5": False,
                              "meanflow": True}

#: All sizes of MiniMax H3 are in its file. A pruned one has a table in the place of what embeds times.
MINIMAX_H3 = {"hidden_size": 256, "num_layers": 2, "token_refiner_num_layers": 1, "num_attention_heads": 2,
              "attention_head_dim": 128, "ffn_hidden_size": 256, "text_dim": 64, "timestep_input_dim": 256,
              "time_embed_hidden_size": 64, "time_embed_dim": 48, "rope_inv_freq_len": 16}
MINIMAX_H3_PRUNED = MINIMAX_H3 | {"adaln_curve_grid": 33, "time_embed_dim": 8}

#: The settings of LTX-2.0 are in its file; 2.3 moves the prompt by time, and gates each head.
LTX2 = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 32, "cross_attention_dim": 64,
        "audio_num_attention_heads": 2, "audio_attention_head_dim": 16, "audio_cross_attention_dim": 32,
        "caption_channels": 48, "connector_num_attention_heads": 2, "connector_attention_head_dim": 24,
        "connector_num_layers": 1, "rope_type": "split", "frequencies_precision": "float64",
        "use_middle_indices_grid": True, "causal_temporal_positioning": True, "av_ca_timestep_scale_multiplier": 1000.0}
LTX23 = LTX2 | {"caption_proj_before_connector": True, "cross_attention_adaln": True, "apply_gated_attention": True,
                "connector_apply_gated_attention": True, "caption_projection_first_linear": False,
                "connector_attention_head_dim": 32, "audio_connector_num_attention_heads": 2,
                "audio_connector_attention_head_dim": 16}

#: 2.5; ComfyUI 0.30.0 does not know these two settings, and makes a 2.3 of it.
LTX25 = LTX23 | {"ff_bias": False, "use_keyframes_abs_pos_embedding": True}

#: The VAE of LTX-2.0 and 2.3, whose settings are in the file of the model.
_RES, _UP = ["res_x", {"num_layers": 1}], ["compress_all", {"residual": True, "multiplier": 2}]
LTX_VAE = {"dims": 3, "in_channels": 3, "out_channels": 3, "latent_channels": 128, "norm_layer": "pixel_norm",
           "patch_size": 4, "latent_log_var": "uniform", "use_quant_conv": False, "causal_decoder": False,
           "encoder_base_channels": 8, "decoder_base_channels": 8,
           "encoder_blocks": [_RES, *([f"compress_{of}_res", {"multiplier": 2}]
                                      for of in ("space", "time", "all", "all"))],
           "decoder_blocks": [_RES, _UP, _RES, _UP, _UP, _RES]}  # fmt: skip

#: What ComfyUI reads off no file of Anima, and the rest of its sizes. What makes its prompts ready is small: ComfyUI
#: has just one size of it, and runs it by itself.
ANIMA = {"num_blocks": 2, "num_heads": 2}
#: An LLLite of it, and the layers that it changes: not all, as in published files.
ANIMA_LLLITE = {"channels": 3, "cond_dim": 16, "cond_emb_dim": 24, "model_channels": 256, "mlp_dim": 16, "resblocks": 1,
                "aspp": True, "targets": ["0_self_attn_q_proj", "0_self_attn_k_proj", "0_self_attn_v_proj",
                                          "1_self_attn_q_proj", "1_cross_attn_q_proj", "1_mlp_layer1"]}
_ANIMA = {"max_img_h": 240, "max_img_w": 240, "max_frames": 128, "in_channels": 16, "out_channels": 16,
          "patch_spatial": 2, "patch_temporal": 1, "crossattn_emb_channels": 1024, "pos_emb_cls": "rope3d",
          "use_adaln_lora": True}
_ANIMAS_ADAPTER = {"source_dim": 64, "target_dim": 16, "model_dim": 32, "num_layers": 1, "num_heads": 2}


def let_comfyui_load_zimage() -> None:
    """Add the tiny Z-Image's sizes to ComfyUI's table of sizes, so that its own loader loads it in this process."""
    from comfy import model_detection

    own = model_detection.detect_unet_config

    def with_more_sizes(*args: Any, **kwargs: Any) -> dict[str, Any] | None:
        found = own(*args, **kwargs)
        if found is not None and (found.get("image_model"), found.get("dim")) == ("lumina2", ZIMAGE["dim"]):
            found |= {name: size for name, size in ZIMAGE.items() if name != "n_layers"}
        return found

    if own.__name__ != with_more_sizes.__name__:
        model_detection.detect_unet_config = with_more_sizes


def let_comfyui_load_tiny_models() -> None:
    """Add all sizes that ComfyUI reads off no file to what it finds in one, in this process."""
    from comfy import model_detection

    let_comfyui_load_zimage()
    own = model_detection.detect_unet_config

    def with_more_sizes(*args: Any, **kwargs: Any) -> dict[str, Any] | None:
        found = own(*args, **kwargs)
        more = {"qwen_image": QWEN_IMAGE, "anima": ANIMA}
        return found and found | more.get(found.get("image_model"), {})

    model_detection.detect_unet_config = with_more_sizes


@contextmanager
def small_anima_adapter() -> Iterator[None]:
    """Inside, ComfyUI makes Anima's adapter for prompts as small as in the tiny file."""
    from comfy.ldm.anima import model

    own = model.LLMAdapter
    model.LLMAdapter = partial(own, **_ANIMAS_ADAPTER)
    try:
        yield
    finally:
        model.LLMAdapter = own


def shapes_of(build: Callable[[], torch.nn.Module]) -> Shapes:
    """Names and shapes of a module's weights, without allocating any."""
    import torch

    with torch.device("meta"):
        return {name: tuple(value.shape) for name, value in build().state_dict().items()}


def zimage_shapes(config: dict[str, Any]) -> Shapes:
    """Names and shapes of a Z-Image's weights."""
    import comfy.ops
    from comfy.ldm.lumina.model import NextDiT

    return shapes_of(lambda: NextDiT(**config, operations=comfy.ops.disable_weight_init))


def zimage_lora_shapes(config: dict[str, Any]) -> Shapes:
    """A LoRA in Diffusers' naming: query, key and value apart, which are one layer in ComfyUI."""
    config = dict(config)
    rank = config.pop("rank")
    shapes: Shapes = {}
    for name, shape in zimage_shapes(config).items():
        stem = name.removesuffix(".weight")
        if not stem.endswith((".qkv", ".w2")):
            continue
        parts = ("to_q", "to_k", "to_v") if stem.endswith("qkv") else ("w2",)
        stems = [stem.replace("qkv", part) for part in parts]
        for one in stems:
            shapes[f"diffusion_model.{one}.lora_A.weight"] = (rank, shape[1])
            shapes[f"diffusion_model.{one}.lora_B.weight"] = (shape[0] // len(stems), rank)
    return shapes


def plain_lora_shapes(config: dict[str, Any], of: Callable[[dict[str, Any]], Shapes], ends: tuple[str, ...]) -> Shapes:
    """A LoRA in ComfyUI's naming on the layers whose names end so."""
    config = dict(config)
    rank = config.pop("rank")
    found = {name.removesuffix(".weight"): shape for name, shape in of(config).items()}
    return {f"diffusion_model.{stem}.lora_{part}.weight": sizes for stem, shape in found.items() if stem.endswith(ends)
            for part, sizes in (("A", (rank, shape[1])), ("B", (shape[0], rank)))}  # fmt: skip


def flux_shapes(config: dict[str, Any]) -> Shapes:
    """Names and shapes of a Flux's weights."""
    import comfy.ops
    from comfy.ldm.flux.model import Flux

    return shapes_of(lambda: Flux(**config, operations=comfy.ops.disable_weight_init))


def flux_controlnet_shapes(config: dict[str, Any]) -> Shapes:
    """A ControlNet that takes a latent, in the names of Diffusers, as InstantX publishes them."""
    import comfy.ops
    import comfy.utils
    from comfy.ldm.flux.controlnet import ControlNetFlux

    net = shapes_of(lambda: ControlNetFlux(latent_input=True, **config, operations=comfy.ops.disable_weight_init))
    shapes, named = {}, set()
    for theirs, ours in comfy.utils.flux_to_diffusers(config).items():
        name, part = (ours, None) if isinstance(ours, str) else ours[:2]
        if name in net and (part is not None or name not in named):  # some weights have several names
            shapes[theirs] = net[name] if part is None else (part[2], *net[name][1:])
            named.add(name)
    return shapes | {name: shape for name, shape in net.items() if name not in named}


def flux_pixel_controlnet_shapes(config: dict[str, Any]) -> Shapes:
    """A ControlNet that takes pixels, in the names of XLabs, or of Mistoline with ``mistoline``."""
    import comfy.ops
    from comfy.ldm.flux.controlnet import ControlNetFlux

    net = shapes_of(lambda: ControlNetFlux(**config, operations=comfy.ops.disable_weight_init))
    theirs = {"_norm.weight": "_norm.scale"}
    if config.get("mistoline"):
        theirs["controlnet_single_blocks."] = "single_controlnet_blocks."
    return {reduce(lambda now, pair: now.replace(*pair), theirs.items(), name): shape for name, shape in net.items()}


def qwen_image_shapes(config: dict[str, Any]) -> Shapes:
    """Names and shapes of a Qwen-Image's weights."""
    import comfy.ops
    from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel

    return shapes_of(lambda: QwenImageTransformer2DModel(**config, operations=comfy.ops.disable_weight_init))


def qwen_image21_shapes(config: dict[str, Any]) -> Shapes:
    """Names and shapes of a Qwen-Image 2.1's weights, which the pinned ComfyUI has no network for."""
    width, head, prompt = config["width"], config["head"], config["prompt"]
    inside = 3 * width
    mlp = {"gate_up": (2 * inside, width)} if config.get("fused", True) else dict.fromkeys(
        ("proj", "gate_layer"), (inside, width))  # fmt: skip
    block = {**{f"attn.{name}": (width, width) for name in ("to_q", "to_k", "to_v", "to_out.0")},
             **{f"attn.{name}": (head,) for name in ("norm_q", "norm_k")},
             **{f"img_mlp.{name}": shape for name, shape in (mlp | {"out": (width, inside)}).items()}}
    layers = {
        "time_text_embed.timestep_embedder.linear_1": (width, 256),
        "time_text_embed.timestep_embedder.linear_2": (width, width), "txt_in.text_norm": (prompt,),
        "txt_in.in_layer": (width, prompt), "txt_in.out_layer": (width, width), "img_in": (width, config["channels"]),
        "modulation.1": (4 * width, width), "norm_out.linear": (width, width), "proj_out": (config["channels"], width)}
    for i in range(config["layers"]):
        layers |= {f"transformer_blocks.{i}.{name}": shape for name, shape in block.items()}
    return {f"{name}.weight": shape for name, shape in layers.items()}


def qwen_image_control_shapes(config: dict[str, Any]) -> Shapes:
    """Names and shapes of a ControlNet of Qwen-Image's weights."""
    import comfy.ops
    from comfy.ldm.qwen_image.controlnet import QwenImageControlNetModel

    return shapes_of(lambda: QwenImageControlNetModel(**config, operations=comfy.ops.disable_weight_init))


def krea2_shapes(config: dict[str, Any]) -> Shapes:
    """Names and shapes of a Krea 2's weights."""
    import comfy.ops
    from comfy.ldm.krea2.model import SingleStreamDiT

    return shapes_of(lambda: SingleStreamDiT(**config, operations=comfy.ops.disable_weight_init))


def wan_shapes(config: dict[str, Any]) -> Shapes:
    """Names and shapes of a Wan's weights."""
    import comfy.ops
    from comfy.ldm.wan.model import VaceWanModel, WanModel

    config = dict(config, operations=comfy.ops.disable_weight_init)
    if config["model_type"] == "vace":
        return shapes_of(lambda: VaceWanModel(**config))
    return shapes_of(lambda: WanModel(**config))


def hunyuan_shapes(config: dict[str, Any]) -> Shapes:
    """Names and shapes of the weights of HunyuanVideo's network."""
    import comfy.ops
    from comfy.ldm.hunyuan_video.model import HunyuanVideo

    return shapes_of(lambda: HunyuanVideo(**config, operations=comfy.ops.disable_weight_init))


def minimax_h3_shapes(config: dict[str, Any]) -> Shapes:
    """Names and shapes of a MiniMax H3's weights."""
    import comfy.ops
    from comfy.ldm.minimax.model import MiniMaxH3Model

    return shapes_of(lambda: MiniMaxH3Model(**config, operations=comfy.ops.disable_weight_init))


def ltx2_shapes(config: dict[str, Any]) -> Shapes:
    """Names and shapes of an LTX-2's weights."""
    import comfy.ops
    from comfy.ldm.lightricks.av_model import LTXAVModel

    return shapes_of(lambda: LTXAVModel(**config, operations=comfy.ops.disable_weight_init))


def ltx_vae_shapes(config: dict[str, Any]) -> Shapes:
    """Names and shapes of the weights of an LTX-2's VAE."""
    from comfy.ldm.lightricks.vae.causal_video_autoencoder import VideoVAE

    return shapes_of(lambda: VideoVAE(config=config))


def anima_shapes(config: dict[str, Any]) -> Shapes:
    """Names and shapes of an Anima's weights."""
    import comfy.ops
    from comfy.ldm.anima.model import Anima

    with small_anima_adapter():
        return shapes_of(lambda: Anima(**_ANIMA, **config, operations=comfy.ops.disable_weight_init))


def anima_lllite_shapes(config: dict[str, Any]) -> Shapes:
    """Names and shapes of an LLLite's weights: the embedding of its image, and a network for each layer it changes."""
    import comfy.ops
    from comfy.ldm.anima import lllite

    config, ops = dict(config), comfy.ops.disable_weight_init
    channels, dim, features, width, hidden = (
        config[name] for name in ("channels", "cond_dim", "cond_emb_dim", "model_channels", "mlp_dim"))  # fmt: skip
    dilations = (1, 2, 4, 8) if config.get("aspp") else ()
    parts = {"lllite_conditioning1": lambda: lllite.AnimaLLLiteConditioning(
        channels, dim, features, config["resblocks"], dilations, operations=ops)}  # fmt: skip
    for target in config["targets"]:
        parts[f"lllite_dit_blocks_{target}"] = lambda: lllite.AnimaLLLiteModule(width, features, hidden, operations=ops)
    return {f"{part}.{name}": shape for part, build in parts.items() for name, shape in shapes_of(build).items()}
