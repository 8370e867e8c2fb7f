"""Names of ComfyUI that the pack relies on: one that is gone or takes other arguments costs a feature, no picture.

Names are renamed for the pack alone, see ``renamed``: ComfyUI itself goes on as it would with its new ones.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import comfy.controlnet
import comfy.model_patcher
import execution
import pytest
import torch
from comfy import model_management
from comfy.controlnet import ControlNet
from comfy_execution.utils import CurrentNodeContext
from hybrid_trt import architectures
from hybrid_trt.architectures import families
from hybrid_trt.comfy_model import comfyui_internals as internals
from hybrid_trt.comfy_model.comfyui_internals import TABLE, Feature
from memory_fixtures import controlnet, device, files
from patched import LIMIT, NAME, PROFILE, load
from renamed import hidden, owner_of, pack_again

from sampling import STEPS, error, sample

__all__ = ["controlnet", "device", "files"]  # fixtures: pytest finds them by name

ENTRIES = [(feature, place) for feature, places in TABLE.items() for place in places]
FUNCTIONS = [(feature, place) for feature, place in ENTRIES if "(" in place]


def words(value: Any) -> str:
    return value.name if isinstance(value, Feature) else value.partition("(")[0].partition(":")[2]


def other_arguments(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any, i: Any, j: Any) -> None:
    """In the place of a function that nobody can call as before."""


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch on again after a test what it switched off."""
    monkeypatch.setattr(internals, "_off", internals._off)


@pytest.fixture
def alone(feature: Feature, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table has this place alone: looking at all others a hundred times takes a minute."""
    monkeypatch.setattr(internals, "TABLE", {feature: (place,)})


@pytest.fixture
def renamed_attributes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets classes use other names for attributes that they give their objects."""
    own = internals.names_used_by

    def rename(module: Any, places: Any) -> None:
        gone = [owner_of(place) for place in places]
        instead = lambda kind: own(kind) - {name for owner, name in gone if owner is kind}  # noqa: E731
        instead.cache_clear = own.cache_clear
        monkeypatch.setattr(module, "names_used_by", instead)

    return rename


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "comfyui_internals" in record.name]


def test_this_comfyui_has_all_that_is_relied_on_and_looking_takes_no_time() -> None:
    assert internals.check() == {}
    assert internals.switched_off() == []
    assert set(TABLE) == set(Feature)
    started = time.process_time()
    internals.check()
    assert time.process_time() - started < 0.5


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("feature", "place"), ENTRIES, ids=words)
def test_a_name_that_is_gone_switches_off_what_needs_it_and_is_said_once(
    feature: Feature, place: str, caplog: pytest.LogCaptureFixture, renamed_attributes: Any
) -> None:
    renamed_attributes(internals, [place])
    with hidden([place]):
        off = internals.check()
    if "?" in place:
        assert off == {}, "it may be missing"
        return
    assert feature in off
    assert not internals.works(feature)
    name = place.partition("(")[0].replace(":", ".")
    lines = [line for line in said(caplog) if feature.value[0] in line]
    assert len(lines) == 1
    assert set(off) == {feature}
    assert f"this ComfyUI has no {name}" in lines[0]
    assert "Images are right" in lines[0]
    assert "Please report" in lines[0]
    assert any(name in line for line in internals.switched_off([feature]))


FAMILIES = [(family, place) for family, places in architectures.needs().items() for place in places or ()]


def test_each_family_says_what_it_needs() -> None:
    found = architectures.needs()
    assert {family for family, places in found.items() if places} >= {"stable_diffusion", "flux", "zimage"}
    assert None not in found.values()
    modules = [importlib.import_module(f"{families.__name__}.{family}") for family in found]
    assert not [m.__name__ for m in modules if not hasattr(m, "FILE_MARKS")], "else any file may be theirs"


