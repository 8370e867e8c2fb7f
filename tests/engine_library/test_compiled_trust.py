"""Compiled files are programs: only those of this machine, and of its GPU and torch, are opened."""

from __future__ import annotations

import pickle
import re
import shutil
from pathlib import Path

import pytest
from compiling import COMPILES
from hybrid_trt.architectures import architecture_of
from hybrid_trt.backends.torch_inductor.compiled import file_name
from hybrid_trt.comfy_model.hash_cache import source_changed
from hybrid_trt.engine_builder.build import build_engine
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Engine, EngineIdentity, Library, Manifest, Reason, trust
from hybrid_trt.engine_library.engine import describe_files
from hybrid_trt.engine_library.inventory import entries
from hybrid_trt.engine_library.manifest import RECORD_NAME
from hybrid_trt.sampling.engine_handle import EngineChoice, EngineHandle
from hybrid_trt.sampling.engine_status import lacks_engine, status
from live_sessions import PROFILE, SIZES, TORCH, error, given_for, key_folder, opened
from small_networks import CPU, network

__all__ = ["key_folder"]  # a fixture: pytest finds it by name


class Trap:
    """Unpickling it leaves a mark."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple:
        return Path.touch, (self.mark,)


FOREIGN = '{"verdict": "built", "why": "", "parity": {}, "gpu": "", "signature": "0000"}'


@pytest.mark.fault("a compiled file was not made here", see="normal speed: *stale engine*; it is never opened")
def test_a_file_that_was_not_made_here_is_never_opened(tmp_path: Path, key_folder: Path) -> None:
    net = network("unet", "unlike_levels")
    library = Library([tmp_path / "library"])
    sizes = {name: size for name, size in SIZES.items() if name != "HB"}
    name = file_name(sizes)
    identity = EngineIdentity("sd15_unet", TORCH.weights(net), "float32", PROFILE.only("BHWT"), "torch",
                              TORCH.version(), TORCH.target(CPU))
    specs = architecture_of(net.module)
    with library.building_folder() as folder:
        (folder / name).write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
        manifest = Manifest(identity, "unet", "foreign", tuple(specs.inputs(net.module, "float32")),
                            tuple(specs.outputs(net.module, "float32")),
                            describe_files(folder, [name]))
        engine: Engine = library.publish(folder, manifest)
    (engine.folder / RECORD_NAME).write_text(FOREIGN)
    (found,) = entries(library, lambda _: None, source_changed)
    assert (found.state, "not built on this machine" in found.reason) == ("stale", True)
    session = opened(net)
    session.use([engine])
    given = given_for(net, 9)
    assert error(session, net, given) <= 1e-5, "it runs uncompiled"
    assert "not built on this machine" in session.refusal
    assert not (tmp_path / "sprung").exists()


@COMPILES
def test_an_engine_whose_secret_is_lost_is_told_on_the_node_and_built_anew(tmp_path: Path, key_folder: Path) -> None:
    net, library, steps = network("unet", "unlike_levels"), Library([tmp_path / "library"]), []

    def compiler(task: dict, *_: object) -> dict:
        steps.append(task["step"])
        names = [file_name(sizes) for sizes in task["compiled"]]
        for name in names:
            (Path(task["folder"]) / name).write_bytes(b"what Inductor made")
        return {"files": names, "parity": {"rel_err": 0.0}, "seconds": {}}

    def build() -> Engine:
        return build_engine(BuildOrder(net, "float32", PROFILE, TORCH), library, lambda *_: None, run=compiler)

    engine = build()
    assert build() == engine
    handle = EngineHandle.look_up(net, EngineChoice(PROFILE, backend="torch"), library, "node")
    assert handle.session.engines == [engine]
    assert "not used" not in status(handle)

    shutil.rmtree(key_folder)
    handle.refresh()
    assert handle.session.engines == []
    assert re.search(rf"not used.*not built on this machine.*{trust.FOLDER_VARIABLE}", status(handle))
    assert lacks_engine(handle)
    build()
    assert steps == ["compile", "compile"]
    handle.refresh()
    assert "not used" not in status(handle)


def test_an_engine_of_another_gpu_or_torch_is_refused() -> None:
    identity = EngineIdentity("sd15_unet", "layout:x", "float32", PROFILE, "torch", TORCH.version(), "cpu")
    manifest = Manifest(identity, "unet", "", (), (), {})
    assert TORCH.cannot_use(manifest, CPU) is None
    other = Manifest(EngineIdentity(**{**identity.__dict__, "device": "NVIDIA H200, 9.0"}), "unet", "", (), (), {})
    assert TORCH.cannot_use(other, CPU).reason is Reason.WRONG_GPU
    old = Manifest(EngineIdentity(**{**identity.__dict__, "backend_version": "2.0"}), "unet", "", (), (), {})
    assert TORCH.cannot_use(old, CPU).reason is Reason.STALE_ENGINE
