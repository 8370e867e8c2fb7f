"""The contract that each model family keeps: what a family gives, and how its calls and prompts are compared.

A family is data: a ``Family`` in a module of ``model_families/``. ``test_families.py`` holds its calls to the contract,
``test_family_prompts.py`` its prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import comfy.sample
import torch
from built_once import built_once
from comfy.model_patcher import ModelPatcher
from comfy.nested_tensor import NestedTensor
from hybrid_trt.architectures.shapes import Picture, Profile
from hybrid_trt.backends import backends
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Engine, Library
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.sessions.session import Session
from patched import sampling_node
from token_calls import network_of, profile_of
from torch.utils import _pytree as pytree

LIMIT = 1e-5
ACTS = 1e-3
"""Largest error of an engine in float32; smallest difference that something makes that acts."""
Models = Mapping[str, Path]
Random = Callable[..., torch.Tensor]
Change = Callable[[ModelPatcher], Any]


@dataclass(frozen=True)
class Call:
    """A native call.

    Attributes:
        file: the tiny model, or the layout of a random network.
        draw: makes the arguments by name, of the network and a seed.
    """

    file: str
    draw: Callable[[NativeNetwork, int], dict[str, Any]]

    def drawn(self, network: NativeNetwork, seed: int = 1) -> dict[str, Any]:
        """Its arguments by name."""
        return self.draw(network, seed)


@dataclass(frozen=True)
class Prompt:
    """A prompt, as KSampler samples it in three steps.

    Attributes:
        width: features of a token.
        shape: of the latent.
        words: tokens of both prompts.
        pooled: features of the pooled prompt; 0 is none.
        entries: makes further entries of both conditionings, of a function that draws tensors.
        mask: of the latent, by frame.
        start: the latent that it begins with; None is one of zeros.
        calls: of the network.
        sound: shape of the sound's latent, which is sampled together with a video; empty where there is none.
    """

    file: str
    width: int
    shape: tuple[int, ...] = (1, 16, 1, 8, 6)
    words: tuple[int, int] = (12, 12)
    cfg: float = 3.0
    pooled: int = 0
    entries: Callable[[Random], dict[str, Any]] = lambda random: {}
    mask: tuple[float, ...] = ()
    start: torch.Tensor | None = None
    calls: int = 3
    sound: tuple[int, ...] = ()

    def sample(self, model: ModelPatcher, **options: Any) -> torch.Tensor:
        """Its latent, in one execution of a sampling node."""
        random = drawing(7)
        noise, drawn = random(*self.shape), random(*self.shape)
        if self.sound:
            noise = NestedTensor((noise, random(*self.sound)))
        start, mask = noise * 0.0 if self.start is None else self.start, None
        if self.mask:
            start, mask = drawn, torch.tensor(self.mask).reshape(1, 1, -1, 1, 1).expand(1, 1, *self.shape[2:])
        extras = ({"pooled_output": random(1, self.pooled)} if self.pooled else {}) | self.entries(random)
        positive, negative = ([[random(1, count, self.width), dict(extras)]] for count in self.words)
        options = {"noise_mask": mask, **options}
        with torch.inference_mode(), sampling_node():
            found = comfy.sample.sample(
                model, noise, 3, self.cfg, "euler", "simple", positive, negative, start, seed=7,
                disable_pbar=True, **options)  # fmt: skip
        return torch.cat([t.flatten() for t in found.unbind()]) if self.sound else found


@dataclass(frozen=True)
class Sizes:
    """Sizes that a file is used for without numbers.

    Attributes:
        pictures: that its profile has to hold.
        words: the profile in words.
        last: the last picture's call in words, with ``more`` of its sizes changed.
        sampled: some sizes of the only call that CFG makes of a small picture, or of ``length`` frames.
    """

    pictures: tuple[Picture, ...]
    words: str
    last: str
    more: Mapping[str, int] = field(default_factory=dict)
    sampled: Mapping[str, int] = field(default_factory=dict)
    length: int = 1


@dataclass(frozen=True)
class Family:
    """All that the contract needs of a family.

    Attributes:
        calls: by name; they cover each file.
        refused: a call -> its changes that no engine takes, and words of the reason.
        unlike: a call -> calls that native makes other results of. Else equal results would prove nothing.
        ignored: a call -> changes that native does not look at.
        steady: a call -> inputs that are the same tensors in the next step, so that a captured graph copies them once.
        half: calls in half precision, and the types.
        float32: inputs that stay so in half precision, as native's do.
        network: makes the network of a file, with weights of a type.
        profile: sizes that the engines of the tests serve.
        prompts: by name.
        native: prompts that no engine takes.
        loras: a prompt -> layers that a LoRA changes.
        dynamic: some of these prompts, sampled under dynamic VRAM too.
        patches: words of a reason, and more in brackets -> what puts a patch inside a model.
        patched: prompts that are sampled with patches.
        sizes: by file.
        compiled: prompts of files that are compiled. Prompts of other lengths use the same engine.
        any_size: a file -> calls that its compiled engine serves.
        slow: a test -> the cases that CI leaves out.
    """

    name: str
    calls: Mapping[str, Call]
    refused: Mapping[str, Iterable[tuple[Mapping[str, Any], str]]]
    unlike: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ignored: Mapping[str, Iterable[Mapping[str, Any]]] = field(default_factory=dict)
    steady: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    half: Mapping[str, Iterable[torch.dtype]] = field(default_factory=dict)
    float32: Collection[str] = ()
    network: Callable[..., NativeNetwork] = network_of
    profile: Callable[[NativeNetwork], Profile] = profile_of
    prompts: Mapping[str, Prompt] = field(default_factory=dict)
    native: Mapping[str, Prompt] = field(default_factory=dict)
    loras: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    dynamic: Iterable[str] = ()
    patches: Mapping[str, Change] = field(default_factory=dict)
    patched: Iterable[str] = ()
    sizes: Mapping[str, Sizes] = field(default_factory=dict)
    compiled: Iterable[str] = ()
    any_size: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    slow: Mapping[str, Collection[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    @property
    def files(self) -> list[str]:
        """Files that have calls."""
        return list(dict.fromkeys(call.file for call in self.calls.values()))

    def engine(self, network: NativeNetwork, folder: Path) -> Engine:
        """An engine of ONNX Runtime that is as exact as the contract wants."""
        order = BuildOrder(network, "float32", self.profile(network), backends()["onnxruntime"])
        engine = built_once(order, Library([folder]))
        assert engine.manifest.parity["rel_err"] <= LIMIT
        return engine

    def check_calls(self, network: NativeNetwork, session: Session, file: str) -> None:
        """Compare each call of a file with native's."""
        errors = {name: error_of(network, session, call.drawn(network))
                  for name, call in self.calls.items() if call.file == file}  # fmt: skip
        assert max(errors.values()) <= LIMIT, errors


