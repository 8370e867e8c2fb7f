"""Prompts stay on the device for a whole run: same values, dicts unchanged, nothing kept, the host one call ahead.

On a machine without a GPU the device that is not the CPU is ``meta``, whose tensors have no values. Whole runs move
all that can be moved from the CPU to the CPU, as copies, and events are doubles.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.hooks
import comfy.samplers
import pytest
import torch
from comfy import conds as kinds
from comfy.conds import CONDConstant, CONDCrossAttn, CONDList, CONDNoiseShape, CONDRegular
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrapperExecutor, WrappersMP
from hybrid_trt.engine_library import Library
from hybrid_trt.sampling import run_inputs
from hybrid_trt.sampling.run_inputs import RUN, RunInputs, call_on_device, sample_on_device
from memory_fixtures import file, nothing_loaded
from patched import CPU, Patched, load, sampling_node

__all__ = ["file", "nothing_loaded"]  # fixtures: pytest finds them by name

META, GPU = torch.device("meta"), torch.device("cuda", 0)
STEPS = 3


class OfAnotherPack(CONDRegular):
    pass


def moved(run: RunInputs, *conditions: CONDRegular) -> list[CONDRegular]:
    """Conditions as a call gets them, each from a conditioning of its own, on another device."""
    (group,) = run.on_device([[{"model_conds": {"a": condition}} for condition in conditions]], META)
    return [cond["model_conds"]["a"] for cond in group]


def prompt(tokens: int = 77) -> CONDCrossAttn:
    return CONDCrossAttn(torch.randn(1, tokens, 8))


@pytest.mark.parametrize("kind", [CONDRegular, CONDCrossAttn, CONDNoiseShape])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
def test_conditions_of_a_run_are_on_its_device_with_their_kind_shape_layout_and_dtype(
    kind: type[CONDRegular], dtype: torch.dtype
) -> None:
    source = torch.zeros(2, 6, 4, 3, dtype=dtype).movedim(-1, 1)
    (value,) = moved(RunInputs(), kind(source))
    assert type(value) is kind
    assert value.cond.device == META
    assert (value.cond.dtype, value.cond.shape, value.cond.stride()) == (dtype, source.shape, source.stride())


def test_what_is_compared_or_listed_or_is_not_comfyuis_own_stays_where_it_is() -> None:
    tensor = torch.zeros(1, 2)
    held = {"constant": CONDConstant(tensor), "number": CONDConstant(3), "list": CONDList([tensor]),
            "other": OfAnotherPack(tensor), "wanted": CONDRegular(tensor.clone().requires_grad_()),
            "parameter": CONDRegular(torch.nn.Parameter(tensor, requires_grad=False)), "no_tensor": CONDRegular(5)}
    conds = [[{"model_conds": held}], None, []]
    assert RunInputs().on_device(conds, META) is conds
    known = {CONDRegular, CONDNoiseShape, CONDCrossAttn, CONDConstant, CONDList}
    theirs = {value for value in vars(kinds).values() if isinstance(value, type) and issubclass(value, CONDRegular)}
    assert theirs == known, "ComfyUI has a kind of condition that nobody has looked at"


def test_another_tensor_in_the_same_condition_and_one_written_to_are_copied_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_inputs, "_names_elsewhere", lambda *_: {"a"})
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *_: self.clone())
    run, condition = RunInputs(), CONDCrossAttn(torch.zeros(1, 2, 3))

    def value() -> float:
        return float(run.on_device([[{"model_conds": {"a": condition}}]], CPU)[0][0]["model_conds"]["a"].cond.sum())

    assert (value(), value()) == (0, 0)
    condition.cond = torch.ones(1, 2, 3)
    assert value() == 6
    condition.cond.mul_(2)
    assert value() == 12


def test_conditions_on_several_devices_stay_there_since_comfyui_does_not_batch_them() -> None:
    here, there = prompt(), CONDCrossAttn(torch.zeros(1, 77, 8, device=META))
    assert not here.can_concat(there)
    positive, negative = ({"model_conds": {"c_crossattn": held, "y": CONDRegular(torch.zeros(1, 4))}}
                          for held in (here, there))  # fmt: skip
    found = [group[0]["model_conds"] for group in RunInputs().on_device([[positive], [negative]], META)]
    assert [held["c_crossattn"] for held in found] == [here, there]
    assert [held["y"].cond.device for held in found] == [META, META]
    elsewhere = run_inputs._names_elsewhere([[positive], [negative]], GPU)
    assert elsewhere == {"y"}, "two devices, of which none is the run's"


def test_copies_go_with_a_tensor_that_nobody_has_any_more_and_all_at_the_end_of_a_run() -> None:
    run, kept = RunInputs(), torch.zeros(1, 2)
    copies = [weakref.ref(moved(run, CONDRegular(tensor))[0].cond) for tensor in (torch.zeros(1, 2), kept)]
    gc.collect()
    assert [copy() is not None for copy in copies] == [False, True]
    run.release()
    gc.collect()
    assert copies[1]() is None


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_has_its_own_and_leaves_nothing_in_the_options(fails: bool) -> None:
    model = SimpleNamespace(get_additional_models_with_key=lambda _key: [], get_model_object=lambda _name: None)
    guider, seen = SimpleNamespace(model_options={"others": 1}, model_patcher=model), []

    def sampler(*_: object) -> str:
        run = guider.model_options[RUN]
        moved(run, CONDRegular(prompts))
        assert len(run._copies) == 1
        seen.append(run)
        if fails:
            raise RuntimeError("interrupted")
        return "latent"

    prompts = torch.zeros(1, 2)
    for _ in range(2):
        executor = WrapperExecutor.new_class_executor(sampler, guider, [sample_on_device])
        if fails:
            with pytest.raises(RuntimeError, match="interrupted"):
                executor.execute("noise")
        else:
            assert executor.execute("noise") == "latent"
        assert guider.model_options == {"others": 1}
    assert seen[0] is not seen[1]
    assert [len(run._copies) for run in seen] == [0, 0]


@pytest.mark.parametrize(("options", "there"), [({}, False), ({RUN: RunInputs(), "multigpu_clones": {}}, True)],
                         ids=["no run", "several GPUs"])  # fmt: skip
def test_prompts_of_a_call_are_on_its_device_also_where_several_gpus_share_it(options: dict, there: bool) -> None:
    """The other GPUs copy them from there: that waits for nothing."""
    conds, seen = [[{"model_conds": {"c_crossattn": prompt()}}]], []
    x = torch.zeros(1, 4, 8, 8, device=META)
    executor = WrapperExecutor.new_executor(lambda *given: seen.append(given), [call_on_device])
    executor.execute(None, conds, x, None, options)
    assert seen[0][4] is options
    (given,) = seen[0][1][0]
    assert given["model_conds"]["c_crossattn"].cond.device == (META if there else torch.device("cpu"))
    assert (seen[0][1] is conds) is not there


class Table(torch.nn.Module):
    """Stands for ComfyUI's table of sigmas; no GPU is needed to tell where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.place = torch.device("cpu")

    def buffers(self, recurse: bool = True) -> Iterator[Any]:
        return iter([SimpleNamespace(device=self.place)])

    def to(self, device: torch.device) -> None:
        self.place = device


