"""Wan 2.1 and 2.2: each call and whole prompts equal native's, what no engine takes is a reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.ops
import comfy.sample
import comfy.sd
import pytest
import slow
import torch
from comfy.ldm.wan.ar_model import CausalWanModel
from comfy.ldm.wan.model import CameraWanModel, HumoWanModel, SCAILWanModel
from comfy.ldm.wan.model_animate import AnimateWanModel
from comfy.model_patcher import ModelPatcher
from compiling import COMPILES
from hybrid_trt.architectures import Role, architecture_of
from hybrid_trt.architectures.calls import Unsupported
from hybrid_trt.architectures.shapes import Picture, Profile, RequestedSizes, outside
from hybrid_trt.backends import backends
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_builder.build import build_engine
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Library, trust
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.sessions.file_session import FileSession
from patched import sampling_node
from token_calls import Patched, engine_of, network_of, profile_of, replace_attention
from wan_calls import CALLS, CLIP, FILES, WIDTH

from sampling import error

CPU = torch.device("cpu")
LIMIT = 1e-5


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


@pytest.mark.parametrize("file", slow.cases(
    {file: file for file in FILES}, set(FILES) - {"tiny_wan", "tiny_wan_i2v", "tiny_wan_vace"}))
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
        mask: makes the mask of the latent.
        start: the latent that it begins with; None is one of zeros.
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
    start: torch.Tensor | None = None

    def sample(self, model: ModelPatcher, **options: Any) -> torch.Tensor:
        """Its latent as KSampler samples it in three steps."""
        generator = torch.Generator().manual_seed(7)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        noise, start = (random(self.batch, self.channels, *self.size) for _ in range(2))
        start = start if self.mask else torch.zeros_like(noise) if self.start is None else self.start
        extras = self.entries(random)
        positive, negative = ([[random(1, count, WIDTH), dict(extras)]] for count in self.words)
        mask = self.mask() if self.mask else None
        with torch.inference_mode(), sampling_node():
            return comfy.sample.sample(
                model, noise, 3, self.cfg, "euler", "simple", positive, negative, start, noise_mask=mask, seed=7,
                disable_pbar=True, **options)  # fmt: skip


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


@slow.when("onnxruntime", {"tiny_wan", "tiny_wan22_5b"})
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


def test_two_models_of_a_prompt_have_each_their_engine(models: dict[str, Path], tmp_path: Path) -> None:
    """As 2.2 samples: one model takes the first steps, another the last ones."""
    files, halves = ("tiny_wan", "tiny_wan_low_noise"), ({"last_step": 2}, {"start_step": 2, "disable_noise": True})
    patched = [Patched(network_of(models, file), tmp_path, "torch") for file in files]
    native = [network_of(models, file).patcher for file in files]

    def both(first: ModelPatcher, second: ModelPatcher) -> torch.Tensor:
        begun = Prompt(calls=2).sample(first, **halves[0])
        return Prompt(start=begun).sample(second, **halves[1])

    expected = both(*native)
    assert error(both(native[0], native[0]), expected) > 1e-3
    assert error(both(patched[0].model, patched[1].model), expected) <= LIMIT
    assert [one.counts for one in patched] == [(2, 0), (1, 0)]


def lora(file: str) -> dict[str, torch.Tensor]:
    """A LoRA for layers of each kind, in the names that trainers give."""
    generator, found = torch.Generator().manual_seed(3), {}
    layers = ("self_attn.q", "cross_attn.v", "ffn.0")
    for name in [f"blocks.{i}.{layer}" for i in range(2) for layer in layers]:
        for part, shape in (("A", (4, 256)), ("B", (256, 4))):
            found[f"diffusion_model.{name}.lora_{part}.weight"] = 0.1 * torch.randn(shape, generator=generator)
    return found


@pytest.mark.parametrize("file", ["tiny_wan", "tiny_wan_vace"])
def test_loras_before_and_behind_the_engine_give_natives_latent(
    models: dict[str, Path], tmp_path: Path, file: str
) -> None:
    def with_lora(model: ModelPatcher, strength: float) -> ModelPatcher:
        return comfy.sd.load_lora_for_models(model, None, lora(file), strength, 0)[0]

    prompt = next(one for one in PROMPTS.values() if one.file == file)
    network = network_of(models, file)
    before = NativeNetwork.of_model(with_lora(network.patcher, 0.7), file)
    patched, native = Patched(before, tmp_path, "torch"), with_lora(network_of(models, file).patcher, 0.7)
    plain = prompt.sample(network_of(models, file).patcher)
    for model, reference in ((patched.model, native), (with_lora(patched.model, -0.4), with_lora(native, -0.4))):
        expected = prompt.sample(reference)
        assert error(expected, plain) > 1e-3, "it acts"
        assert error(prompt.sample(model), expected) <= LIMIT
        assert patched.counts == (prompt.calls, 0), patched.handle.stats.reasons
        plain = expected


@pytest.mark.parametrize("name", ["several frames", "a picture", "5B, timesteps per frame", "two control videos"])
def test_half_precision_is_as_near_to_float32_as_native_is(models: dict[str, Path], name: str) -> None:
    one = next(call for call_name, call in CALLS.items() if call_name.startswith(name))
    call, exact = one.drawn(), network_of(models, one.file)
    half = NativeNetwork.of_model(in_bfloat16(models[one.file]), one.file)
    assert half.module.patch_embedding.weight.dtype == torch.float32
    narrow = {n: v.bfloat16() if torch.is_tensor(v) and n != "timestep" else v for n, v in call.items()}
    session = LiveSession(half, backends()["torch"], "bfloat16")
    assert session.live.weights.module.patch_embedding.weight.dtype == torch.float32, "as native keeps it"
    with torch.inference_mode():
        wanted, native = natively(exact, call), natively(half, narrow)
        bound = half.architecture().binding(half.module)(narrow)
        found = bound.finish(session.run(bound.inputs))
    assert relative_error(found.float(), wanted) <= 1.1 * relative_error(native.float(), wanted)


def in_bfloat16(file: Path) -> ModelPatcher:
    """The MODEL of a file as ComfyUI's loader node gives it, computing in bfloat16."""
    return comfy.sd.load_diffusion_model(str(file), model_options={"dtype": torch.bfloat16})


