"""A stack of engine-backed ControlNets computed as one gives what ComfyUI's chain gives, and steps aside otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import FunctionType, SimpleNamespace

import pytest
import torch
from pack import import_comfy
from small_networks import CPU, network

import_comfy()

import comfy.controlnet
import comfy.latent_formats
import comfy.model_sampling
import comfy.samplers
import comfy.utils
from comfy.controlnet import ControlNet, StrengthType
from hybrid_trt.architectures.tensors import Profile, Range
from hybrid_trt.engine_library import Library
from hybrid_trt.engine_library.parity import relative_error
from hybrid_trt.engine_runtime import control_stack
from hybrid_trt.engine_runtime.control_stack import ControlStack, run_stacks_at_once
from hybrid_trt.engine_runtime.controlnet import back_with_engine
from hybrid_trt.engine_runtime.engine_handle import EngineChoice, EngineHandle
from hybrid_trt.native_model.network import NativeNetwork

CHOICE = EngineChoice(Profile({s: Range(1, 16, 64) for s in ("B", "H", "W", "T", "HB")}), "auto", "torch")
SAMPLING = SimpleNamespace(calculate_input=lambda t, x: x / (t[0] ** 2 + 1) ** 0.5, timestep=lambda t: t * 10)


class Stacks:
    """The same chains twice: native, and backed by the torch backend."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.library = Library([folder])
        self.runs = 0
        run = control_stack._run

        def counted(*args: object) -> object:
            self.runs += 1
            return run(*args)

        monkeypatch.setattr(control_stack, "_run", counted)
        self.nets = [self._native("unlike_levels") for _ in range(2)]

    def _native(self, layout: str) -> ControlNet:
        module = network("controlnet", layout).module
        return ControlNet(module, load_device=CPU)

    def chain(self, backed: bool, count: int = 2, layouts: list[ControlNet] | None = None) -> ControlNet:
        previous = None
        for i in range(count):
            net = (layouts or self.nets)[i % 2]
            if backed:
                handle = EngineHandle(NativeNetwork.of_controlnet(net, "n"), CHOICE, self.library, "1")
                net = back_with_engine(net, handle)
            control = net.copy()
            image = torch.rand(1, 3, 72, 96, generator=torch.Generator().manual_seed(i))
            control.set_cond_hint(image, strength=(0.7, 0.4, 1.0, 1.3)[i])
            control.set_previous_controlnet(previous)
            control.timestep_range, control.model_sampling_current = (999999999.9, 0.0), SAMPLING
            previous = control
        return previous


@pytest.fixture
def stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stacks:
    return Stacks(tmp_path, monkeypatch)


def call(control: object, step: int = 0, batch: int = 2, sigma: float = 3.0) -> dict | None:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(batch, 4, 9, 12, generator=generator)
    cond = {"c_crossattn": torch.randn(batch, 77, 64, generator=generator)}
    with torch.inference_mode():
        return control.get_control(x, torch.full((batch,), sigma), cond, batch, {})


def same(value: dict, reference: dict) -> bool:
    assert {k: len(v) for k, v in value.items()} == {k: len(v) for k, v in reference.items()}
    pairs = [(a, b) for k in reference for a, b in zip(value[k], reference[k], strict=True)]
    return all(relative_error(a, b) <= 1e-5 for a, b in pairs)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_stack_gives_what_the_chain_gives(stacks: Stacks, count: int) -> None:
    native, stack = stacks.chain(False, count), ControlStack(stacks.chain(True, count))
    for step in range(5):
        assert same(call(stack, step), call(native, step))
    for step in range(3):
        assert same(call(stack, step, batch=1), call(native, step, batch=1))
    assert stacks.runs == 7, "all calls but the first, which opens and records engines"


def test_results_of_one_step_are_not_touched_by_the_next(stacks: Stacks) -> None:
    stack = ControlStack(stacks.chain(True))
    for step in range(4):
        kept = call(stack, step)
        copies = [t.clone() for t in kept["output"]]
        call(stack, step + 1)
        assert all(torch.equal(a, b) for a, b in zip(kept["output"], copies, strict=True))


def test_ranges_switch_controlnets_on_and_off(stacks: Stacks) -> None:
    native, backed = stacks.chain(False), stacks.chain(True)
    stack = ControlStack(backed)
    call(stack), call(native)
    for chain in (native, backed):
        chain.timestep_range, chain.previous_controlnet.timestep_range = (8.0, 2.0), (4.0, 0.0)
    for sigma in (9.0, 8.0, 5.0, 3.0, 2.0, 1.0):
        value, reference = call(stack, 1, sigma=sigma), call(native, 1, sigma=sigma)
        assert (value is None) == (reference is None) == (sigma == 9.0)
        assert value is None or same(value, reference)
    assert stacks.runs >= 5