@pytest.mark.parametrize(("family", "place"), FAMILIES, ids=words)
def test_a_family_whose_code_is_another_is_left_out_alone(
    family: str, place: str, caplog: pytest.LogCaptureFixture, renamed_attributes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(internals, "TABLE", {})
    monkeypatch.setattr(internals, "_without", [])
    monkeypatch.setattr(architectures, "_left_out", set())
    before = set(architectures.architectures())
    renamed_attributes(internals, [place])
    with hidden([place]):
        assert internals.check() == {}, "all others keep their engines"
    same = {one for one, places in architectures.needs().items() if place in (places or ())}
    assert architectures._left_out == same
    lost = before - set(architectures.architectures())
    left_out = [importlib.import_module(f"{families.__name__}.{family}") for family in same]
    own = {a.name for family in left_out for a in family.ARCHITECTURES}
    assert lost == own != set()
    (line,) = (line for line in said(caplog) if f"family {family} " in line)
    assert place.partition("(")[0].replace(":", ".") in line
    assert "Images are right" in line
    assert any(f"family {family} " in text for text in internals.switched_off())
    assert internals.switched_off([Feature.WHOLE_GRAPHS]) == [], "builds for a workflow still work"


def test_a_family_whose_modules_are_missing_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(internals, "TABLE", {})
    monkeypatch.setattr(internals, "_without", [])
    monkeypatch.setattr(architectures, "_left_out", set())
    monkeypatch.setitem(sys.modules, f"{families.__name__}.krea2", None)  # so that its import fails
    assert "sd15_unet" in architectures.architectures()
    internals.check()
    assert architectures._left_out == {"krea2"}
    assert any("krea2 cannot be imported" in line for line in said(caplog))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("feature", "place"), FUNCTIONS, ids=words)
def test_a_function_with_other_arguments_switches_off_what_needs_it(feature: Feature, place: str) -> None:
    with hidden([place], other_arguments):
        off = internals.check()
    assert any("takes other arguments" in why for why in off.get(feature, []))


