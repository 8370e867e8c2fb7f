"""ComfyUI's TorchCompileModel around a patched model: engines serve as without it, and native is compiled as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comfy.sd
import tiny_models
import torch
from comfy_api.torch_helpers import set_torch_compile_wrapper
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_library import Library
from hybrid_trt.sampling.engine_handle import EngineChoice, EngineHandle
from hybrid_trt.sampling.model_wrapper import patch_model
from profiles import profile_of

from sampling import STEPS, error, sample

NAME = "tiny_sd15_flat_unet"


def test_without_an_engine_native_is_compiled_as_the_node_asks(environment: Any, tmp_path: Path) -> None:
    file = tiny_models.make(environment.base / "models", [NAME])[NAME]
    native = comfy.sd.load_diffusion_model(str(file))
    convolutions = []

    def backend(graph: torch.fx.GraphModule, _inputs: list) -> Any:
        convolutions.extend(n for n in graph.graph.nodes if "conv2d" in str(n.target))
        return graph.forward

    network = NativeNetwork.of_model(native, NAME)
    handle = EngineHandle(network, EngineChoice(profile_of(64, 64, 256, 2, 77)), Library([tmp_path]), "engine")
    patched = patch_model(native, handle)
    reference = sample(native)
    assert torch.equal(sample(patched), reference)
    assert convolutions == []
    set_torch_compile_wrapper(patched, backend=backend)
    latent = sample(patched)
    assert error(latent, reference) < 1e-5
    assert handle.stats.native == 2 * STEPS
    traced = len(convolutions)
    assert traced > 5
    assert torch.equal(sample(patched), latent)
    assert len(convolutions) == traced, "it was compiled again for the next run"