def test_a_native_controlnet_in_the_chain_takes_the_whole_chain_comfyuis_way(stacks: Stacks) -> None:
    native, backed = stacks.chain(False), stacks.chain(True)
    backed.previous_controlnet = native.previous_controlnet
    for step in range(3):
        assert same(call(ControlStack(backed), step), call(native, step))
    assert stacks.runs == 0


@pytest.mark.parametrize("name", ["get_control", "control_merge"])
@pytest.mark.parametrize("on", ["object", "class"])
def test_a_controlnet_with_a_method_of_another_packs_is_not_joined(
    stacks: Stacks, monkeypatch: pytest.MonkeyPatch, name: str, on: str
) -> None:
    backed, calls = stacks.chain(True), []
    call(backed)
    own = getattr(ControlNet, name)

    def replaced(self: ControlNet, *args: object, **options: object) -> object:
        calls.append(self)
        return own(self, *args, **options)

    if on == "class":
        monkeypatch.setattr(ControlNet, name, replaced)
    else:
        setattr(backed, name, replaced.__get__(backed))
    native = stacks.chain(False)
    reference = call(native, 2)
    calls.clear()
    assert same(call(ControlStack(backed), 2), reference)
    assert backed in calls
    assert stacks.runs == 0


def test_other_kinds_of_strength_and_pooling_take_comfyuis_way(stacks: Stacks) -> None:
    native, backed = stacks.chain(False), stacks.chain(True)
    call(backed), call(native)
    for chain in (native, backed):
        chain.strength_type = StrengthType.LINEAR_UP
        chain.previous_controlnet.global_average_pooling = True
    assert same(call(ControlStack(backed), 2), call(native, 2))
    assert stacks.runs == 0


def test_controlnets_of_unlike_layouts_merge_as_in_comfyui(stacks: Stacks) -> None:
    nets = [stacks.nets[0], stacks._native("inpainting_channels")]
    nets[1].control_model = network("controlnet", "unlike_levels").module
    native, stack = stacks.chain(False, 2, nets), ControlStack(stacks.chain(True, 2, nets))
    for step in range(3):
        assert same(call(stack, step), call(native, step))


@pytest.mark.parametrize("alike", [True, False], ids=["alike", "unlike"])
@pytest.mark.parametrize("count", [2, 3])
def test_what_a_stack_gives_lies_in_no_buffer_of_its_sessions(stacks: Stacks, count: int, alike: bool) -> None:
    """Sessions that run side by side lend theirs, and write to them in the next call."""
    controls = [stacks.chain(False, 1) for _ in range(count)]
    for control in controls:
        control.strength = 0.5
    buffers = [{"output": [torch.full((2, 3), 4.0 + i)] * (1 if alike else i + 1), "middle": [torch.full((2,), 2.0)]}
               for i in range(count)]  # fmt: skip
    lent = {t.data_ptr() for result in buffers for places in result.values() for t in places}
    merged = control_stack._merged(controls, buffers)
    given = [t for places in merged.values() for t in places]
    assert not lent & {t.data_ptr() for t in given}
    assert torch.equal(merged["middle"][0], torch.full((2,), float(count)))
    assert torch.equal(merged["output"][0], torch.full((2, 3), sum(4.0 + i for i in range(count)) / 2))


def test_controlnets_run_side_by_side_only_where_no_session_comes_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session has one set of buffers: its second call writes to what the first one lent."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: SimpleNamespace(record_event=lambda: "start"))
    gpu, cpu = SimpleNamespace(is_cuda=True, device=None), SimpleNamespace(is_cuda=False, device=CPU)
    a, b, c = (SimpleNamespace(parts=frozenset([name])) for name in "abc")
    a_or_c = SimpleNamespace(parts=a.parts | c.parts)
    starts = {"two": [a, b], "three": [a, b, c], "one": [a], "twice": [a, b, a], "as a part": [a_or_c, b, c]}
    found = {name: control_stack._start(sessions, gpu) for name, sessions in starts.items()}
    assert found == {"two": "start", "three": "start", "one": None, "twice": None, "as a part": None}
    assert control_stack._start([a, b], cpu) is None


