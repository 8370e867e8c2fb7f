"""Tiny models of all families, and where packs change them; see ``foreign_changes``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import comfy.sample
import token_networks
import torch
from comfy.model_patcher import ModelPatcher
from foreign_changes import Change, changes, halved, list_written, with_part, with_setting
from hybrid_trt.architectures.shapes import RequestedSizes
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_library import Library
from hybrid_trt.sampling.engine_handle import EngineChoice, EngineHandle
from hybrid_trt.sampling.model_wrapper import patch_model
from patched import sampling_node
from tiny_transformers import let_comfyui_load_zimage

STEPS = 2


@dataclass(frozen=True)
class Family:
    """A tiny model of a family, and where packs change it.

    Attributes:
        noise: shape of a latent without its batch.
        methods: of the network itself.
        blocks: name of a list of blocks.
        code: methods of classes and functions of modules that its forward reaches: module, and the way there.
        more: further changes, by name.
    """

    file: str
    width: int
    pooled: int
    noise: tuple[int, ...]
    methods: tuple[str, ...]
    blocks: str
    code: tuple[tuple[str, str], ...]

    more: tuple[tuple[str, Change], ...] = ()

    @property
    def changes(self) -> dict[str, Change]:
        """Return what packs may change, by name."""
        return changes(self.methods, self.blocks, self.code) | dict(self.more)

    def load(self, models: dict[str, Path], dtype: torch.dtype | None = None) -> ModelPatcher:
        """Load its model as ComfyUI's loader node does, with weights of a dtype if given."""
        let_comfyui_load_zimage()
        return token_networks.load(str(models[self.file]), dtype)

    def sample(self, model: ModelPatcher, steps: int = STEPS) -> torch.Tensor:
        """Return a latent as KSampler samples it, in one execution of a node."""
        generator = torch.Generator().manual_seed(7)
        pooled = {"pooled_output": torch.randn(1, self.pooled, generator=generator)} if self.pooled else {}
        prompts = [[[torch.randn(1, n, self.width, generator=generator), dict(pooled)]] for n in (12, 9)]
        noise = torch.randn(1, *self.noise, generator=generator)
        with torch.inference_mode(), sampling_node():
            return comfy.sample.sample(model, noise, steps, 3.0, "euler", "simple", *prompts, torch.zeros_like(noise),
                                       seed=7, disable_pbar=True)  # fmt: skip


_LDM = "comfy.ldm"
FAMILIES = {
    "sd15": Family("tiny_sd15_flat_unet", 768, 0, (4, 8, 8), ("_forward",), "output_blocks", (
        (f"{_LDM}.modules.diffusionmodules.openaimodel", "apply_control"),
        (f"{_LDM}.modules.attention", "BasicTransformerBlock.forward")), (
        ("a deep part", with_part("middle_block.0.in_layers.2", halved)),
        ("a deep setting", with_setting("middle_block.0.in_layers.0", "eps", lambda _: 0.5)))),
    "flux1": Family("tiny_flux1_unet", 64, 32, (16, 8, 8), ("forward_orig", "process_img"), "double_blocks", (
        (f"{_LDM}.flux.layers", "SingleStreamBlock.forward"), (f"{_LDM}.flux.model", "timestep_embedding")), (
        ("a setting that is read once", with_setting("pe_embedder", "theta", lambda theta: theta / 10)),
        ("a list that is written into", partial(list_written, path="pe_embedder", name="axes_dim")))),
    "wan": Family("tiny_wan", 4096, 0, (16, 2, 8, 8), ("forward_orig", "rope_encode", "unpatchify"), "blocks", (
        (f"{_LDM}.wan.model", "WanAttentionBlock.forward"), (f"{_LDM}.wan.model", "sinusoidal_embedding_1d"))),
    "zimage": Family("tiny_zimage", 64, 0, (16, 8, 8), ("patchify_and_embed", "unpatchify"), "layers", (
        (f"{_LDM}.lumina.model", "JointTransformerBlock.forward"),), (
        ("another list", with_setting("rope_embedder", "axes_dim", lambda sizes: sizes[::-1])),)),
    "qwen": Family("tiny_qwen_image", 48, 0, (16, 1, 8, 8), ("process_img",), "transformer_blocks", ()),
    "hunyuan": Family("tiny_hunyuan_video", 64, 768, (16, 2, 8, 8), ("forward_orig", "img_ids"), "double_blocks", (
        (f"{_LDM}.flux.layers", "DoubleStreamBlock.forward"),)),
    "krea2": Family("tiny_krea2", 240, 0, (16, 8, 8), ("_forward",), "blocks", ()),
    "anima": Family("tiny_anima", 1024, 0, (16, 1, 8, 8), ("unpatchify",), "blocks", ()),
}  # fmt: skip
IMPOSSIBLE = {("sd15", "blocks doubled"), ("sd15", "blocks caching")}
"""Changes with which native itself fails."""


class OnEngine:
    """A model behind the sampler patch, on live weights."""

    def __init__(self, model: ModelPatcher, folder: Path):
        network = NativeNetwork.of_model(model, "model")
        profile = network.architecture().profile(RequestedSizes(64, 64, 256, 2, 128))
        choice = EngineChoice(profile, backend="torch")
        self.handle = EngineHandle.look_up(network, choice, Library([folder]), f"in {folder}")
        self.model = patch_model(model, self.handle)

    @property
    def counts(self) -> tuple[int, int]:
        """Return the calls of the last run on the engine, and native."""
        return self.handle.stats.engine, self.handle.stats.native


