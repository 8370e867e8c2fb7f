"""A ControlNet's hint is encoded outside its engine, once per image, exactly as native does it."""

from __future__ import annotations

import pytest
import torch
from hybrid_trt.architectures.shapes import sample_inputs
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_library import Reason, Unavailable
from small_networks import HintEncoder, network, with_lora


def hint_of(net: NativeNetwork, seed: int = 1, **sizes: int) -> torch.Tensor:
    specs = [spec for spec in net.architecture().inputs(net.module, "float32") if spec.name == "hint"]
    return sample_inputs(specs, {"HB": 1, "H": 9, "W": 12} | sizes, seed)["hint"]


@pytest.mark.parametrize("sizes", [{}, {"H": 8, "W": 8}, {"HB": 2}])
def test_the_encoded_hint_is_natives_bit_for_bit(sizes: dict[str, int]) -> None:
    net = network("controlnet", "unlike_levels")
    hint = hint_of(net, **sizes)
    with torch.inference_mode():
        assert torch.equal(HintEncoder(net)(hint), net.module.input_hint_block(hint, None, None))


def test_the_encoder_holds_its_own_layers_only_and_takes_nothing_from_the_native_module() -> None:
    net = network("controlnet", "unlike_levels")
    encoder = HintEncoder(net)
    with torch.inference_mode():
        encoder(hint_of(net))
    own = sum(p.numel() * p.element_size() for p in net.module.input_hint_block.parameters())
    assert encoder.live._weights.bytes == own
    assert sum(1 for name, _ in net.module.named_parameters() if name.startswith("input_hint_block.")) > 0
    net.patcher.model.to("meta")  # ComfyUI may have the native weights anywhere by now
    hint = hint_of(net, 2)
    with torch.inference_mode():
        assert encoder(hint).isfinite().all()


def test_a_hint_of_another_form_is_refused_with_a_reason() -> None:
    encoder = HintEncoder(network("controlnet", "unlike_levels"))
    for shape in ((1, 4, 64, 64), (1, 3, 64)):
        with pytest.raises(Unavailable) as refused:
            encoder(torch.zeros(shape))
        assert refused.value.fallback.reason is Reason.UNSUPPORTED_INPUT


def test_a_lora_of_other_layers_changes_nothing() -> None:
    plain = network("controlnet", "unlike_levels")
    hint = hint_of(plain)
    with torch.inference_mode():
        assert torch.equal(HintEncoder(plain)(hint), HintEncoder(with_lora(plain))(hint))
