"""Weights hashes kept on disk: hashed once per file, and never another file's hash."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from builds import read_only, small_network
from fake_engine import PROFILE, SPECS
from hybrid_trt.comfy_model import hash_cache, weight_hash
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_library import EngineIdentity, Library, Manifest
from hybrid_trt.engine_library.engine import describe_files

UNDER_WINDOWS_RULES_TOO = True


def from_file(path: Path, seed: int = 1) -> NativeNetwork:
    """A network that ComfyUI's loader could have made from a file."""

    def load_diffusion_model(*_: object) -> None:
        raise AssertionError("nobody loads it again")

    network = small_network(seed)
    network.patcher.cached_patcher_init = (load_diffusion_model, (str(path), {}))
    return network


@pytest.fixture
def hashing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The hashes of weights that were really computed; the cache lies in the temporary folder."""
    computed: list[str] = []
    real = weight_hash._hash

    def counted(*arguments: object) -> str:
        computed.append(real(*arguments))
        return computed[-1]

    monkeypatch.setattr(weight_hash, "_hash", counted)
    hash_cache.use(tmp_path / "library")
    yield computed
    hash_cache.use(None)


def written(folder: Path, contents: bytes = b"1") -> Path:
    """A file whose time tells nothing."""
    file = folder / "model.safetensors"
    with file.open("r+b" if file.exists() else "wb") as opened:
        opened.write(contents)
    os.utime(file, ns=(10**18, 10**18))
    return file


def test_a_file_is_hashed_once_for_all_starts(tmp_path: Path, hashing: list[str]) -> None:
    file = written(tmp_path)
    first = from_file(file).weights_hash()
    assert from_file(file).weights_hash() == first
    assert hashing == [first], "the second start read it from disk"
    other = from_file(written(tmp_path, b"22"), seed=2).weights_hash()
    assert other != first
    assert hashing == [first, other], "the file has changed"


def lora_names(network: NativeNetwork) -> list[str]:
    return [name for name, _ in network.module.named_parameters() if name.endswith("to_k.weight")]


def merged(network: NativeNetwork) -> NativeNetwork:
    """As merging a LoRA does: no norm and no bias is another."""
    with torch.no_grad():
        network.module.get_parameter(lora_names(network)[0]).mul_(1.01)
    return network


def one_value_changed(network: NativeNetwork) -> NativeNetwork:
    """As an edit of a file would have it: nothing that a sample holds is another."""
    with torch.no_grad():
        network.module.get_parameter(lora_names(network)[0])[1, 1] += 1
    return network


OTHERS: dict[str, Callable[[Path], NativeNetwork]] = {
    "another checkpoint": lambda file: from_file(file, seed=2),
    "a merged LoRA": lambda file: merged(from_file(file)),
    "edited in one place": lambda file: one_value_changed(from_file(file)),
}


@pytest.mark.fault("a checkpoint's weights change, its size and time do not", see="normal speed: *no engine*")
@pytest.mark.parametrize("kind", OTHERS)
def test_a_file_of_the_same_size_and_time_with_other_weights_has_another_hash(
    tmp_path: Path, hashing: list[str], kind: str
) -> None:
    file = written(tmp_path)
    first = from_file(file).weights_hash()
    if kind != "edited in one place":
        wait_until_read()
        file.unlink()
    other = OTHERS[kind](written(tmp_path, b"2"))
    if kind == "edited in one place":
        assert weight_hash._sample(other.patcher, "") == weight_hash._sample(from_file(file).patcher, "")
    assert other.weights_hash() != first
    assert len(hashing) == 2


def wait_until_read() -> None:
    """Wait for the threads that read files beside everything else: Windows deletes no file that one has open."""
    for thread in threading.enumerate():
        if thread.name == "Hybrid TRT file digest":
            thread.join(10)


def test_an_edit_that_left_no_sign_is_found_at_the_second_use(
    tmp_path: Path, hashing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hash_cache, "state_of", lambda path: (1, 2, 3, 4))
    first = from_file(written(tmp_path))
    assert first.weights_hash() == first.weights_hash()
    digests_are_kept(tmp_path / "library")
    file = written(tmp_path, b"2")
    monkeypatch.setattr(hash_cache, "_digests", {})  # another process remembers nothing
    other = one_value_changed(from_file(file))
    assert other.weights_hash() == first.weights_hash(), "nobody has read the file yet"
    assert other.weights_hash() != first.weights_hash()
    assert one_value_changed(from_file(file)).weights_hash() == other.weights_hash()
    assert len(hashing) == 2


def digests_are_kept(folder: Path) -> None:
    """Wait until the threads that read files have told what they read."""
    for digest in list(hash_cache._digests.values()):
        digest.result()
    kept, until = folder / hash_cache.FILE_NAME, time.monotonic() + 60
    while '"file ' not in kept.read_text().replace("\\", ""):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_patched_or_otherwise_loaded_models_are_hashed_themselves(tmp_path: Path, hashing: list[str]) -> None:
    file = written(tmp_path)
    plain = from_file(file)
    plain.weights_hash()
    patched = plain.patcher.clone()
    name = plain.prefix + lora_names(plain)[0]
    patched.add_patches({name: ("diff", (patched.model.get_parameter(name) + 1,))})
    lora = NativeNetwork(patched, plain.module, plain.prefix, plain.dtype, "lora", plain.role)
    assert lora.weights_hash() != plain.weights_hash()
    half = from_file(file)
    half.module.half()
    half.weights_hash()
    unknown = from_file(file)
    unknown.patcher.cached_patcher_init = (from_file, (str(file), {"operations": object()}))
    unknown.weights_hash()
    small_network().weights_hash()
    assert len(hashing) == 5


def test_a_read_only_library_only_costs_the_hash(tmp_path: Path, hashing: list[str]) -> None:
    file = written(tmp_path)
    with read_only(tmp_path / "library"):
        assert from_file(file).weights_hash() == from_file(file).weights_hash()
    assert len(hashing) == 2


def test_no_engine_for_a_model_is_known_without_hashing_it(tmp_path: Path, hashing: list[str]) -> None:
    mine, other = small_network(1), small_network(2)
    library = Library([tmp_path])
    assert not library.may_have("sd15_unet", mine.fingerprint)
    identity = EngineIdentity("sd15_unet", "a" * 64, "float32", PROFILE, "onnxruntime", "1", "any")
    with library.building_folder() as work:
        (work / "model.onnx").write_bytes(b"\x08")
        files = describe_files(work, ["model.onnx"])
        library.publish(work, Manifest(identity, "unet", "mine", SPECS, SPECS, files, fingerprint=mine.fingerprint()))
    assert library.may_have("sd15_unet", mine.fingerprint)
    assert not library.may_have("sd15_unet", other.fingerprint)
    assert not library.may_have("sdxl_unet", mine.fingerprint)


def test_a_weight_that_only_lies_elsewhere_was_not_edited() -> None:
    """Dynamic VRAM puts some weights on the GPU. Another dtype of the same bytes stands for another device."""
    network = small_network(1)
    first = weight_hash.look_for_edits(network.patcher)
    for weight in list(network.module.parameters())[::3]:
        weight.data = weight.data.view(torch.int32)
        assert weight_hash.look_for_edits(network.patcher) == first
    weight.data.mul_(3)
    assert weight_hash.look_for_edits(network.patcher) == first + 1


def test_a_weight_that_comfyui_loads_in_the_dtype_of_its_model_was_not_edited() -> None:
    network = small_network(1)
    layer = next(layer for layer in network.module.modules() if "weight" in layer._parameters)
    layer.weight_comfy_model_dtype = torch.float16
    first = weight_hash.look_for_edits(network.patcher)
    layer.weight.data = layer.weight.data.half()
    assert weight_hash.look_for_edits(network.patcher) == first
    layer.weight.data.mul_(3)
    assert weight_hash.look_for_edits(network.patcher) == first + 1
