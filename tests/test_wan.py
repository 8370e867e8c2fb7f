"""Wan 2.1 and 2.2: each call and whole prompts equal native's, what no engine takes is a reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.sample
import comfy.sd
import pytest
import torch
from comfy.model_patcher import ModelPatcher
from hybrid_trt.architectures.calls import Unsupported
from hybrid_trt.architectures.shapes import Picture, RequestedSizes, outside
from hybrid_trt.backends import backends
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.sessions.file_session import FileSession
from patched import sampling_node
from token_calls import Patched, engine_of, network_of, profile_of, replace_attention

from sampling import error

CPU = torch.device("cpu")
LIMIT = 1e-5
WIDTH, CLIP = 4096, 1280
"""Features of a token of the prompt, and of CLIP."""


@dataclass(frozen=True)
class Call:
    """A call of a network: file, batch, frames and sides of the latent, tokens of the prompt and of CLIP.

    Attributes:
        channels: of what goes in.
        behind: frames of further latents behind the video's.
        controls: strengths of control videos.
        apart: whether each frame has a timestep of its own.
    """

    file: str = "tiny_wan"
    batch: int = 1
    size: tuple[int, int, int] = (3, 8, 6)
    words: int = 9
    channels: int = 16
    clip: int = 0
    behind: int = 0
    controls: tuple[float, ...] = ()
    apart: bool = False

    def drawn(self, seed: int = 1) -> dict[str, Any]:
        """Its arguments by name."""
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        times = (self.batch, self.size[0]) if self.apart else (self.batch,)
        call = {"x": random(self.batch, self.channels, *self.size), "context": random(self.batch, self.words, WIDTH),
                "timestep": 999 * torch.rand(times, generator=generator)}  # fmt: skip
        if self.clip:
            call["clip_fea"] = random(self.batch, self.clip, CLIP)
        if self.behind:
            call["time_dim_concat"] = random(self.batch, self.channels, self.behind, *self.size[1:])
        if self.controls:
            call["vace_context"] = random(self.batch, len(self.controls), 96, *self.size)
            call["vace_strength"] = list(self.controls)
        return call


CALLS = {
    "one frame": Call(size=(1, 8, 6)),
    "several frames": Call(),
    "more frames": Call(size=(5, 7, 6)),
    "odd sides, a batch": Call(batch=2, size=(2, 13, 11), words=30),
    "a prompt of one token": Call(words=1),
    "a long prompt": Call(words=128),
    "references behind the video": Call(behind=2),
    "a picture": Call("tiny_wan_i2v", 2, (3, 7, 8), 12, 36, 257),
    "first and last picture": Call("tiny_wan_flf2v", 1, channels=36, clip=514),
    "first picture of such a network": Call("tiny_wan_flf2v", 1, channels=36, clip=257),
    "2.2's picture": Call("tiny_wan22_i2v", 2, channels=36),
    "5B": Call("tiny_wan22_5b", channels=48),
    "5B, timesteps per frame": Call("tiny_wan22_5b", 2, (4, 5, 6), 20, 48, apart=True),
    "a control video": Call("tiny_wan_vace", controls=(1.0,)),
    "two control videos, a batch": Call("tiny_wan_vace", 2, (2, 6, 10), 20, controls=(0.4, 1.3)),
}
FILES = dict.fromkeys(call.file for call in CALLS.values())


def natively(network: NativeNetwork, call: dict[str, Any]) -> torch.Tensor:
    return network.module(**call, transformer_options={})


def error_of(network: NativeNetwork, run: Any, call: dict[str, Any]) -> float:
    with torch.inference_mode():
        bound = network.architecture().binding(network.module)(call)
        result = bound.finish(run(bound.inputs))
        assert result.shape[2:] == call["x"].shape[2:]
        return relative_error(result, natively(network, call))


@pytest.mark.parametrize("name", CALLS)
def test_each_call_on_live_weights_is_natives(models: dict[str, Path], name: str) -> None:
    network = network_of(models, CALLS[name].file)
    session = LiveSession(network, backends()["torch"], "float32")
    assert error_of(network, session.run, CALLS[name].drawn()) <= LIMIT


@pytest.mark.parametrize("file", FILES)
def test_one_engine_of_onnx_runtime_serves_all_calls(models: dict[str, Path], tmp_path: Path, file: str) -> None:
    network = network_of(models, file)
    session = FileSession(engine_of(network, tmp_path), backends()["onnxruntime"].load, CPU)
    worst = {name: error_of(network, session.run, call.drawn()) for name, call in CALLS.items() if call.file == file}
    assert max(worst.values()) <= LIMIT, worst


@dataclass(frozen=True)
class Prompt:
    """A prompt: file, frames and sides of the latent, tokens of both prompts, and what else conditions it.

    Attributes:
        entries: makes further entries of both conditionings of a function that draws tensors.
        calls: of the network in three steps.
        mask: makes the mask of the latent of a function that draws tensors.
    """

    file: str = "tiny_wan"
    size: tuple[int, int, int] = (3, 8, 6)
    words: tuple[int, int] = (12, 12)
    cfg: float = 3.0
    batch: int = 1
    channels: int = 16
    entries: Callable[[Callable[..., torch.Tensor]], dict[str, Any]] = lambda random: {}
    mask: Callable[[], torch.Tensor] | None = None
    calls: int = 3

    def sample(self, model: ModelPatcher, **options: Any) -> torch.Tensor:
        """Its latent as KSampler samples it in three steps."""
        generator = torch.Generator().manual_seed(7)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        noise, start = (random(self.batch, self.channels, *self.size) for _ in range(2))
        extras = self.entries(random)
        positive, negative = ([[random(1, count, WIDTH), dict(extras)]] for count in self.words)
        mask = self.mask() if self.mask else None
        with torch.inference_mode(), sampling_node():
            return comfy.sample.sample(
                model, noise, 3, self.cfg, "euler", "simple", positive, negative, start if self.mask else 0 * start,
                noise_mask=mask, seed=7, disable_pbar=True, **options)  # fmt: skip


def picture(frames: int, sides: tuple[int, int], clip: int = 0) -> Callable[[Callable[..., torch.Tensor]], dict]:
    """Entries of a picture to begin with, as ComfyUI's nodes for image to video make them."""

    def entries(random: Callable[..., torch.Tensor]) -> dict[str, Any]:
        mask = torch.ones(1, 1, frames, *sides)
        mask[:, :, :1] = 0
        seen = {"clip_vision_output": SimpleNamespace(penultimate_hidden_states=random(1, clip, CLIP))} if clip else {}
        return {"concat_latent_image": random(1, 16, frames, *sides), "concat_mask": mask, **seen}

    return entries


