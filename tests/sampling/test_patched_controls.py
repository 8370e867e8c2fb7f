"""Patches that other packs put on a ControlNet's own weights, or on a VAE's, act on engines as on native ones.

ComfyUI samples and loads. The packs are doubles, see ``support/patched_controls.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import comfy.controlnet
import patched_controls as packs
import pytest
import slow
import tiny_models
import torch
from comfy import model_management
from comfy.controlnet import ControlNet
from comfy.sd import VAE
from comfy.utils import load_torch_file
from controlled import joined
from hybrid_trt.architectures import Role
from hybrid_trt.architectures.shapes import RequestedSizes
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_library import Library, Reason
from hybrid_trt.sampling.controlnet import native_controlnet
from hybrid_trt.sampling.engine_handle import EngineChoice, EngineHandle
from hybrid_trt.sampling.vae import native_vae, vae_with_engines
from memory_fixtures import CONTROLNET, NAME, files, nothing_loaded, on_engine
from patched import LIMIT, Patched, built_here, load, sampling_node

from sampling import error, sample

__all__ = ["files", "joined", "nothing_loaded"]  # fixtures: pytest finds them by name

STEPS = 2
BACKENDS = pytest.mark.parametrize("backend", ["onnxruntime", "torch"])


@pytest.fixture(scope="module")
def library(files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Library:
    """A library with an engine of the ControlNet."""
    found = Library([tmp_path_factory.mktemp("library")])
    built_here(NativeNetwork.of_controlnet(loaded(files), CONTROLNET), found)
    return found


@pytest.fixture(scope="module")
def model(files: dict[str, Path]) -> Any:
    return load(files[NAME])


def loaded(files: dict[str, Path]) -> ControlNet:
    return comfy.controlnet.load_controlnet(str(files[CONTROLNET]))


def picture(model: Any, net: ControlNet) -> torch.Tensor:
    with sampling_node():
        return sample(model, steps=STEPS, control=net)


def same(pictures: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(error(*pair) <= LIMIT for pair in zip(pictures, others, strict=True))


@pytest.mark.fault("another pack patches a ControlNet's own weights behind its engine node",
                   see="normal speed: *weights changed* or *changed by another node*; live weights follow a LoRA")
@slow.when("torch", but=["a clone", "in place", "object"])
@BACKENDS
@pytest.mark.parametrize("way", slow.cases(
    packs.WAYS, ["clone of clones", "keys of the network", "object in place", "weight wrapper in place"]))
def test_patches_on_a_controlnets_own_weights_act_as_in_native(
    files: dict[str, Path], library: Library, model: Any, backend: str, way: Callable[[ControlNet], ControlNet]
) -> None:
    def pictures(net: ControlNet) -> Iterator[torch.Tensor]:
        """Of the plain net, of the patched one, and of both again."""
        yield picture(model, packs.with_image(net))
        other = way(net)
        for one in (other, net, other):
            yield picture(model, packs.with_image(one))

    native = list(pictures(loaded(files)))
    assert error(native[1], native[0]) > 100 * LIMIT, "the patches act"
    net, handle = on_engine(loaded(files), library, backend)
    found, counts = [], []
    for one in pictures(net):
        found.append(one)
        counts.append((handle.stats.engine, handle.stats.native))
    assert same(found, native), [error(*pair) for pair in zip(found, native, strict=True)]
    assert counts[0] == (STEPS, 0)
    if error(native[2], native[0]) <= LIMIT:
        assert counts[2] == (STEPS, 0), "the plain net is on its engine again"
    if backend == "onnxruntime":
        assert counts[3] == (0, STEPS)
        assert set(handle.stats.reasons) <= {Reason.WEIGHTS_PATCHED, Reason.MODEL_PATCHED, Reason.HOOKS}


ROWS: dict[str, list[int]] = {"the first is patched": [1, 0], "the last is patched": [0, 1], "both, unlike": [1, 2],
                              "one of three": [0, 1, 0]}  # fmt: skip
"""Seed of the patches of each row, 0 for none."""


@slow.when("an engine node for each row", but=["the first is patched"])
@slow.when("onnxruntime", but=["the first is patched", "the last is patched"])
@BACKENDS
@pytest.mark.parametrize("nodes", [1, 2], ids=["one engine node", "an engine node for each row"])
@pytest.mark.parametrize("rows", slow.cases(ROWS, ["one of three"]))
def test_rows_that_share_an_engine_are_patched_as_in_native(
    files: dict[str, Path], library: Library, joined: list[int], backend: str, nodes: int, rows: list[int]
) -> None:
    """In native the patches that ComfyUI loads last are those of all rows, because they share the weights.

    Only the first time: ComfyUI then patches what is patched already, and the picture drifts from run to run.
    """
    def stack(nets: list[ControlNet]) -> ControlNet:
        last = None
        for number, seed in enumerate(rows):
            net = nets[number % len(nets)]
            if seed:
                net = packs.on_a_clone(lambda patcher, seed=seed: packs.patch(patcher, seed))(net)
            last = packs.with_image(net, last)
        return last

    model = Patched(load(files[NAME]), library, "torch")
    plain = loaded(files)
    native = [picture(model.native, stack([plain]))]
    native.append(picture(model.native, packs.with_image(plain, packs.with_image(plain))))
    net = loaded(files)
    made = [on_engine(net, library, backend) for _ in range(nodes)]
    nets = [one for one, _ in made]
    found = [picture(model.model, stack(nets))]
    joined.clear()
    found.append(picture(model.model, packs.with_image(nets[-1], packs.with_image(nets[0]))))
    assert same(found, native), [error(*pair) for pair in zip(found, native, strict=True)]
    assert all(handle.stats.native == 0 for _, handle in made)
    assert joined or backend != "torch"


def test_deep_copies_of_a_controlnet_are_patched_apart(files: dict[str, Path], library: Library, model: Any) -> None:
    def rows(net: ControlNet) -> ControlNet:
        return packs.with_image(net, packs.with_image(packs.on_a_deep_copy(net)))

    native = [picture(model, rows(loaded(files))), picture(model, packs.with_image(loaded(files)))]
    net, handle = on_engine(loaded(files), library, "onnxruntime")
    found = [picture(model, rows(net))]
    assert (handle.stats.engine, handle.stats.native) == (STEPS, STEPS)
    found.append(picture(model, packs.with_image(net)))
    assert same(found, native)


def test_an_engine_node_behind_the_pack_has_an_engine_of_the_patched_weights(
    files: dict[str, Path], library: Library, model: Any
) -> None:
    patched = packs.on_a_clone(packs.patch)
    native = picture(model, packs.with_image(patched(loaded(files))))
    first, _ = on_engine(loaded(files), library, "torch")
    second, handle = on_engine(patched(first), library, "torch")
    assert error(picture(model, packs.with_image(second)), native) <= LIMIT
    assert (handle.stats.engine, handle.stats.native) == (STEPS, 0)


def test_what_a_pack_reads_of_the_weights_behind_an_engine_is_natives(
    files: dict[str, Path], library: Library, model: Any
) -> None:
    native = loaded(files)
    net, _ = on_engine(native, library, "onnxruntime")
    picture(model, packs.with_image(net))
    for theirs, own in ((net.control_model_wrapped, native.control_model_wrapped),
                        (net.control_model_wrapped.clone(), native.control_model_wrapped.clone())):
        packs.patch(theirs)
        assert theirs.model.state_dict().keys() == own.model.state_dict().keys()
        assert [*map(id, theirs.model.parameters())] == [*map(id, own.model.parameters())]
        assert theirs.model_state_dict("middle").keys() == own.model_state_dict("middle").keys()
        own = theirs.native
        told, known = theirs.get_key_patches(), own.get_key_patches()
        assert {name: len(patches) for name, patches in told.items()} == {n: len(p) for n, p in known.items()}
        assert theirs.get_model_object(packs.LAYER) is own.get_model_object(packs.LAYER)
        assert theirs.patches_uuid == own.patches_uuid
        assert theirs.is_clone(net.control_model_wrapped)
    net.control_model_wrapped.model_patches_to(torch.device("cpu"))
    assert native_controlnet(net).control_model_wrapped is native.control_model_wrapped


# -- VAEs


@pytest.fixture(scope="module")
def vae_files(environment: Any) -> Path:
    return tiny_models.make(environment.base / "models", ["tiny_sdxl_taesd"])["tiny_sdxl_taesd"]


@pytest.fixture(scope="module")
def vae_library(vae_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Library:
    found = Library([tmp_path_factory.mktemp("vaes")])
    network = NativeNetwork.of_vae(loaded_vae(vae_files), Role.VAE_DECODER, "taesd")
    built_vae(network, found, "onnxruntime")
    return found


def built_vae(network: NativeNetwork, library: Library, backend: str) -> None:
    built_here(network, library, backend, vae_profile(network))


def loaded_vae(file: Path) -> VAE:
    return VAE(sd=load_torch_file(str(file)), device=torch.device("cpu"), dtype=torch.float32)


def vae_profile(network: NativeNetwork) -> Any:
    return network.architecture().profile(RequestedSizes(64, 128, 256))


def decoded(vae: VAE) -> torch.Tensor:
    """As a node decodes."""
    with sampling_node(), torch.inference_mode():
        return vae.decode(torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(1)))


def called(patcher: Any, vae: VAE) -> torch.Tensor:
    """As packs do that load a patched clone and call the network by themselves."""
    with sampling_node(), torch.inference_mode():
        model_management.load_models_gpu([patcher])
        return of_network(vae)


def of_network(vae: VAE) -> torch.Tensor:
    """The picture that the network itself gives."""
    return vae.first_stage_model.decode(torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(1)))


def vae_clone(vae: VAE, change: Callable[[Any], None]) -> torch.Tensor:
    patcher = vae.patcher.clone().clone()
    change(patcher)
    return called(patcher, vae)


def vae_copy(vae: VAE, change: Callable[[Any], None]) -> torch.Tensor:
    made = copy.copy(vae)
    made.patcher = vae.patcher.clone()
    change(made.patcher)
    return decoded(made)


def vae_deep_copy(vae: VAE, change: Callable[[Any], None]) -> torch.Tensor:
    made = copy.deepcopy(vae)
    change(made.patcher)
    return decoded(made)


def vae_in_place(vae: VAE, change: Callable[[Any], None]) -> torch.Tensor:
    change(vae.patcher)
    return decoded(vae)


def vae_gone(vae: VAE, change: Callable[[Any], None]) -> torch.Tensor:
    """The clone that was loaded is gone when the network is called, and its patches lie on it still."""
    vae_clone(vae, change)
    with sampling_node(), torch.inference_mode():
        return of_network(vae)


def nothing(_patcher: Any) -> None:
    """Leave a patcher as it is."""


PATCH, LAYER = partial(packs.patch, of="taesd_decoder"), partial(packs.put_layer, name="taesd_decoder.1")
INJECTION = partial(packs.put_in, name="taesd_decoder.1")
VAE_WAYS = (vae_clone, vae_copy, vae_deep_copy, vae_in_place, vae_gone)


@pytest.mark.fault("another pack patches a VAE's weights behind its engine node",
                   see="normal speed: *weights changed* or *changed by another node*")
@pytest.mark.parametrize(("way", "change"), [
    *((way, PATCH) for way in VAE_WAYS), *((way, LAYER) for way in (vae_clone, vae_in_place)),
    *((way, INJECTION) for way in (vae_copy, vae_in_place))])
def test_patches_on_a_vaes_weights_act_as_in_native(
    vae_files: Path, vae_library: Library, way: Callable, change: Callable
) -> None:
    def pictures(vae: VAE) -> list[torch.Tensor]:
        return [way(vae, nothing), way(vae, change), decoded(vae), decoded(vae)]

    plain, native = decoded(loaded_vae(vae_files)), pictures(loaded_vae(vae_files))
    assert error(native[1], native[0]) > 100 * LIMIT, "the patches act"
    vae = loaded_vae(vae_files)
    network = NativeNetwork.of_vae(vae, Role.VAE_DECODER, "taesd")
    choice = EngineChoice(vae_profile(network), backend="onnxruntime")
    handle = EngineHandle.look_up(network, choice, vae_library, "vae")
    found = pictures(backed := vae_with_engines(vae, {Role.VAE_DECODER: handle}))
    assert same(found, native), [error(*pair) for pair in zip(found, native, strict=True)]
    if way is not vae_in_place:
        assert error(native[2], plain) <= LIMIT
        assert (handle.stats.engine, handle.stats.native) == (1, 0), "it is on its engine again"
    else:
        assert set(handle.stats.reasons) <= {Reason.WEIGHTS_PATCHED, Reason.MODEL_PATCHED}
    assert error(decoded(native_vae(backed)), native[2]) <= LIMIT


@pytest.mark.slow
def test_a_compiled_vae_has_the_weights_of_the_patcher_that_is_loaded(vae_files: Path, tmp_path: Path) -> None:
    plain, vae = loaded_vae(vae_files), loaded_vae(vae_files)
    network, library = NativeNetwork.of_vae(vae, Role.VAE_DECODER, "taesd"), Library([tmp_path])
    built_vae(network, library, "torch")
    handle = EngineHandle.look_up(network, EngineChoice(vae_profile(network), backend="torch"), library, "vae")
    backed = vae_with_engines(vae, {Role.VAE_DECODER: handle})
    for way, change in ((vae_clone, PATCH), (vae_copy, LAYER), (vae_copy, nothing), (vae_in_place, PATCH)):
        assert error(way(backed, change), way(plain, change)) <= LIMIT
        assert handle.stats.engine + handle.stats.native == 1
