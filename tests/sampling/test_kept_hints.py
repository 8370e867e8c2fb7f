"""Hints are made as ComfyUI makes them, bit for bit, and kept for the runs that want the same again."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from types import FunctionType

import comfy.controlnet
import comfy.latent_formats
import comfy.utils
import pytest
import torch
from comfy.controlnet import ControlNet
from control_stacks import SAMPLING, Stacks, call, hint_in, same
from hybrid_trt.sampling import control_stack, hint_cache
from hybrid_trt.sampling.control_stack import ControlStack
from newer_comfyui import emulate
from small_networks import CPU


@pytest.fixture(params=["as it is", "hint map"])
def stacks(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stacks:
    emulate(request.param, monkeypatch)
    return Stacks(tmp_path, monkeypatch)


def ready(control: ControlNet) -> ControlNet:
    """A control as at the start of a run, which ended another one."""
    control.cleanup()
    control.timestep_range, control.model_sampling_current = (999999999.9, 0.0), SAMPLING
    return control


def make(control: ControlNet, x: torch.Tensor, sigma: float = 3.0) -> None:
    """Make hints as before ComfyUI's part of a first call."""
    lacking = [control] if hint_cache.lacks_hint(control, x) else []
    hint_cache.make_hints(control_stack._active(lacking, torch.full((2,), sigma)), x)


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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_call_of_a_run_finds_hints_of_the_right_size_made_bit_for_bit_as_comfyui_makes_them(
    stacks: Stacks, resized: list, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    monkeypatch.setattr(control_stack, "_run", lambda *_: pytest.fail("the first call goes ComfyUI's way"))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for net in stacks.nets:
            net.manual_cast_dtype = dtype
        native, backed = (stacks.chain(with_engines, 1) for with_engines in (False, True))
        image = LAYOUTS[layout]()
        for control in (native, backed):
            control.cond_hint_original = image
        before, given = image.clone(), []
        for control in (native, backed):  # what the network makes of such images does not matter here
            resized.clear()
            with pytest.MonkeyPatch.context() as instead:
                kind = type(control.control_model)
                seen = lambda *_, hint, given=given, **__: given.append(hint) or {"output": []}  # noqa: E731
                instead.setattr(kind, "__call__", seen)
                call(control if control is native else ControlStack(control), batch=2)
            assert bool(resized) == (control is native or layout not in MADE_HERE)
        reference, made = given
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
    make(control, x)
    assert (hint_in(control) is None) == (change is not None)


def test_a_hint_is_made_on_the_device_in_the_dtype_that_the_network_computes_in(stacks: Stacks) -> None:
    control = stacks.chain(True, 1)
    control.manual_cast_dtype, control.cond_hint = torch.float16, torch.rand(1, 3, 8, 8)
    make(control, torch.zeros(2, 4, 9, 12, device="meta"))
    assert (hint_in(control).device.type, hint_in(control).dtype) == ("meta", torch.float16)
    assert hint_in(control).shape == (1, 3, 72, 96)


def test_hints_are_left_to_another_packs_way_of_resizing(stacks: Stacks, monkeypatch: pytest.MonkeyPatch) -> None:
    own, control = comfy.utils.common_upscale, stacks.chain(True, 1)
    monkeypatch.setattr(comfy.utils, "common_upscale", lambda *args: own(*args) / 2)
    call(ControlStack(control))
    assert torch.equal(hint_in(control), control.cond_hint_original / 2)


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
    assert torch.equal(hint_in(native), hint_in(backed))
    assert torch.equal(hint_in(backed), 1.0 - backed.cond_hint_original)
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
        seen.append((hint_in(backed) is not None, stacks.runs))
    assert seen == [(False, 0), (False, 0), (True, 0), (True, 1), (True, 2)]
    assert len(resized) == 2, "native's alone"


def image_of_a_node(height: int = 100, width: int = 60, batch: int = 1) -> torch.Tensor:
    """As ComfyUI's nodes make one: it counts no versions."""
    with torch.inference_mode():
        return torch.rand(batch, height, width, 3).movedim(-1, 1)


@pytest.mark.parametrize("algorithm", ["nearest-exact", "bilinear", "bislerp", "lanczos"])
@pytest.mark.parametrize("size", [(100, 60), (72, 96)], ids=str)
def test_the_next_run_finds_the_hint_of_the_last_one_and_what_the_network_made_of_it(
    stacks: Stacks, monkeypatch: pytest.MonkeyPatch, algorithm: str, size: tuple[int, int]
) -> None:
    native, backed = (stacks.chain(with_engines, 1) for with_engines in (False, True))
    for control in (native, backed):
        control.upscale_algorithm, control.cond_hint_original = algorithm, image_of_a_node(*size)
    native.cond_hint_original = backed.cond_hint_original
    reference = call(native)
    for step in range(3):
        assert same(call(ControlStack(backed), step), call(native, step))
    passes = backed.control_model.handle.session.live.passes
    first, computed = hint_in(backed), passes.computed
    assert computed == (1 if (algorithm, size) == ("nearest-exact", (72, 96)) else 2), "the one that is kept is another"
    ready(backed)
    monkeypatch.setattr(comfy.utils, "common_upscale", None)
    monkeypatch.setattr(hint_cache, "makes_hints_as_comfyui", lambda _: True)
    runs = stacks.runs
    assert same(call(ControlStack(backed)), reference)
    assert stacks.runs == runs + 1, "the engine is open and the hint known: nothing is left for ComfyUI's way"
    assert hint_in(backed) is first
    assert torch.equal(bits(hint_in(backed)), bits(hint_in(native)))
    assert hint_in(backed).stride() == hint_in(native).stride()
    assert passes.computed == computed


def test_a_call_that_opens_an_engine_goes_comfyuis_way_though_its_hints_are_known(stacks: Stacks) -> None:
    native, backed = stacks.chain(False), stacks.chain(True)
    for step in range(2):
        assert same(call(ControlStack(backed), step), call(native, step))
    runs = stacks.runs
    backed.control_model.handle.session.unload()
    assert same(call(ControlStack(backed), 2), call(native, 2))
    assert stacks.runs == runs, "weights are taken while no other ControlNet of the stack runs"
    assert same(call(ControlStack(backed), 3), call(native, 3))
    assert stacks.runs == runs + 1


def _write(tensor: torch.Tensor) -> None:
    with torch.inference_mode():
        tensor.mul_(0.5)


CHANGES = {
    "the image was written to": lambda control: _write(control.cond_hint_original),
    "the hint was written to": lambda control: _write(hint_in(control)),
    "another image of this node": lambda control: setattr(control, "cond_hint_original", image_of_a_node()),
    "another way of resizing": lambda control: setattr(control, "upscale_algorithm", "bicubic"),
    "another dtype": lambda control: setattr(control, "manual_cast_dtype", torch.float64),
    "another preprocessing": lambda control: setattr(control, "preprocess_image", FunctionType(
        (lambda image: 1.0 - image).__code__.replace(co_filename=comfy.controlnet.__file__), {})),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_hint_is_made_anew_when_anything_that_it_was_made_with_is_another(stacks: Stacks, change: Callable) -> None:
    native, backed = (stacks.chain(with_engines, 1) for with_engines in (False, True))
    backed.cond_hint_original = image_of_a_node()
    for step in range(2):
        call(ControlStack(backed), step)
    before = hint_in(backed).clone()
    change(backed)
    ready(backed)
    native.cond_hint_original = backed.cond_hint_original
    for name in ("upscale_algorithm", "manual_cast_dtype", "preprocess_image"):
        setattr(native, name, getattr(backed, name))
    for control in (native, backed):
        with pytest.MonkeyPatch.context() as instead:  # the network does not take float64
            instead.setattr(type(control.control_model), "__call__", lambda *_, **__: {"output": []})
            call(control if control is native else ControlStack(control))
    assert torch.equal(hint_in(backed), hint_in(native))
    assert hint_in(backed).dtype == hint_in(native).dtype
    as_before = change is CHANGES["the hint was written to"]
    assert (before.dtype == hint_in(backed).dtype and torch.equal(before, hint_in(backed))) is as_before


def test_a_picture_of_another_size_gets_a_hint_of_its_own(stacks: Stacks) -> None:
    backed = stacks.chain(True, 1)
    backed.cond_hint_original = image_of_a_node()
    call(ControlStack(backed))
    make(ready(backed), torch.zeros(2, 4, 9, 12))
    assert hint_in(backed) is not None
    make(ready(backed), torch.zeros(2, 4, 12, 9))
    assert hint_in(backed) is None, "ComfyUI makes it"


@pytest.mark.parametrize("why", ["repeated for a batch", "too large"])
def test_some_hints_are_not_kept(stacks: Stacks, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    backed = stacks.chain(True, 1)
    backed.cond_hint_original = image_of_a_node(batch=2)
    if why == "too large":
        backed.cond_hint_original = image_of_a_node()
        monkeypatch.setattr(hint_cache, "LARGEST", backed.cond_hint_original.nbytes - 1)
    for step in range(2):
        call(ControlStack(backed), step, batch=4)
    make(ready(backed), torch.zeros(4, 4, 9, 12))
    by_size = hasattr(backed, "cond_hints")  # where ComfyUI repeats a hint after it has kept it
    assert (hint_in(backed) is not None) == (by_size and why == "repeated for a batch")


def test_a_hint_goes_with_the_nodes_image(stacks: Stacks) -> None:
    backed = stacks.chain(True, 1)
    backed.cond_hint_original = image_of_a_node()
    call(ControlStack(backed))
    kept = backed.control_model.hints._of
    assert len(kept) == 1
    ready(backed)
    backed.cond_hint_original = None
    gc.collect()
    assert len(kept) == 0


# Where ComfyUI keeps hints by the latent's size (pull request 15832)


@pytest.fixture
def by_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stacks:
    emulate("hint map", monkeypatch)
    return Stacks(tmp_path, monkeypatch)


def both(stacks: Stacks, batch: int) -> list[ControlNet]:
    """A native control and an engine-backed one that share a batch of images."""
    image = image_of_a_node(batch=batch)
    return [stacks.chain(with_engines, 1).set_cond_hint(image, 0.7) for with_engines in (False, True)]


def test_two_sizes_in_turn_are_made_once_each(by_size: Stacks, resized: list) -> None:
    native, backed = both(by_size, 1)
    for step in range(6):
        size = ((9, 12), (12, 9))[step % 2]
        assert same(call(ControlStack(backed), step, size=size), call(native, step, size=size))
    assert by_size.runs == 4
    assert len(resized) == 4, "once for each of both, where one slot makes all anew"
    assert backed.cond_hint is None, "the hint is there once"
    assert call(ControlStack(backed), size=(8, 8)) is not None
    assert list(backed.cond_hints) == [(12, 9), (8, 8)], "as many stay as ComfyUI keeps"


def test_two_images_in_a_batch_join_and_what_the_network_makes_of_them_is_kept(
    by_size: Stacks, monkeypatch: pytest.MonkeyPatch
) -> None:
    native, backed = both(by_size, 2)
    seen, kind = [], type(backed.control_model)
    own = kind.__call__
    seeing = lambda *args, hint, **rest: seen.append(hint) or own(*args, hint=hint, **rest)  # noqa: E731
    monkeypatch.setattr(kind, "__call__", seeing)
    for step in range(4):
        assert same(call(ControlStack(backed), step, 4, prompts=2), call(native, step, 4, prompts=2))
    assert by_size.runs == 3
    assert {hint.shape[0] for hint in seen} == {4}
    assert seen[1] is seen[2] is seen[3], "one tensor, or all that is remembered by it would be made anew"
    assert torch.equal(seen[1], comfy.controlnet.broadcast_image_to(native.cond_hints[9, 12], 4, 2))
    assert backed.control_model.handle.session.live.passes.computed == 2, "ComfyUI's first call, and all after"