def controlled(*strengths: float) -> Callable[[Callable[..., torch.Tensor]], dict]:
    """Entries of control videos, as ComfyUI's node for VACE makes them."""

    def entries(random: Callable[..., torch.Tensor]) -> dict[str, Any]:
        return {"vace_frames": [random(1, 32, 3, 8, 6) for _ in strengths], "vace_strength": list(strengths),
                "vace_mask": [random(1, 64, 3, 8, 6) for _ in strengths]}  # fmt: skip

    return entries


def first_frame_kept() -> torch.Tensor:
    mask = torch.ones(1, 1, 3, 8, 6)
    mask[:, :, :1] = 0
    return mask


PROMPTS = {
    "text to video": Prompt(),
    "one frame, odd sides": Prompt(size=(1, 13, 11)),
    "prompts of two lengths": Prompt(words=(9, 30), calls=6),
    "two videos without CFG": Prompt(batch=2, cfg=1.0),
    "references behind the video": Prompt(entries=lambda random: {"time_dim_concat": random(1, 16, 2, 8, 6)}),
    "a picture": Prompt("tiny_wan_i2v", entries=picture(3, (8, 6), 257)),
    "first and last picture": Prompt("tiny_wan_flf2v", entries=picture(3, (8, 6), 514)),
    "2.2's picture": Prompt("tiny_wan22_i2v", entries=picture(3, (8, 6))),
    "5B": Prompt("tiny_wan22_5b", channels=48),
    "5B, the first frame given": Prompt("tiny_wan22_5b", channels=48, mask=first_frame_kept),
    "a control video": Prompt("tiny_wan_vace", entries=controlled(0.8)),
    "two control videos": Prompt("tiny_wan_vace", entries=controlled(0.8, 1.4)),
    "VACE without control": Prompt("tiny_wan_vace"),
}


@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
@pytest.mark.parametrize("file", FILES)
def test_whole_prompts_are_natives(models: dict[str, Path], tmp_path: Path, file: str, backend: str) -> None:
    network = network_of(models, file)
    if backend == "onnxruntime":
        engine_of(network, tmp_path)
    patched, native, seen = Patched(network, tmp_path, backend), network_of(models, file).patcher, []
    for name, prompt in PROMPTS.items():
        if prompt.file == file:
            expected = prompt.sample(native)
            assert error(prompt.sample(patched.model), expected) <= LIMIT, name
            assert patched.counts == (prompt.calls, 0), (name, patched.handle.stats.reasons)
            seen.append(expected)
    assert all(a.shape != b.shape or error(a, b) > 1e-3 for a, b in zip(seen, seen[1:], strict=False)), "all act"