@pytest.mark.parametrize("name", ["get_control", "control_merge"])
def test_a_function_that_is_computed_here_too_and_uses_new_names_joins_no_stacks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = getattr(ControlNet, name)
    assert internals.check() == {}

    def get_control(self: Any, a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
        return self.brightness_of_tomorrow * own(self, a, b, c, d, e)

    def control_merge(self: Any, a: Any, b: Any, c: Any) -> Any:
        return self.brightness_of_tomorrow * own(self, a, b, c)

    newer = get_control if name == "get_control" else control_merge
    monkeypatch.setattr(ControlNet, name, newer)
    assert internals.check() == {}, "another pack's, which is seen where it matters"
    newer.__code__ = newer.__code__.replace(co_filename=comfy.controlnet.__file__)
    assert list(internals.check()) == [Feature.STACKS]
    assert "brightness_of_tomorrow" in internals.switched_off()[0]


def test_more_arguments_that_need_not_be_given_switch_off_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    own = comfy.model_patcher.ModelPatcher.__init__
    begin = lambda self, model, load_device, offload_device, size=0, more=None: None  # noqa: E731
    monkeypatch.setattr(comfy.model_patcher.ModelPatcher, "__init__", begin)
    assert internals.check() == {}
    handed_on = lambda *args, **options: own(*args, **options)  # noqa: E731
    monkeypatch.setattr(comfy.model_patcher.ModelPatcher, "__init__", handed_on)
    assert internals.check() == {}


def loaded(again: str, place: str) -> Any:
    return importlib.import_module(f"{again}.{place}")


def with_engines(again: str, folder: Path, model: Any, controls: list[ControlNet]) -> tuple[Any, list, ControlNet]:
    """A model and a stack of ControlNets on the torch backend of a pack; the handles of all."""
    handles = loaded(again, "sampling.engine_handle")
    networks = loaded(again, "comfy_model.network").NativeNetwork
    library = loaded(again, "engine_library").Library([folder])
    choice, found, previous = handles.EngineChoice(PROFILE, backend="torch"), [], None
    for number, control in enumerate(controls):
        found.append(handles.EngineHandle(networks.of_controlnet(control, "c"), choice, library, str(number)))
        backed = loaded(again, "sampling.controlnet").back_with_engine(control, found[-1])
        previous = hinted(backed, previous)
    found.append(handles.EngineHandle(networks.of_model(model, NAME), choice, library, "unet"))
    return loaded(again, "sampling.model_wrapper").patch_model(model, found[-1]), found, previous


def hinted(control: ControlNet, previous: ControlNet | None) -> ControlNet:
    image = torch.rand(1, 3, 50, 70, generator=torch.Generator().manual_seed(2))
    control = control.copy().set_cond_hint(image, 0.7, (0.0, 1.0))
    return control.set_previous_controlnet(previous)


@pytest.fixture
def nothing_stays_loaded() -> Iterator[None]:
    yield
    gc.collect()
    model_management.unload_all_models()


@pytest.fixture(scope="module")
def native_picture(files: dict[str, Path]) -> torch.Tensor:
    control = comfy.controlnet.load_controlnet(str(files["tiny_sd15_flat_a"]))
    return sample(load(files[NAME]), control=hinted(control, hinted(control, None)))


@pytest.mark.usefixtures("nothing_stays_loaded")
@pytest.mark.parametrize("feature", Feature, ids=words)
def test_the_pack_loads_without_all_that_a_feature_needs_and_pictures_are_natives(
    feature: Feature, files: dict[str, Path], controlnet: ControlNet, device: None, tmp_path: Path,
    native_picture: torch.Tensor, caplog: pytest.LogCaptureFixture, renamed_attributes: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    instead = other_arguments if feature is Feature.GRAPHS else None
    assert execution.PromptQueue, "a server has it"
    model = load(files[NAME])
    with pack_again() as again, hidden(TABLE[feature], instead):
        its = loaded(again, "comfy_model.comfyui_internals")
        renamed_attributes(its, TABLE[feature])
        feature = its.Feature[feature.name]
        off = its.check()
        nodes = asyncio.run(loaded(again, "nodes").HybridTRT().get_node_list())
        assert len({node.GET_SCHEMA().node_id for node in nodes}) == 10
        assert feature in off
        assert len([line for line in said(caplog) if feature.value[0] in line]) == 1
        if feature.name == "ENGINES":
            latent = through_nodes(nodes, model, controlnet)
            assert torch.equal(latent, native_picture)
            return
        runs = counted(loaded(again, "sampling.control_stack"), monkeypatch)
        patched, handles, control = with_engines(again, tmp_path, model, [controlnet, controlnet])
        with CurrentNodeContext("prompt", "sampler"):
            latent = sample(patched, control=control)
        assert error(latent, native_picture) <= LIMIT
        assert all((handle.stats.engine, handle.stats.native) == (STEPS, 0) for handle in handles)
        assert len(runs) == (0 if its.Feature.STACKS in off else STEPS - 1)
        if feature.name == "BUILDS":
            loaded(again, "nodes.building").build(handles[-1], None, again=True)
            assert "command line" in loaded(again, "sampling.engine_status").status(handles[-1])
        if feature.name == "QUEUE":
            assert loaded(again, "page_api.build_orders").running_pictures() == ""


def counted(control_stack: Any, monkeypatch: pytest.MonkeyPatch) -> list:
    runs, own = [], control_stack._run
    monkeypatch.setattr(control_stack, "_run", lambda *args: runs.append(1) or own(*args))
    return runs


def through_nodes(nodes: list, model: Any, controlnet: ControlNet) -> torch.Tensor:
    """A latent sampled with the nodes of a pack that has no engines; what they say."""
    by_id = {node.GET_SCHEMA().node_id: node for node in nodes}
    engine = by_id["TRTUNetEngine"].execute(model=model, when_missing="use native").args[0]
    patched = by_id["TRTSamplerPatch"].execute(model=model, engine=engine)
    (control,) = by_id["TRTControlNetEngine"].execute(control_net=controlnet, when_missing="use native").args
    latent = sample(patched.args[0], control=hinted(control, hinted(control, None)))
    report = by_id["TRTReport"].execute(after=latent, time_calls=True)
    assert report.args[0] is latent
    assert "everything runs at normal speed" in report.args[1]
    assert "this ComfyUI has no" in patched.ui["text"][0]
    return latent


def test_nodes_have_the_same_inputs_with_and_without_engines() -> None:
    from hybrid_trt.nodes import native_only, nodes

    for own, without in zip(nodes(), native_only.NODES, strict=True):
        inputs = [[str(given.as_dict()) for given in node.GET_SCHEMA().inputs] for node in (own, without)]
        assert inputs[0] == inputs[1]


@pytest.mark.fault("this ComfyUI lacks something that the pack needs", see="normal speed; the log names it")
def test_what_the_table_does_not_name_and_is_missing_leaves_all_to_native(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import hybrid_trt.nodes
    from hybrid_trt.nodes import native_only

    monkeypatch.setattr(internals, "_off", {})
    monkeypatch.setitem(sys.modules, "hybrid_trt.nodes.engine_nodes", None)
    assert asyncio.run(hybrid_trt.nodes.HybridTRT().get_node_list()) == native_only.NODES
    assert len(said(caplog)) == 1
    assert "everything runs at normal speed" in said(caplog)[0]