def test_conditionings_that_share_a_control_still_share_it(stacks: Stacks) -> None:
    control, other = stacks.chain(True), stacks.chain(True, 1)
    conds = [[{"control": control, "a": 1}], [{"control": control}, {"control": other}, {"b": 2}], None]
    seen = []

    def executor(_model: object, conds: list, *_: object) -> str:
        seen.extend(conds)
        return "done"

    assert run_stacks_at_once(executor, None, conds, torch.zeros(1), torch.zeros(1), {}) == "done"
    positive, negative, nothing = seen
    assert positive[0]["control"] is negative[0]["control"]
    assert negative[1]["control"] is not negative[0]["control"]
    assert positive[0]["a"] == 1
    assert "control" not in negative[2]
    assert nothing is None
    assert conds[0][0]["control"] is control, "the caller's own stay as they were"
    assert positive[0]["control"].strength == control.strength


def test_ranges_end_in_the_very_step_in_which_comfyui_ends_them() -> None:
    """Bounds are Python's doubles and sigmas are float32: on a bound it decides how they are compared."""
    on_a_bound = 0
    sampling = comfy.model_sampling.ModelSamplingContinuousEDM()
    sampling.set_parameters(0.002, 120.0, 1.0)
    for steps in range(20, 42):
        for sigma in comfy.samplers.calculate_sigmas(sampling, "normal", steps)[:-1]:
            for percent in (0.2, 0.25, 0.4, 0.5, 0.6, 0.75, 0.8):
                bounds = (999999999.9, sampling.percent_to_sigma(percent))
                natively = not (sigma > bounds[0] or sigma < bounds[1])
                assert bool(control_stack._active([SimpleNamespace(timestep_range=bounds)], sigma[None])) is natively
                on_a_bound += natively and float(sigma) < bounds[1]
    assert on_a_bound > 0


LAYOUTS = {
    "as ComfyUI loads them": lambda: torch.rand(1, 72, 96, 3).movedim(-1, 1),
    "contiguous": lambda: torch.rand(1, 3, 72, 96),
    "one channel": lambda: torch.rand(1, 1, 72, 96),
    "one channel, last": lambda: torch.rand(1, 72, 96, 1).movedim(-1, 1),
    "a batch": lambda: torch.rand(4, 72, 96, 3).movedim(-1, 1),
    "a part of a batch": lambda: torch.rand(4, 72, 96, 3).movedim(-1, 1)[1:3],
    "a turned picture": lambda: torch.rand(1, 96, 72, 3).movedim(-1, 1).transpose(2, 3),
    "without its alpha": lambda: torch.rand(1, 72, 96, 4)[..., :3].movedim(-1, 1),
    "half precision": lambda: torch.rand(1, 3, 72, 96).half(),
    "odd numbers": lambda: torch.tensor([-0.0, 1e-42, float("inf"), float("nan"), -3.0]).repeat(6912)[: 72 * 96 * 3]
    .reshape(1, 3, 72, 96),
}
MADE_HERE = set(LAYOUTS) - {"a turned picture", "without its alpha"}


