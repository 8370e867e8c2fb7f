"""The layout of a network: whatever changes what it computes, and nothing of how it was loaded."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.ops
import comfy.sd
import numpy
import pytest
import tiny_models
import torch
from any_weights import built, handle_of
from comfy import model_management
from dynamic_vram import on_cpu
from hybrid_trt.architectures.families.anima import Step
from hybrid_trt.architectures.families.qwen_image import _Attention as QwenAttention
from hybrid_trt.architectures.model_patches import WithCompanion
from hybrid_trt.architectures.token_layers import PlainNorm
from hybrid_trt.comfy_model import structure_hash
from hybrid_trt.comfy_model.changed_layers import answers_about
from hybrid_trt.comfy_model.comfyui_shims import is_of_loading
from hybrid_trt.engine_library import Reason
from hybrid_trt.engine_library.inventory import STALE, entries
from hybrid_trt.sampling.engine_status import status
from small_networks import CPU, network
from tiny_networks import TINY

from sampling import sample

NAME = "tiny_sd15_flat_unet"


def told(module: torch.nn.Module) -> str:
    """Its layout as if it was never asked for."""
    answers_about(module).clear()
    return structure_hash.structure_hash(module)


def changed(value: object) -> object:
    """Another value of the same kind, or the same for what is left alone."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 2 + 1
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, tuple | list) and value and not isinstance(value[0], torch.nn.Module):
        return type(value)([changed(value[0]), *value[1:]])
    return value


def settings(module: torch.nn.Module) -> Iterator[tuple[object, str]]:
    """The plain attributes of a network's layers and of the objects that they hold, one of each class and name."""
    seen = set()
    todo: list[object] = list(module.modules())
    while todo:
        owner = todo.pop(0)
        for name, value in vars(owner).items():
            if name in torch.nn.Module().__dict__ or (type(owner), name) in seen:
                continue
            seen.add((type(owner), name))
            if type(value).__module__.startswith("comfy.") and hasattr(value, "__dict__"):
                todo.append(value)
            elif changed(value) is not value:
                yield owner, name


@pytest.mark.parametrize("family", TINY)
def test_no_attribute_of_a_layer_changes_the_result_and_not_the_layout(family: str) -> None:
    tiny = TINY[family]
    module = tiny.network()
    before, acting = told(module), 0
    reference = tiny.call(module)
    for owner, name in list(settings(module)):
        value = getattr(owner, name)
        setattr(owner, name, changed(value))
        try:
            acts = not torch.equal(tiny.call(module), reference)
        except Exception:  # whatever is wrong with this value
            acts = True
        after = told(module)
        setattr(owner, name, value)
        if acts:
            acting += 1
            assert after != before, f"{type(owner).__name__}.{name}"
    assert acting >= 8
    assert told(module) == before


@pytest.mark.parametrize(("found", "place"), [
    (WithCompanion, ".model_patches.WithCompanion"), (Step, ".anima.Step"), (PlainNorm, ".rotary.PlainNorm"),
    (QwenAttention, ".qwen_image._Attention"),
])  # fmt: skip
def test_our_classes_stand_in_keys_as_those_of_stored_engines_name_them(found: type, place: str) -> None:
    assert structure_hash._place(found) == place