@pytest.mark.parametrize(("name", "change", "reason"), [
    ("several frames", {"context": None}, "no prompt"),
    ("several frames", {"context_latents": [torch.zeros(1, 16, 1, 8, 6)]}, "context_latents"),
    ("several frames", {"control": {"input": [torch.zeros(1)]}}, "control"),
    ("several frames", {"vace_context": torch.zeros(1)}, "vace_context"),
    ("several frames", {"of_another_pack": 1}, "of_another_pack"),
    ("several frames", {"timestep": torch.zeros(1, 2)}, "timesteps of other parts"),
    ("a control video", {"timestep": torch.zeros(1, 3)}, "timesteps of other parts"),
    ("a control video", {"vace_context": torch.zeros(1, 1, 96, 3, 7, 6)}, "odd sides"),
    ("a control video", {"vace_strength": []}, "without a strength"),
    ("a picture", {"clip_fea": None}, "no picture by CLIP"),
    ("first and last picture", {"clip_fea": torch.zeros(1, 771, CLIP)}, "more pictures by CLIP"),
])  # fmt: skip
def test_what_no_engine_takes_is_a_reason(
    models: dict[str, Path], name: str, change: dict[str, Any], reason: str
) -> None:
    network = network_of(models, CALLS[name].file)
    with pytest.raises(Unsupported, match=reason):
        network.architecture().binding(network.module)({**CALLS[name].drawn(), **change})


@pytest.mark.parametrize("prompt", [
    Prompt("tiny_wan_i2v", entries=picture(3, (8, 6))),
    Prompt(entries=lambda random: {"context_latents": [random(1, 16, 1, 8, 6)]}),
], ids=["no picture by CLIP", "references in context"])  # fmt: skip
def test_a_prompt_that_no_engine_takes_is_natives_for_a_reason(
    models: dict[str, Path], tmp_path: Path, prompt: Prompt
) -> None:
    patched = Patched(network_of(models, prompt.file), tmp_path, "torch")
    expected = prompt.sample(network_of(models, prompt.file).patcher)
    assert error(prompt.sample(patched.model), expected) == 0
    assert patched.counts == (0, 3)
    assert patched.handle.stats.reasons.keys() == {"unsupported input"}


def test_what_native_does_not_look_at_is_no_reason(models: dict[str, Path]) -> None:
    network, call = network_of(models, "tiny_wan"), CALLS["several frames"].drawn()
    session = LiveSession(network, backends()["torch"], "float32")
    for more in ({"reference_latent": torch.zeros(1, 16, 8, 6)}, {"clip_fea": torch.zeros(1, 257, CLIP)},
                 {"denoise_mask": torch.zeros(1, 1, 3, 8, 6)}):  # fmt: skip
        assert error_of(network, session.run, {**call, **more}) <= LIMIT, more


def test_a_reference_for_a_network_that_takes_one_is_a_reason(models: dict[str, Path]) -> None:
    """Such is Fun control; without a reference an engine serves it."""
    network = network_of(models, "tiny_wan")
    network.module.ref_conv = torch.nn.Conv2d(16, 256, 2, 2)
    bind, call = network.architecture().binding(network.module), CALLS["several frames"].drawn()
    assert bind(call).inputs
    with pytest.raises(Unsupported, match="reference_latent"):
        bind({**call, "reference_latent": torch.zeros(1, 16, 8, 6)})


@pytest.mark.parametrize("kind", [CameraWanModel, SCAILWanModel, HumoWanModel, CausalWanModel, AnimateWanModel])
def test_no_engine_is_for_relatives(kind: type) -> None:
    """They compute more: natively they are as before, and the node names their class."""
    sizes = {"dim": 256, "ffn_dim": 256, "num_heads": 2, "num_layers": 2}
    net = kind(**sizes, operations=comfy.ops.disable_weight_init, device="meta", dtype=torch.float32)
    assert architecture_of(net, Role.BACKBONE) is None


