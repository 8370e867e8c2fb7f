"""Quantised layers on a GPU, where ComfyUI multiplies them as they are, and under dynamic VRAM.

    pytest -m gpu tests/backends/test_quantised_gpu.py

Without an NVIDIA GPU each test is skipped. What holds on a CPU too is in ``test_quantised_engines.py``.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import networks
import pytest
import torch
from any_weights import lora
from comfy import model_management
from hybrid_trt.architectures.quantised_linear import multiplies_in_fp8
from hybrid_trt.architectures.shapes import sample_inputs
from hybrid_trt.backends import backends
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.comfy_model.live_weights import LiveWeights
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_builder.build import build_engine
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Library
from hybrid_trt.engine_library.engine import relative_error
from quantised import FAST, FORMATS, made
from small_networks import native_call

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU")]

GPU = torch.device("cuda", 0)
HALF = torch.bfloat16
LAYOUT = "inpainting_channels"
SIZES = {"B": 2, "H": 64, "W": 64, "T": 77}
ON_HOPPER = frozenset({"nvfp4", "mxfp8"})
"""Formats that ComfyUI dequantises on such a GPU."""
THERE = [name for name in FORMATS if name != "fp8 e5m2"] + [FAST]
"""Formats that ComfyUI itself can run: torch multiplies no two matrices in e5m2."""


def on_gpu(name: str) -> NativeNetwork:
    torch.zeros(1, device=GPU)  # ComfyUI reads torch's statistics, which are empty before
    net = made("unet", name, LAYOUT, HALF, ON_HOPPER)
    net.patcher.load_device = GPU
    return NativeNetwork(net.patcher, net.module, net.prefix, HALF, name, net.role)


def given_for(net: NativeNetwork) -> dict[str, torch.Tensor]:
    specs = net.architecture().inputs(net.module, "bfloat16")
    return {name: tensor.to(GPU) for name, tensor in sample_inputs(specs, SIZES, seed=3).items()}


@pytest.mark.parametrize("name", THERE)
def test_each_layer_gives_native_s_result_to_the_bit(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    net = on_gpu(name)
    model_management.load_models_gpu([net.patcher])
    weights = LiveWeights(net, HALF, share=False)
    weights.sync_from(net.patcher)
    layers = [path for path, layer in net.module.named_modules()
              if hasattr(layer, "quant_format") or multiplies_in_fp8(layer)]  # fmt: skip
    assert len(layers) > 20
    for path in layers:
        layer = net.module.get_submodule(path)
        given = torch.randn(2, 32, layer.in_features, dtype=HALF, device=GPU)
        with torch.inference_mode():
            assert torch.equal(weights.module.get_submodule(path)(given), layer(given)), path
    if name == FAST:
        assert not any(words in caplog.text for words in ("during fp8 op", "falling back")), "its kernel ran"


@pytest.mark.parametrize("name", ["fp8", "fp8 with input scales", "int8", "int8 convrot", FAST])
def test_a_compiled_engine_follows_loras_and_is_as_near_to_float32_as_native(name: str, tmp_path: Path) -> None:
    net = on_gpu(name)
    order = BuildOrder(net, "bfloat16", networks.PROFILE, backends()["torch"])
    engine = build_engine(order, Library([tmp_path]), lambda *_: None)
    parity = engine.manifest.parity
    assert parity["rel_err"] <= 1.2 * parity["native_rel_err"]
    session = LiveSession(net, backends()["torch"], "bfloat16")
    session.use([engine])
    given = given_for(net)
    patched = net.patcher.clone()
    assert patched.add_patches(lora(net, 5), 0.8)
    for patcher in (net.patcher, patched, net.patcher):
        model_management.load_models_gpu([patcher], force_full_load=True)
        session.begin_run(patcher)
        with torch.inference_mode():
            native = native_call(net, given)
            for _ in range(3):
                found = list(session.run(given).values())
        assert max(map(relative_error, found, native)) <= 3 * parity["native_rel_err"]
        assert session.uncovered is None
        assert session.graphs.plain is None, "it is captured"
        model_management.unload_all_models()


def test_under_dynamic_vram_patched_layers_give_native_s_result_and_plain_fp8_weights_one_of_native_s_own() -> None:
    """In a process of its own: ComfyUI starts dynamic VRAM before all else."""
    script = Path(__file__).parents[1] / "support" / "dynamic_vram_on_gpu.py"
    ended = subprocess.run([sys.executable, "-P", str(script)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    names = ["fp8", "int8 rows", FAST, "plain fp8"]
    told = [line for line in ended.stdout.splitlines() if line.partition(":")[0] in names]
    assert [line.partition(":")[0] for line in told] == names, ended.stdout
    print(told[-1])