class Colour(Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Parameters:
    theta: float
    axes: tuple[int, ...] = (1, 2)


def scaled_by(factor: float) -> Any:
    return lambda x: x * factor


PAIRS: dict[str, tuple[object, object]] = {
    "number": (1.0, 2.0),
    "flag": (True, False),
    "word": ("gelu", "silu"),
    "list": ([1, 2], [1, 3]),
    "dict": ({"a": 1}, {"a": 2}),
    "nothing": (None, 0),
    "function": (torch.nn.functional.silu, torch.nn.functional.gelu),
    "partial": (functools.partial(torch.clamp, min=0), functools.partial(torch.clamp, min=1)),
    "closure": (scaled_by(2.0), scaled_by(3.0)),
    "lambda": (lambda x: x + 1, lambda x: x + 2),
    "enum": (Colour.RED, Colour.BLUE),
    "object": (SimpleNamespace(theta=1), SimpleNamespace(theta=2)),
    "dataclass": (Parameters(1.0), Parameters(1.0, (1, 3))),
    "class": (torch.nn.SiLU, torch.nn.GELU),
    "array": (numpy.arange(3), numpy.arange(3) * 2),
    "numpy's number": (numpy.int64(1), numpy.int64(2)),
    "tensor": (torch.ones(3), torch.zeros(3)),
    "range": (range(3), range(4)),
    "a hidden layer": ([torch.nn.Dropout(0.1)], [torch.nn.Dropout(0.2)]),
    "a number that begins as loading's": (1, 2),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_settings_of_any_kind_count(kind: str) -> None:
    name = "_video_length" if kind.startswith("a number that begins") else "setting"
    module = TINY["unet"].network()
    hashes = []
    for value in PAIRS[kind]:
        setattr(module.middle_block[0], name, value)
        hashes.append(told(module))
        assert told(module) == hashes[-1]
    assert hashes[0] != hashes[1]


def test_buffers_count_with_their_values_and_a_layer_with_its_class() -> None:
    module = TINY["unet"].network()
    hashes = {told(module)}
    for values in (torch.zeros(2), torch.ones(2), torch.zeros(0)):
        module.middle_block[0].register_buffer("table", values, persistent=False)
        hashes.add(told(module))
    module.time_embed[1] = torch.nn.GELU()
    hashes.add(told(module))
    assert len(hashes) == 5


def test_objects_that_hold_each_other_and_the_network_end() -> None:
    module = TINY["unet"].network()
    one, other = SimpleNamespace(), SimpleNamespace(network=module)
    one.other, other.one = other, one
    module.middle_block[0].setting = one
    assert told(module) == told(module)


@pytest.mark.parametrize("family", TINY)
def test_how_a_network_is_loaded_does_not_count(family: str) -> None:
    tiny = TINY[family]
    expected = told(tiny.network())
    for operations in (comfy.ops.manual_cast, comfy.ops.fp8_ops):
        assert told(tiny.network(operations)) == expected
    for dtype in (torch.float16, torch.bfloat16, torch.float8_e4m3fn):
        module = tiny.network(comfy.ops.manual_cast).to(dtype)
        module.dtype = dtype
        model_management.archive_model_dtypes(module)
        assert told(module) == expected
    meta = tiny.network().to("meta")
    assert told(meta) == expected


def test_one_file_has_one_layout_in_all_states(environment: Any) -> None:
    file = str(tiny_models.make(environment.base / "models", [NAME])[NAME])
    model = comfy.sd.load_diffusion_model(file)
    unet = model.model.diffusion_model
    expected = told(unet)
    kept_in_fp8 = comfy.sd.load_diffusion_model(file, model_options={"dtype": torch.float8_e4m3fn})
    assert told(kept_in_fp8.model.diffusion_model) == expected
    sample(model)
    assert told(unet) == expected, "after sampling"
    patched = model.clone()
    assert patched.add_patches({
        f"diffusion_model.{name}": ("diff", (torch.ones_like(p),))
        for name, p in unet.named_parameters() if name.endswith("to_k.weight")
    })  # fmt: skip
    sample(patched)
    assert told(unet) == expected, "patched in place"
    patched.unpatch_model(CPU)
    patched.partially_load(CPU, 0.1)
    assert any(layer.weight_function for layer in unet.modules() if hasattr(layer, "weight_function"))
    assert told(unet) == expected, "patched on the fly"
    patched.unpatch_model(CPU)
    on_cpu(model).load(CPU)
    assert told(unet) == expected, "under dynamic VRAM"
    for layer in unet.modules():
        layer._v_tomorrow, layer._comfy_tomorrow, layer._pin_tomorrow = 1, "2", (3,)
        assert is_of_loading("_v_tomorrow", 1)
    assert told(unet) == expected, "of later versions of ComfyUI"


def test_an_engine_of_a_layout_before_says_build_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = network("unet", "inpainting_channels")
    with monkeypatch.context() as before:
        before.setattr(structure_hash, "LAYOUT_PREFIX", "layout-")
        told(net.module)
        engine = built(net, tmp_path)
    assert engine.manifest.identity.weights.startswith("layout-")
    assert engine.manifest.identity.any_weights
    told(net.module)
    handle = handle_of(net, tmp_path, replaceable=True)
    assert (handle.session, handle.fallback.reason) == (None, Reason.STALE_ENGINE)
    assert "build it again" in status(handle)
    (entry,) = entries(handle.library, lambda _manifest: None, lambda _engine: None)
    assert entry.state == STALE
    again = built(net, tmp_path)
    handle.refresh()
    assert handle.session.engines == [again]
