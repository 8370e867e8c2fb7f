"""HunyuanVideo 1.5, HunyuanVideo, HunyuanImage 2.1: calls and prompts equal native's, the rest is a reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.sample
import comfy.sd
import pytest
import slow
import torch
from comfy.model_patcher import ModelPatcher
from compiling import COMPILES
from dynamic_vram import on_cpu
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
    "a long prompt": Call(words=128),
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


@pytest.mark.parametrize("file", slow.cases({file: file for file in FILES}, set(FILES) - {VIDEO15}))
def test_one_engine_of_onnx_runtime_serves_all_calls(models: dict[str, Path], tmp_path: Path, file: str) -> None:
    network = network_of(models, file)
    session = FileSession(engine_of(network, tmp_path), backends()["onnxruntime"].load, CPU)
    worst = {name: error_of(network, session.run, call.drawn()) for name, call in CALLS.items() if call.file == file}
    assert max(worst.values()) <= LIMIT, worst


Entries = Callable[[Callable[..., torch.Tensor]], dict[str, Any]]


@dataclass(frozen=True)
class Prompt:
    """A prompt: file, latent, tokens of both prompts, and what else conditions it.

    Attributes:
        entries: makes further entries of both conditionings of a function that draws tensors.
        calls: of the network in three steps.
        mask: of the latent, by frame.
    """

    file: str = VIDEO15
    shape: tuple[int, ...] = (1, 32, 3, 5, 4)
    words: tuple[int, int] = (12, 12)
    cfg: float = 3.0
    entries: Entries = lambda random: {}
    calls: int = 3
    mask: tuple[float, ...] = ()

    def sample(self, model: ModelPatcher) -> torch.Tensor:
        """Its latent as KSampler samples it in three steps."""
        generator = torch.Generator().manual_seed(7)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        noise, start = random(*self.shape), random(*self.shape)
        extras = {"pooled_output": random(1, POOLED), **self.entries(random)}
        positive, negative = ([[random(1, count, WIDTH), dict(extras)]] for count in self.words)
        mask = torch.tensor(self.mask).reshape(1, 1, -1, 1, 1).expand(1, 1, *self.shape[2:]) if self.mask else None
        with torch.inference_mode(), sampling_node():
            return comfy.sample.sample(
                model, noise, 3, self.cfg, "euler", "simple", positive, negative,
                torch.zeros_like(noise) if mask is None else start, noise_mask=mask, seed=7, disable_pbar=True,
            )  # fmt: skip


def picture(random: Callable[..., torch.Tensor]) -> dict[str, Any]:
    """Entries of a picture to begin with, as ComfyUI's node for image to video makes them."""
    mask = torch.ones(1, 1, 3, 5, 4)
    mask[:, :, :1] = 0
    return {"concat_latent_image": random(1, 32, 3, 5, 4), "concat_mask": mask,
            "clip_vision_output": SimpleNamespace(last_hidden_state=random(1, 729, SIGLIP))}  # fmt: skip


def glyphs(count: int) -> Entries:
    return lambda random: {"conditioning_byt5small": random(1, count, BYT5)}


PROMPTS = {
    "text to video": Prompt(),
    "prompts of two lengths": Prompt(words=(9, 30), calls=6),
    "text by byT5": Prompt(entries=glyphs(13)),
    "a picture": Prompt(entries=picture),
    "a picture and text by byT5, no CFG": Prompt(cfg=1.0, entries=lambda random: {
        **picture(random), **glyphs(8)(random)}),
    "two videos": Prompt(shape=(2, 32, 2, 4, 6)),
    "distilled": Prompt(SR, cfg=1.0, entries=lambda random: {"concat_latent_image": random(1, 66, 3, 5, 4)}),
    "original": Prompt(VIDEO, (1, 16, 3, 8, 6)),
    "original, another guidance": Prompt(VIDEO, (1, 16, 3, 8, 6), cfg=1.0, entries=lambda random: {"guidance": 2.0}),
    "original, the first frame given": Prompt(VIDEO, (1, 16, 3, 8, 6), mask=(0.0, 1.0, 1.0)),
    "a still picture": Prompt(IMAGE, (1, 64, 5, 7)),
    "a still picture, text by byT5": Prompt(IMAGE, (2, 64, 5, 7), entries=glyphs(5)),
    "refiner": Prompt(REFINER, (1, 64, 2, 5, 4), entries=lambda random: {
        "concat_latent_image": random(1, 32, 3, 5, 4), "noise_augmentation": 0.1}),
}  # fmt: skip


