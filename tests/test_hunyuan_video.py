"""HunyuanVideo 1.5, HunyuanVideo, HunyuanImage 2.1: each call and whole prompts equal native's, the rest is a reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.sample
import comfy.sd
import pytest
import torch
from comfy.model_patcher import ModelPatcher
from hybrid_trt.architectures.calls import Unsupported
from hybrid_trt.backends import backends
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.sessions.file_session import FileSession
from patched import sampling_node
from token_calls import Patched, engine_of, network_of

from sampling import error

CPU = torch.device("cpu")
LIMIT = 1e-5
WIDTH, BYT5, SIGLIP, POOLED = 64, 1472, 1152, 768
VIDEO15, SR, VIDEO = "tiny_hunyuan_video15", "tiny_hunyuan_video15_sr", "tiny_hunyuan_video"
IMAGE, REFINER = "tiny_hunyuan_image21", "tiny_hunyuan_image21_refiner"
CHANNELS = {VIDEO15: 65, SR: 98, VIDEO: 16, IMAGE: 64, REFINER: 128}


@dataclass(frozen=True)
class Call:
    """A call of a network: file, batch, frames and sides of the latent, tokens of the prompt, by byT5 and of a picture.

    Attributes:
        sigma: index in the sampler's list; None is one that is not in it.
    """

    file: str = VIDEO15
    batch: int = 1
    size: tuple[int, ...] = (3, 5, 4)
    words: int = 9
    glyphs: int = 0
    seen: int = 0
    sigma: int | None = 1
    guidance: float | None = 6.0

    def drawn(self, seed: int = 1) -> dict[str, Any]:
        """Its arguments by name."""
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        every = torch.tensor([1.0, 0.8, 0.5, 0.0])
        sigma = torch.tensor(0.77) if self.sigma is None else every[self.sigma]
        call = {"x": random(self.batch, CHANNELS[self.file], *self.size), "timestep": 1000 * sigma.repeat(self.batch),
                "context": random(self.batch, self.words, WIDTH), "y": random(self.batch, POOLED),
                "transformer_options": {"sigmas": sigma.reshape(1), "sample_sigmas": every}}  # fmt: skip
        if self.guidance is not None:
            call["guidance"] = torch.full((self.batch,), self.guidance)
        if self.glyphs:
            call["txt_byt5"] = random(self.batch, self.glyphs, BYT5)
        if self.seen:
            call["clip_fea"] = random(self.batch, self.seen, SIGLIP)
        return call


CALLS = {
    "one frame": Call(size=(1, 5, 4)),
    "several frames, a batch": Call(batch=2, size=(4, 3, 7)),
    "a prompt of one token": Call(words=1),
    "a long prompt": Call(words=300),
    "text by byT5": Call(glyphs=13),
    "a picture": Call(batch=2, seen=25),
    "a picture and text by byT5": Call(glyphs=7, seen=31, words=20),
    "meanflow": Call(SR, 2, glyphs=5, seen=12),
    "meanflow, a sigma of no list": Call(SR, sigma=None),
    "original": Call(VIDEO, size=(3, 8, 6)),
    "original, a batch with another guidance": Call(VIDEO, 2, (2, 4, 10), 30, guidance=2.5),
    "a still picture": Call(IMAGE, 2, (7, 5), 12),
    "a still picture, text by byT5": Call(IMAGE, 1, (4, 6), 21, 17),
    "refiner": Call(REFINER, 1, (2, 4, 5)),
}
FILES = dict.fromkeys(call.file for call in CALLS.values())


def natively(network: NativeNetwork, call: dict[str, Any]) -> torch.Tensor:
    return network.module(**call)


def error_of(network: NativeNetwork, run: Any, call: dict[str, Any]) -> float:
    with torch.inference_mode():
        bound = network.architecture().binding(network.module)(call)
        result = bound.finish(run(bound.inputs))
        expected = natively(network, call)
        assert result.shape == expected.shape
        return relative_error(result, expected)


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