@pytest.mark.parametrize("shared", [False, True], ids=["each its own", "one for both"])
def test_each_gpu_looks_sigmas_up_in_its_own_memory_during_a_run_alone(shared: bool) -> None:
    """Else each step waits for a copy of its sigma."""

    def patcher(device: torch.device, table: torch.nn.Module, *copies: Any) -> Any:
        return SimpleNamespace(load_device=device, get_model_object={"model_sampling": table}.get,
                               get_additional_models_with_key=lambda _key: copies)  # fmt: skip

    def run() -> None:
        assert tables[0].place == GPU
        assert tables[1].place == (before if shared else META)
        raise RuntimeError("interrupted")

    tables, before = [Table() for _ in range(2)], torch.device("cpu")
    model = patcher(GPU, tables[0], patcher(META, tables[0] if shared else tables[1]))
    with pytest.raises(RuntimeError, match="interrupted"), run_inputs.sigmas_on_device(model):
        run()
    assert [table.place for table in tables] == [before, before], "as it was before"


class FakeGPU:
    """Doubles of CUDA's events over a GPU that does nothing before somebody waits for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.given = self.done = self.events = 0
        self.capturing = False
        gpu = self

        class Event:
            def __init__(self) -> None:
                gpu.events += 1

            def record(self, stream: object) -> None:
                assert stream == f"stream of {GPU}"
                assert not gpu.capturing
                self.after = gpu.given

            def synchronize(self) -> None:
                assert not gpu.capturing
                gpu.done = max(gpu.done, self.after)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)

    def call(self, run: RunInputs, device: torch.device = GPU) -> None:
        def executor(*_: object) -> None:
            self.given += 1

        call_on_device(executor, None, [], SimpleNamespace(device=device), None, {RUN: run})


def test_a_call_returns_when_the_one_before_has_ended_on_the_gpu_which_has_one_more_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, run = FakeGPU(monkeypatch), RunInputs()
    for call in range(1, 30):
        gpu.call(run)
        assert (gpu.given, gpu.done) == (call, call - 1)
    assert gpu.events == 1, "made once"


def test_two_runs_at_once_wait_for_their_own_calls_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, one, other = FakeGPU(monkeypatch), RunInputs(), RunInputs()
    gpu.call(one)
    for _ in range(3):
        gpu.call(other)
    assert gpu.done == 3
    gpu.call(one)
    assert gpu.done == 3, "the last of the other's was not waited for"
    assert gpu.events == 2


@pytest.mark.parametrize("device", [CPU, META])
def test_nothing_is_waited_for_off_the_gpu_nor_while_its_stream_is_captured(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, run = FakeGPU(monkeypatch), RunInputs()
    for _ in range(3):
        gpu.call(run, device)
    gpu.capturing = True
    for _ in range(3):
        gpu.call(run)
    assert (gpu.events, gpu.done) == (0, 0)


def conditioning(seed: int, tokens: int = 77, **options: object) -> list:
    return [[torch.randn(1, tokens, 768, generator=torch.Generator().manual_seed(seed)), options]]


AREA = {"area": (4, 8, 0, 0), "strength": 0.7}
MASK = {"mask": torch.eye(8)[None], "mask_strength": 0.5}
LATER = {"start_percent": 0.3, "end_percent": 0.9}


def with_cfg(model: ModelPatcher, *positive: list) -> comfy.samplers.CFGGuider:
    guider = comfy.samplers.CFGGuider(model)
    guider.set_conds(sum(positive, []) or conditioning(1), conditioning(2))
    guider.set_cfg(5.0)
    return guider


def with_dual_cfg(model: ModelPatcher) -> comfy.samplers.CFGGuider:
    from comfy_extras.nodes_custom_sampler import Guider_DualCFG

    guider = Guider_DualCFG(model)
    guider.set_conds(conditioning(1), conditioning(2), conditioning(3))
    guider.set_cfg(4.0, 2.0)
    return guider


def with_perp_neg(model: ModelPatcher) -> comfy.samplers.CFGGuider:
    """The old node makes conditionings anew in each step, in a list that its cached output owns."""
    from comfy_extras.nodes_perpneg import PerpNeg

    return with_cfg(PerpNeg.execute(model, conditioning(4), 1.0).args[0])


def with_own_batches(model: ModelPatcher) -> comfy.samplers.CFGGuider:
    """As packs do that make the conditionings of each step by themselves."""
    model = model.clone()

    def calc(args: dict) -> list[torch.Tensor]:
        conds = [[{**cond, "model_conds": dict(cond["model_conds"])} for cond in group] for group in args["conds"]]
        return comfy.samplers.calc_cond_batch(args["model"], conds, args["input"], args["sigma"], args["model_options"])

    model.set_model_sampler_calc_cond_batch_function(calc)
    return with_cfg(model)


def with_hooks(model: ModelPatcher) -> comfy.samplers.CFGGuider:
    """Conditionings of two groups of hooks, which ComfyUI computes one after the other."""
    hooks = comfy.hooks.HookGroup()
    hooks.add(comfy.hooks.TransformerOptionsHook({"theirs": 1}))
    return with_cfg(model, conditioning(1, hooks=hooks), conditioning(5))


GUIDERS: dict[str, Callable[[ModelPatcher], comfy.samplers.CFGGuider]] = {
    "cfg": with_cfg,
    "long and short prompts": lambda model: with_cfg(model, conditioning(1, 154)),
    "areas": lambda model: with_cfg(model, conditioning(1), conditioning(5, **AREA)),
    "masks": lambda model: with_cfg(model, conditioning(1, **MASK), conditioning(5, default=True)),
    "ranges": lambda model: with_cfg(model, conditioning(1), conditioning(5, **LATER)),
    "one prompt twice": lambda model: with_cfg(model, (both := conditioning(1)), [[both[0][0], dict(AREA)]]),
    "dual cfg": with_dual_cfg,
    "perp-neg": with_perp_neg,
    "hooks": with_hooks,
    "own batches": with_own_batches,
}


def run_of(guider: comfy.samplers.CFGGuider) -> torch.Tensor:
    noise = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    sigmas = comfy.samplers.calculate_sigmas(guider.model_patcher.get_model_object("model_sampling"), "normal", STEPS)
    with sampling_node(), torch.inference_mode():
        return guider.sample(noise, torch.zeros_like(noise), comfy.samplers.sampler_object("euler"), sigmas, seed=1)


class Watched:
    """A model behind the sampler patch, of whose calls all dicts are looked at before and after."""

    def __init__(self, file: Path, folder: Path):
        self.patched = Patched(load(file), Library([folder]), "torch")
        self.model = self.patched.model.clone()
        self.model.wrappers[WrappersMP.CALC_COND_BATCH] = {
            "before ours": [self.look], **self.model.wrappers[WrappersMP.CALC_COND_BATCH], "after ours": [self.see]}
        self.changed, self.objects, self.runs, self.hooks = 0, [], [], set()

    def look(self, executor: WrapperExecutor, model: Any, conds: list, *given: Any) -> Any:
        def contents() -> list:
            dicts = [cond for group in conds if group is not None for cond in group]
            held = [cond["model_conds"] for cond in dicts]
            return [*map(dict, dicts), *map(dict, held), *[dict(vars(value)) for d in held for value in d.values()]]

        before = contents()
        result = executor(model, conds, *given)
        for old, new in zip(before, contents(), strict=True):
            self.changed += old.keys() != new.keys() or any(old[name] is not new[name] for name in old)
        return result

    def see(self, executor: WrapperExecutor, model: Any, conds: list, x: Any, timestep: Any, options: dict) -> Any:
        self.runs.append(options.get(RUN))
        for group in conds:
            self.objects += [value.cond for cond in group or () for value in cond["model_conds"].values()]
            self.hooks |= {cond.get("hooks") for cond in group or ()}
        return executor(model, conds, x, timestep, options)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Every run moves all that can be moved, to copies on the CPU; the tensors that were copied."""
    made, copy = [], RunInputs._copy

    def to_a_copy(self: RunInputs, source: torch.Tensor, device: torch.device) -> torch.Tensor:
        if source not in self._copies:
            made.append(source)
            copy(self, source, device)
            self._copies[source] = (self._copies[source][0], source.clone())
        return copy(self, source, device)

    def all_names(conds: list, _device: torch.device) -> set[str]:
        held = [cond["model_conds"] for group in conds for cond in group or ()]
        return {name for conditions in held for name, value in conditions.items() if run_inputs._movable(value)}

    monkeypatch.setattr(RunInputs, "_copy", to_a_copy)
    monkeypatch.setattr(run_inputs, "_names_elsewhere", all_names)
    return made