@slow.when("onnxruntime")
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


def lora(file: str) -> dict[str, torch.Tensor]:
    """A LoRA for layers of each kind, in the names that trainers give."""
    generator, found = torch.Generator().manual_seed(3), {}
    layers = {"double_blocks.0.img_attn.qkv": 768, "double_blocks.1.txt_mlp.0": 1024, "single_blocks.0.linear1": 1792,
              "txt_in.individual_token_refiner.blocks.0.self_attn.proj": 256}  # fmt: skip
    for name, width in layers.items():
        found[f"diffusion_model.{name}.lora_A.weight"] = 0.1 * torch.randn(4, 256, generator=generator)
        found[f"diffusion_model.{name}.lora_B.weight"] = 0.1 * torch.randn(width, 4, generator=generator)
    return found


@slow.when(VIDEO)
@pytest.mark.parametrize("file", [VIDEO15, VIDEO])
def test_loras_before_and_behind_the_engine_give_natives_latent(
    models: dict[str, Path], tmp_path: Path, file: str
) -> None:
    def with_lora(model: ModelPatcher, strength: float) -> ModelPatcher:
        return comfy.sd.load_lora_for_models(model, None, lora(file), strength, 0)[0]

    prompt = next(one for one in PROMPTS.values() if one.file == file)
    before = NativeNetwork.of_model(with_lora(network_of(models, file).patcher, 0.7), file)
    patched, native = Patched(before, tmp_path, "torch"), with_lora(network_of(models, file).patcher, 0.7)
    plain = prompt.sample(network_of(models, file).patcher)
    for model, reference in ((patched.model, native), (with_lora(patched.model, -0.4), with_lora(native, -0.4))):
        expected = prompt.sample(reference)
        assert error(expected, plain) > 1e-3, "it acts"
        assert error(prompt.sample(model), expected) <= LIMIT
        assert patched.counts == (prompt.calls, 0), patched.handle.stats.reasons
        plain = expected