@pytest.fixture
def resized(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """The sizes of images that ComfyUI resizes, for the hints of ControlNets."""
    sizes, own = [], torch.nn.functional.interpolate

    def seen(image: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        sizes.append(tuple(image.shape[2:]))
        return own(image, *args, **options)

    monkeypatch.setattr(torch.nn.functional, "interpolate", seen)
    return sizes


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_call_of_a_run_finds_hints_of_the_right_size_made_bit_for_bit_as_comfyui_makes_them(
    stacks: Stacks, resized: list, monkeypatch: pytest.MonkeyPatch, layout: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(control_stack, "_run", lambda *_: pytest.fail("the first call goes ComfyUI's way"))
    for net in stacks.nets:
        net.manual_cast_dtype = dtype
    native, backed = (stacks.chain(with_engines, 1) for with_engines in (False, True))
    image = LAYOUTS[layout]()
    for control in (native, backed):
        control.cond_hint_original = image
    before, hints = image.clone(), []
    for control in (native, backed):  # what the network makes of such images does not matter here
        resized.clear()
        with pytest.MonkeyPatch.context() as instead:
            kind = type(control.control_model)
            instead.setattr(kind, "__call__", lambda *_, hint, **__: hints.append(hint) or {"output": []})
            call(control if control is native else ControlStack(control), batch=2)
        assert bool(resized) == (control is native or layout not in MADE_HERE)
    reference, made = hints
    assert (made.dtype, made.shape, made.stride()) == (dtype, reference.shape, reference.stride())
    numbers = ~reference.isnan()
    assert torch.equal(made.isnan(), ~numbers)
    assert torch.equal(bits(made)[numbers], bits(reference)[numbers])
    assert torch.equal(bits(image), bits(before)), "the node's image is as it was"
    assert made.untyped_storage().data_ptr() != image.untyped_storage().data_ptr()


OTHERS = {
    "another size": lambda c: setattr(c, "cond_hint_original", torch.rand(1, 3, 80, 96)),
    "bilinear": lambda c: setattr(c, "upscale_algorithm", "bilinear"),
    "lanczos": lambda c: setattr(c, "upscale_algorithm", "lanczos"),
    "a VAE": lambda c: setattr(c, "vae", object()),
    "a latent format": lambda c: setattr(c, "latent_format", comfy.latent_formats.SD15()),
    "a mask": lambda c: setattr(c, "concat_mask", True),
    "more channels": lambda c: setattr(c, "extra_concat_orig", [torch.ones(1, 1, 1, 1)]),
    "several GPUs": lambda c: setattr(c, "multigpu_clones", {CPU: c}),
    "another pack's preprocessing": lambda c: setattr(c, "preprocess_image", lambda image: image.mul_(2)),
    "another pack's method": lambda c: setattr(c, "get_control", c.get_control),
    "native": lambda c: setattr(c, "control_model", c.control_model.native),
    "a subclass": lambda c: setattr(c, "__class__", type("Theirs", (ControlNet,), {})),
    "whole numbers": lambda c: setattr(c, "cond_hint_original", torch.ones(1, 3, 72, 96, dtype=torch.uint8)),
    "not begun": lambda c: setattr(c, "timestep_range", None),
    "later in the run": lambda c: setattr(c, "timestep_range", (2.0, 0.0)),
    "over": lambda c: setattr(c, "timestep_range", (999999999.9, 4.0)),
}


@pytest.mark.parametrize("change", [None, *OTHERS.values()], ids=["nothing", *OTHERS])
def test_hints_that_are_more_than_a_copy_or_not_wanted_in_this_call_are_left_to_comfyui(
    stacks: Stacks, change: Callable | None
) -> None:
    control, x = stacks.chain(True, 1), torch.zeros(2, 4, 9, 12)
    if change is not None:
        change(control)
    control_stack._make_hints([control], x, torch.full((2,), 3.0))
    assert (control.cond_hint is None) == (change is not None)


def test_a_hint_is_made_on_the_device_in_the_dtype_that_the_network_computes_in(stacks: Stacks) -> None:
    control = stacks.chain(True, 1)
    control.manual_cast_dtype, control.cond_hint = torch.float16, torch.rand(1, 3, 8, 8)
    control_stack._make_hints([control], torch.zeros(2, 4, 9, 12, device="meta"), torch.full((2,), 3.0))
    assert (control.cond_hint.device.type, control.cond_hint.dtype) == ("meta", torch.float16)
    assert control.cond_hint.shape == (1, 3, 72, 96)


def test_hints_are_left_to_another_packs_way_of_resizing(stacks: Stacks, monkeypatch: pytest.MonkeyPatch) -> None:
    own, control = comfy.utils.common_upscale, stacks.chain(True, 1)
    monkeypatch.setattr(comfy.utils, "common_upscale", lambda *args: own(*args) / 2)
    call(ControlStack(control))
    assert torch.equal(control.cond_hint, control.cond_hint_original / 2)


def test_a_hint_is_made_with_comfyuis_preprocessing_and_anew_when_the_pictures_size_changes(
    stacks: Stacks, resized: list
) -> None:
    native, backed = stacks.chain(False, 1), stacks.chain(True, 1)
    as_comfyuis = (lambda image: 1.0 - image).__code__.replace(co_filename=comfy.controlnet.__file__)
    inverse = FunctionType(as_comfyuis, {})
    for control in (native, backed):
        control.preprocess_image = inverse
        control.cond_hint = torch.rand(1, 3, 40, 40)  # of a part of the picture
        assert same(call(ControlStack(control)), call(native))
    assert torch.equal(native.cond_hint, backed.cond_hint)
    assert torch.equal(backed.cond_hint, 1.0 - backed.cond_hint_original)
    assert resized == [(72, 96)], "native's alone"


def test_a_controlnet_that_acts_later_has_its_hint_when_it_does_and_its_first_call_goes_comfyuis_way(
    stacks: Stacks, resized: list
) -> None:
    native, backed = stacks.chain(False), stacks.chain(True)
    for chain in (native, backed):
        chain.timestep_range = (5.0, 0.0)
    stack, seen = ControlStack(backed), []
    for step, sigma in enumerate((9.0, 6.0, 4.0, 3.0, 2.0)):
        assert same(call(stack, step, sigma=sigma), call(native, step, sigma=sigma))
        seen.append((backed.cond_hint is not None, stacks.runs))
    assert seen == [(False, 0), (False, 0), (True, 0), (True, 1), (True, 2)]
    assert len(resized) == 2, "native's alone"
