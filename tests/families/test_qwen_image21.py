"""Qwen-Image 2.1: what is computed once in a run, native's prefix cache, and servers without the network."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import newer_networks
import pytest
import torch
from comfy.model_patcher import ModelPatcher
from family_contract import ACTS, LIMIT, difference, live, natively, on_engine
from hybrid_trt.architectures import families, needs
from model_families.qwen_image21 import FAMILY, FILE, references
from token_calls import Patched, network_of

from sampling import error

CACHE = "qwen_image21_cache"
CALL = FAMILY.calls["two references, odd sides, a batch"]


def prefixes(patched: Patched) -> Any:
    """The passes that compute prefixes, and keep them for a run."""
    return patched.handle.session._live.passes


@pytest.mark.parametrize(("name", "count"), [("references", 2), ("references of one length", 1), ("without CFG", 1)])
def test_a_prefix_is_computed_once_per_conditioning_and_run(
    models: dict[str, Path], tmp_path: Path, name: str, count: int
) -> None:
    patched, prompt = Patched(network_of(models, FILE), tmp_path, "torch"), FAMILY.prompts[name]
    for runs in (1, 2):
        prompt.sample(patched.model)
        assert patched.counts == (prompt.calls, 0), patched.handle.stats.reasons
        assert prefixes(patched).computed == runs * count
        assert not any(entry.held for entry in prefixes(patched)._caches["context"]._entries), "they go with the run"


def keeping(form: str, device: str = "cpu") -> Any:
    """Let a model keep its prefix in a format."""

    def change(model: ModelPatcher) -> ModelPatcher:
        changed = model.clone()
        changed.model_options["transformer_options"][CACHE] = {"device": device, "dtype": form}
        return changed

    return change


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_a_prefix_in_fewer_bits_is_rounded_as_native_rounds_it(
    models: dict[str, Path], tmp_path: Path, form: str
) -> None:
    patched, native = Patched(network_of(models, FILE), tmp_path, "torch"), network_of(models, FILE).patcher
    prompt, rounding = FAMILY.prompts["references"], keeping(form)
    exact, expected = prompt.sample(native), prompt.sample(rounding(native))
    assert error(expected, exact) > 10 * LIMIT, "it acts"
    assert error(prompt.sample(rounding(patched.model)), expected) <= LIMIT
    assert patched.counts == (prompt.calls, 0), patched.handle.stats.reasons
    off = keeping(form, "off")
    assert error(prompt.sample(off(native)), exact) <= LIMIT, "without a cache nothing is rounded"
    assert error(prompt.sample(off(patched.model)), exact) <= LIMIT
    assert patched.counts == (prompt.calls, 0)


def test_native_calls_in_between_do_not_end_the_engine(models: dict[str, Path], tmp_path: Path) -> None:
    patched, prompt = Patched(network_of(models, FILE), tmp_path, "torch"), FAMILY.prompts["references"]
    expected = prompt.sample(patched.handle.network.patcher)  # native keeps its prefix on the module
    for _ in range(2):
        assert error(prompt.sample(patched.model), expected) <= LIMIT
        assert patched.counts == (prompt.calls, 0), patched.handle.stats.reasons
        assert error(prompt.sample(patched.handle.network.patcher), expected) == 0


def test_references_that_change_under_the_same_prompt_are_seen(models: dict[str, Path]) -> None:
    network = network_of(models, FILE)
    session, given = live(network), CALL.drawn(network)
    changes = [{}, {"image_slots": [5, 40]}, {"ref_latents": [t + 1 for t in given["ref_latents"]]},
               {"ref_latents": given["ref_latents"][:1]}, {"x": given["x"][..., 1:]}]  # fmt: skip
    results = []
    for change in changes:
        results.append(natively(network, given | change))
        assert difference(on_engine(network, session, given | change), results[-1]) <= LIMIT, change
    given["ref_latents"][0].mul_(2)
    results.append(natively(network, given))
    assert difference(on_engine(network, session, given), results[-1]) <= LIMIT, "written to in place"
    alike = [one for one in results if one.shape == results[0].shape]
    assert all(difference(a, b) > ACTS for i, a in enumerate(alike) for b in alike[:i]), "all act"


def test_one_prefix_serves_pictures_of_all_sizes_but_for_references(models: dict[str, Path]) -> None:
    network = network_of(models, FILE)
    session, random = live(network), torch.Generator().manual_seed(3)
    for name, in_all in (("plain", 1), ("one reference", 3)):  # references are centred on pictures, odd or even
        given = FAMILY.calls[name].drawn(network)
        for sides in ((8, 6), (10, 6), (13, 6), (8, 6)):
            call = given | {"x": torch.randn(1, 64, *sides, generator=random)}
            assert difference(on_engine(network, session, call), natively(network, call)) <= LIMIT
        assert session._live.passes.computed == in_all


def test_weights_that_wait_in_main_memory_are_brought_for_the_prefix(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    network = network_of(models, FILE)
    session, call = live(network), CALL.drawn(network)
    family, moved = sys.modules[type(network.architecture()).__module__], []

    def moves(layer: torch.nn.Module, x: torch.Tensor) -> bool:
        moved.append(layer)
        return len(moved) % 2 == 1  # the second call has them

    monkeypatch.setattr(family, "_waits", moves)
    assert difference(on_engine(network, session, call), natively(network, call)) <= LIMIT
    assert len(moved) == 6


def test_without_the_network_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    name, ours = f"{families.__name__}.qwen_image21", str(Path(newer_networks.__file__).parent)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if not folder.startswith(ours)])
    for module in [name, *(one for one in sys.modules if one.startswith("comfy.ldm.qwen_image21"))]:
        monkeypatch.delitem(sys.modules, module, raising=False)
    assert needs()["qwen_image21"] == (), "it is imported, and nothing is said to be missing"
    assert not any(one.startswith("comfy.ldm.qwen_image21") for one in sys.modules)


def test_more_references_and_longer_prompts_in_one_run(models: dict[str, Path], tmp_path: Path) -> None:
    patched, native = Patched(network_of(models, FILE), tmp_path, "torch"), network_of(models, FILE).patcher
    for sides, words in (([(8, 6)] * 3, (300, 9)), ([(3, 17)], (1, 1))):
        prompt = replace(FAMILY.prompts["references"], words=words, entries=references(*sides, image_slots=[1]))
        prompt = replace(prompt, calls=6 if words[0] != words[1] else 3)
        assert error(prompt.sample(patched.model), prompt.sample(native)) <= LIMIT
        assert patched.counts == (prompt.calls, 0), patched.handle.stats.reasons