@pytest.mark.parametrize("make", GUIDERS.values(), ids=GUIDERS)
def test_a_run_with_moved_prompts_gives_the_same_latent_and_changes_no_ones_dicts(
    file: Path, tmp_path: Path, make: Callable, copied: list[torch.Tensor]
) -> None:
    with pytest.MonkeyPatch.context() as plain:
        plain.setattr(run_inputs, "_names_elsewhere", lambda *_: set())
        reference = run_of(make(Watched(file, tmp_path).model))
    assert copied == []
    watched = Watched(file, tmp_path)
    guider = make(watched.model)
    originals = {name: [dict(cond) for cond in group] for name, group in guider.original_conds.items()}
    assert torch.equal(run_of(guider), reference)
    assert watched.changed == 0
    for name, group in originals.items():
        for cond, now in zip(group, guider.original_conds[name], strict=True):
            assert cond.keys() == now.keys()
            assert all(cond[key] is now[key] for key in cond)
    assert len(watched.runs) >= STEPS
    assert len(watched.hooks) == (2 if make is with_hooks else 1)
    (run,) = set(watched.runs)
    sources = {id(source) for source in copied}
    assert len(sources) == len(copied) > 1, "each prompt is copied once"
    assert not sources & {id(tensor) for tensor in watched.objects}, "and every call gets the copy"
    assert len(run._copies) == 0
    assert RUN not in watched.model.model_options
    assert RUN not in guider.model_options