def drawing(seed: int) -> Random:
    """A function that draws tensors of the shapes that it gets."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator)


def live(network: NativeNetwork, precision: str = "float32") -> LiveSession:
    return LiveSession(network, backends()["torch"], precision)


def natively(network: NativeNetwork, call: Mapping[str, Any]) -> Any:
    """Native's result: a tensor, or a ControlNet's lists of residuals."""
    given = pytree.tree_map(lambda value: value, {"transformer_options": {}, **call})  # native empties lists
    time = "timesteps" if "timesteps" in given else "timestep"  # each forward has its own name for it
    with torch.inference_mode():
        return network.module(given.pop("x"), given.pop(time), **given)


def on_engine(network: NativeNetwork, session: Session, call: Mapping[str, Any]) -> Any:
    """The result of an engine."""
    session.sync_from(network, network.patcher)
    bound = network.architecture().binding(network.module)(call)
    with torch.inference_mode():
        return bound.finish(session.run(bound.inputs, bound.extras))


def difference(found: Any, expected: Any) -> float:
    """The largest error among the tensors of two results, which are to be as many and in the same places."""
    own, theirs = ({"": [one]} if torch.is_tensor(one) else {"": one} if isinstance(one, list) else {
        kind: list(many) for kind, many in one.items()} for one in (found, expected))  # fmt: skip
    pairs = [pair for kind in theirs for pair in zip(own[kind], theirs[kind], strict=True)]
    assert own.keys() == theirs.keys()
    assert all(a is b is None or a.shape == b.shape for a, b in pairs)
    return max(relative_error(a, b) for a, b in pairs if b is not None)


def error_of(network: NativeNetwork, session: Session, call: Mapping[str, Any]) -> float:
    """The error of an engine against native."""
    return difference(on_engine(network, session, call), natively(network, call))


def lora_of(network: NativeNetwork, layers: Iterable[str]) -> dict[str, torch.Tensor]:
    """A LoRA for some layers, in the names that trainers give."""
    random, found = drawing(3), {}
    for name in layers:
        rows, columns = network.module.get_submodule(name).weight.shape
        for part, shape in (("A", (4, columns)), ("B", (rows, 4))):
            found[f"diffusion_model.{name}.lora_{part}.weight"] = 0.1 * random(*shape)
    return found


def model_patch(name: str, patch: Callable[..., Any]) -> Change:
    """Puts a patch at one of ComfyUI's places inside the network."""
    return lambda model: model.set_model_patch(patch, name)