@slow.when("float16")
@pytest.mark.parametrize("name", ["a picture and text by byT5", "meanflow", "a still picture, text by byT5"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_precision_is_as_near_to_float32_as_native_is(
    models: dict[str, Path], name: str, dtype: torch.dtype
) -> None:
    one = CALLS[name]
    call, exact = one.drawn(), network_of(models, one.file)
    loaded = comfy.sd.load_diffusion_model(str(models[one.file]), model_options={"dtype": dtype})
    half = NativeNetwork.of_model(loaded, one.file)
    narrow = {n: v.to(dtype) if torch.is_tensor(v) and n != "timestep" else v for n, v in call.items()}
    session = LiveSession(half, backends()["torch"], str(dtype).removeprefix("torch."))
    with torch.inference_mode():
        wanted, native = natively(exact, call), natively(half, narrow)
        bound = half.architecture().binding(half.module)(narrow)
        found = bound.finish(session.run(bound.inputs))
    assert found.dtype == dtype
    assert relative_error(found.float(), wanted) <= 1.1 * relative_error(native.float(), wanted)


@pytest.mark.parametrize(("name", "change", "reason"), [
    ("one frame", {"context": None}, "no prompt"),
    ("one frame", {"attention_mask": torch.ones(1, 9, dtype=torch.long)}, "attention_mask"),
    ("one frame", {"ref_latent": torch.zeros(1, 65, 1, 5, 4)}, "ref_latent"),
    ("one frame", {"guiding_frame_index": torch.zeros(1)}, "guiding_frame_index"),
    ("one frame", {"control": {"input": [torch.zeros(1)]}}, "control"),
    ("one frame", {"of_another_pack": 1}, "of_another_pack"),
    ("original", {"y": None}, "no y"),
    ("original", {"guidance": None}, "no guidance"),
    ("original", {"clip_fea": torch.zeros(1, 25, SIGLIP)}, "a picture by CLIP"),
    ("original", {"x": torch.zeros(1, 16, 3, 7, 6)}, "odd sides"),
    ("meanflow", {"transformer_options": {}}, "no list of sigmas"),
])  # fmt: skip
def test_what_no_engine_takes_is_a_reason(
    models: dict[str, Path], name: str, change: dict[str, Any], reason: str
) -> None:
    network = network_of(models, CALLS[name].file)
    with pytest.raises(Unsupported, match=reason):
        network.architecture().binding(network.module)({**CALLS[name].drawn(), **change})


@pytest.mark.parametrize("prompt", [
    Prompt(words=(12, 14), cfg=1.0, entries=lambda random: {"attention_mask": torch.tensor([[1] * 10 + [0] * 2])}),
    Prompt(VIDEO, (1, 16, 3, 8, 6), mask=(0.0, 1.0, 1.0), entries=lambda random: {"guiding_frame_index": 0}),
], ids=["a mask of the prompt", "a frame of its own time"])  # fmt: skip
def test_a_prompt_that_no_engine_takes_is_natives_for_a_reason(
    models: dict[str, Path], tmp_path: Path, prompt: Prompt
) -> None:
    patched, native = Patched(network_of(models, prompt.file), tmp_path, "torch"), network_of(models, prompt.file)
    expected = prompt.sample(native.patcher)
    assert error(replace(prompt, entries=lambda random: {}).sample(native.patcher), expected) > 1e-3, "it acts"
    assert error(prompt.sample(patched.model), expected) == 0
    assert patched.counts == (0, 3)
    assert patched.handle.stats.reasons.keys() == {"unsupported input"}


def test_what_native_does_not_look_at_is_no_reason(models: dict[str, Path]) -> None:
    network, call = network_of(models, VIDEO), CALLS["original"].drawn()
    session = LiveSession(network, backends()["torch"], "float32")
    for more in ({"txt_byt5": torch.zeros(1, 5, BYT5)}, {"disable_time_r": True}, {"denoise_mask": torch.zeros(1)}):
        assert error_of(network, session.run, {**call, **more}) <= LIMIT, more


def test_a_call_that_wants_no_meanflow_is_natives(models: dict[str, Path]) -> None:
    network, call = network_of(models, SR), CALLS["meanflow"].drawn()
    session, without = LiveSession(network, backends()["torch"], "float32"), {**call, "disable_time_r": True}
    assert relative_error(natively(network, without), natively(network, call)) > 1e-3, "it acts"
    assert error_of(network, session.run, without) <= LIMIT


def test_the_same_places_are_the_same_tensor(models: dict[str, Path]) -> None:
    network, call = network_of(models, VIDEO15), CALLS["one frame"].drawn()
    bind = network.architecture().binding(network.module)
    first, second = (bind({**call, "x": call["x"] + i}).inputs for i in range(2))
    assert first["pe"] is second["pe"]
    assert bind({**call, "x": torch.zeros(1, 65, 2, 4, 5)}).inputs["pe"] is not first["pe"]


def test_under_dynamic_vram_prompts_and_loras_are_natives(models: dict[str, Path], tmp_path: Path) -> None:
    def with_lora(model: ModelPatcher) -> ModelPatcher:
        return comfy.sd.load_lora_for_models(model, None, lora(VIDEO15), 0.7, 0)[0]

    dynamic, native = on_cpu(network_of(models, VIDEO15).patcher), network_of(models, VIDEO15).patcher
    patched, prompt = Patched(NativeNetwork.of_model(dynamic, VIDEO15), tmp_path, "torch"), PROMPTS["text by byT5"]
    for model, reference in ((patched.model, native), (with_lora(patched.model), with_lora(native))):
        assert error(prompt.sample(model), prompt.sample(reference)) <= LIMIT
        assert patched.counts == (prompt.calls, 0), patched.handle.stats.reasons


def replace_block(model: ModelPatcher, kind: str = "double_block") -> None:
    model.set_model_patch_replace(lambda given, more: {
        **more["original_block"](given), "img": more["original_block"](given)["img"] * 1.5}, "dit", kind, 0)


CHANGES: dict[str, Callable[[ModelPatcher], None]] = {
    "a double block": replace_block,
    "a single block": lambda model: replace_block(model, "single_block"),
    "attention": replace_attention,
    "queries": lambda model: model.set_model_patch(lambda q, k, v, **more: {"q": q * 1.5}, "attn1_patch"),
    "what attention gives": lambda model: model.set_model_patch(lambda x, more: x * 1.5, "attn1_output_patch"),
}


@pytest.mark.parametrize("name", slow.cases({name: name for name in CHANGES}, set(CHANGES) - {"a double block"}))
def test_a_patch_inside_the_network_gives_natives_picture_for_a_reason(
    models: dict[str, Path], tmp_path: Path, name: str
) -> None:
    prompt = PROMPTS["text to video"]
    patched, native = Patched(network_of(models, prompt.file), tmp_path, "torch"), network_of(models, prompt.file)
    plain = prompt.sample(native.patcher)
    CHANGES[name](native.patcher)
    CHANGES[name](patched.model)
    expected = prompt.sample(native.patcher)
    assert error(expected, plain) > 1e-3, "the patch acts"
    assert error(prompt.sample(patched.model), expected) == 0
    assert patched.counts == (0, prompt.calls)
    (reason,) = patched.handle.stats.reasons
    assert "patch" in reason


def test_a_video_is_one_call_of_each_prompt_with_its_frames(models: dict[str, Path]) -> None:
    video = Picture.sampled(120, 136, 1, cfg=4.0, length=81)
    for file, sizes in ((VIDEO15, [1, 21, 8, 7]), (VIDEO, [1, 21, 9, 8])):
        network = network_of(models, file)
        (call,) = network.architecture().calls(profile_of(network), video)
        assert [call[symbol] for symbol in "BFRC"] == sizes


def test_without_numbers_the_profile_is_what_the_family_is_used_for(models: dict[str, Path]) -> None:
    words = {VIDEO15: ("256 to 1280 px, 1024 tokens, up to 33 latent frames", ", 31 latent frames", (848, 480, 121)),
             VIDEO: ("256 to 1280 px, 1024 tokens, up to 33 latent frames", ", 19 latent frames", (848, 480, 73)),
             IMAGE: ("512 to 2560 px, 1024 tokens", "", (2048, 2048, 1))}  # fmt: skip
    for file, (all_sizes, frames, (width, height, length)) in words.items():
        architecture = network_of(models, file).architecture()
        profile = architecture.profile(RequestedSizes())
        (call,) = architecture.calls(profile, Picture(width, height, (1,), length=length))
        assert outside(profile, call, architecture.symbols) is None
        assert architecture.words(profile) == f"up to 2 in a batch, {all_sizes}"
        assert architecture.call_words(call) == f"{width}x{height}, 128 tokens{frames}"


@pytest.mark.slow
@COMPILES
@pytest.mark.parametrize(("name", "size", "more"), [
    ("text by byT5", {"F": 3, "R": 5, "C": 4}, {"G": 33, "I": 0}),
    ("text to video", {"F": 3, "R": 5, "C": 4}, {"G": 0, "I": 0}),
    ("a picture", {"F": 3, "R": 5, "C": 4}, {"G": 0, "I": 729}),
    ("original", {"F": 3, "R": 4, "C": 3}, {}),
    ("a still picture, text by byT5", {"B": 2, "F": 1, "R": 5, "C": 7}, {"G": 33}),
])  # fmt: skip
def test_one_compiled_file_serves_prompts_of_any_length_and_any_lora(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, size: dict[str, int],
    more: dict[str, int],
) -> None:  # fmt: skip
    monkeypatch.setenv(trust.FOLDER_VARIABLE, str(tmp_path / "keys"))
    prompt, torch_backend = replace(PROMPTS[name], cfg=1.0), backends()["torch"]
    network, call = network_of(models, prompt.file), {"B": 1, "T": 97, **size, **more}
    order = BuildOrder(network, "float32", Profile.around([call]), torch_backend, calls=(call,))
    build_engine(order, Library([tmp_path]), lambda *_: None)
    patched, native = Patched(network, tmp_path, "torch"), network_of(models, prompt.file).patcher
    loras = [comfy.sd.load_lora_for_models(model, None, lora(prompt.file), 0.7, 0)[0]
             for model in (patched.model, native)]  # fmt: skip
    for words in ((12, 12), (130, 130)):
        longer = replace(prompt, words=words)
        for model, reference in ((patched.model, native), loras):
            assert error(longer.sample(model), longer.sample(reference)) <= LIMIT
            assert patched.counts == (3, 0), patched.handle.stats.reasons
            assert patched.handle.session.uncovered is None, "the file served"