def test_the_same_places_are_the_same_tensor_and_other_nodes_options_move_them(models: dict[str, Path]) -> None:
    network, call = network_of(models, "tiny_wan"), CALLS["several frames"].drawn()
    bind = network.architecture().binding(network.module)
    first, second = (bind({**call, "x": call["x"] + i}).inputs for i in range(2))
    assert first["pe"] is second["pe"]
    options = {"rope_options": {"scale_x": 0.5, "shift_t": 3.0}}
    session = LiveSession(network, backends()["torch"], "float32")
    with torch.inference_mode():
        bound = bind({**call, "transformer_options": dict(options)})
        moved = network.module(**call, transformer_options=dict(options))
        assert relative_error(bound.finish(session.run(bound.inputs)), moved) <= LIMIT
        assert relative_error(moved, natively(network, call)) > 1e-3


PATCHES: dict[str, Callable[..., Any]] = {
    "attn1_patch": lambda given: given["x"] * 1.5,
    "attn2_patch": lambda given: given["x"] * 1.5,
    "double_block": lambda given: {"img": given["img"] * 1.5},
}


def replace_block(model: ModelPatcher) -> None:
    model.set_model_patch_replace(lambda given, more: {
        "img": more["original_block"](given)["img"] * 1.5}, "dit", "double_block", 0)  # fmt: skip


CHANGES: dict[str, Callable[[ModelPatcher], None]] = {
    "a block": replace_block,
    "attention": replace_attention,
    **{name: lambda model, name=name: model.set_model_patch(PATCHES[name], name) for name in PATCHES},
}


@slow.when("tiny_wan_vace", {"a block"})
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("file", ["tiny_wan", "tiny_wan_vace"])
def test_a_patch_inside_the_network_gives_natives_picture_for_a_reason(
    models: dict[str, Path], tmp_path: Path, file: str, name: str
) -> None:
    prompt = next(one for one in PROMPTS.values() if one.file == file)
    patched, native = Patched(network_of(models, file), tmp_path, "torch"), network_of(models, file).patcher
    plain = prompt.sample(native)
    CHANGES[name](native)
    CHANGES[name](patched.model)
    expected = prompt.sample(native)
    assert error(expected, plain) > 1e-3, "the patch acts"
    assert error(prompt.sample(patched.model), expected) == 0
    assert patched.counts == (0, prompt.calls)
    (reason,) = patched.handle.stats.reasons
    assert "patch" in reason


def test_a_video_is_one_call_with_both_prompts_and_its_frames(models: dict[str, Path]) -> None:
    video = Picture.sampled(120, 136, 1, cfg=4.0, length=81)
    for file, rows, columns in (("tiny_wan", 9, 8), ("tiny_wan22_5b", 4, 4)):
        network = network_of(models, file)
        (call,) = network.architecture().calls(profile_of(network), video)
        assert [call[symbol] for symbol in "BFRC"] == [2, 21, rows, columns]


def test_without_numbers_the_profile_is_what_the_family_is_used_for(models: dict[str, Path]) -> None:
    for file, words, size in (("tiny_wan", "832x480", (832, 480, 81)), ("tiny_wan22_5b", "1280x704", (1280, 704, 121))):
        architecture = network_of(models, file).architecture()
        profile = architecture.profile(RequestedSizes())
        width, height, length = size
        (call,) = architecture.calls(profile, Picture(width, height, (1,), length=length))
        assert outside(profile, call, architecture.symbols) is None
        assert architecture.words(profile) == "up to 2 in a batch, 256 to 1280 px, 512 tokens, up to 33 latent frames"
        assert architecture.call_words(call) == f"{words}, 512 tokens, {call['F']} latent frames"


@pytest.mark.slow
@COMPILES
@pytest.mark.parametrize(("name", "more"), [
    ("text to video", {}), ("a picture", {"I": 257}), ("two control videos", {"V": 2})])  # fmt: skip
def test_one_compiled_file_serves_prompts_of_any_length_and_any_lora(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, more: dict[str, int]
) -> None:
    monkeypatch.setenv(trust.FOLDER_VARIABLE, str(tmp_path / "keys"))
    prompt, torch_backend = PROMPTS[name], backends()["torch"]
    network, call = network_of(models, prompt.file), {"B": 2, "F": 3, "R": 4, "C": 3, "T": 97, **more}
    order = BuildOrder(network, "float32", Profile.around([call]), torch_backend, calls=(call,))
    build_engine(order, Library([tmp_path]), lambda *_: None)
    patched, native = Patched(network, tmp_path, "torch"), network_of(models, prompt.file).patcher
    loras = [comfy.sd.load_lora_for_models(model, None, lora(prompt.file), 0.7, 0)[0]
             for model in (patched.model, native)]  # fmt: skip
    for words in ((12, 12), (130, 130)):
        longer = replace(prompt, words=words)
        for model, reference in ((patched.model, native), loras):
            assert error(longer.sample(model), longer.sample(reference)) <= LIMIT
            assert patched.counts == (prompt.calls, 0), patched.handle.stats.reasons
            assert patched.handle.session.uncovered is None, "the file served"
