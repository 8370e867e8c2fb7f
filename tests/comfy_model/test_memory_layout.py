"""In which memory layout a network's tensors lie: the same when it is compiled and when it runs.

Channels_last is for GPUs; here the CPU is said to want it too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import networks
import pytest
import torch
from hybrid_trt.comfy_model import torch_kernels
from hybrid_trt.comfy_model.live_weights import LiveWeights
from hybrid_trt.comfy_model.torch_kernels import empty_laid_out, laid_out, lay_out_in_place, strides_of

SHAPES = [(2, 3, 5, 7), (1, 3, 5, 7), (4, 3, 1, 1), (1, 1, 1, 1), (2, 1, 5, 7), (0, 3, 5, 7)]


@pytest.fixture
def channels_last(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch_kernels, "_layout", lambda _device, dimensions: (
        torch.channels_last if dimensions == 4 else torch.contiguous_format))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_strides_are_those_of_a_new_tensor(shape: tuple[int, ...], layout: torch.memory_format) -> None:
    assert strides_of(shape, layout) == torch.empty(shape, memory_format=layout).stride()


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_laid_out_has_a_new_tensors_strides_and_its_own_values(
    shape: tuple[int, ...], channels_last: None
) -> None:
    batch = torch.randn(3, *shape)
    for given in (batch[0], batch.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)[0], batch.mT.mT[0]):
        ready = laid_out(given)
        assert ready.stride() == torch.empty(shape, memory_format=torch.channels_last).stride()
        assert torch.equal(ready, given)
    assert empty_laid_out(shape, torch.float16, torch.device("cpu")).stride() == ready.stride()


def test_a_kernel_of_one_pixel_is_not_copied(channels_last: None) -> None:
    weight = torch.randn(6, 4, 1, 1)
    assert weight.is_contiguous(memory_format=torch.channels_last), "so asking torch for that layout changes nothing"
    assert laid_out(weight).stride() == (4, 1, 4, 4)
    assert laid_out(weight).data_ptr() == weight.data_ptr()


@pytest.mark.parametrize("share", [True, False], ids=["ComfyUI's weights", "weights of our own"])
@pytest.mark.parametrize("kind", ["unet", "controlnet"])
def test_weights_lie_as_they_were_compiled(kind: str, share: bool, channels_last: None) -> None:
    """Else a convolution of one image gives another layout than the compiled code expects, and the call fails."""
    network = networks.random_network(kind, networks.TINY["sd15"])
    values = {name: parameter.data.clone() for name, parameter in network.module.named_parameters()}
    when_compiled = {name: laid_out(value).stride() for name, value in values.items()}
    network.patcher.patch_model(networks.CPU)
    weights = LiveWeights(network, torch.float32, share)
    weights.sync_from(network.patcher)
    live = dict(weights.module.named_parameters())
    shared = sum(live[name].data_ptr() == p.data_ptr() for name, p in network.module.named_parameters())
    assert shared == (len(live) if share else 0)
    assert {name: live[name].stride() for name in values} == when_compiled
    assert all(torch.equal(live[name], value) for name, value in values.items())
    assert any(value.shape[2:] == (1, 1) for value in values.values()), "by these alone layouts could be mistaken"


@pytest.mark.usefixtures("channels_last")
@pytest.mark.parametrize("inference", [False, True])
def test_a_weight_is_laid_out_in_its_own_memory_and_whoever_holds_it_sees_its_values(inference: bool) -> None:
    with torch.inference_mode(inference):
        weight = torch.nn.Parameter(torch.randn(4, 6, 3, 3), requires_grad=False)
        values, place = weight.clone(), weight.data_ptr()
    ready = lay_out_in_place(weight)
    assert ready.data_ptr() == weight.data_ptr() == place
    assert ready.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(ready, values)
    assert torch.equal(weight, values)
    assert lay_out_in_place(weight).data_ptr() == place, "nothing is left to do"


@pytest.mark.usefixtures("channels_last")
@pytest.mark.parametrize("others", [lambda w: w.view(-1), lambda w: w.data, lambda w: w[0], lambda w: w.detach()])
def test_a_weight_whose_memory_another_tensor_views_is_left_as_it_is(others: Callable) -> None:
    weight = torch.nn.Parameter(torch.randn(4, 6, 3, 3), requires_grad=False)
    view, values = others(weight), weight.clone()
    seen = view.clone()
    ready = lay_out_in_place(weight)
    assert ready.data_ptr() != weight.data_ptr()
    assert torch.equal(ready, values)
    assert torch.equal(weight, values)
    assert torch.equal(view, seen)


@pytest.mark.usefixtures("channels_last")
def test_a_weight_that_is_part_of_a_larger_tensor_leaves_the_rest_alone() -> None:
    whole = torch.randn(8, 6, 3, 3)
    values, weight = whole.clone(), torch.nn.Parameter(whole[:4], requires_grad=False)
    assert torch.equal(lay_out_in_place(weight), values[:4])
    assert torch.equal(whole, values)
    del whole
    assert torch.equal(lay_out_in_place(weight), values[:4])
    assert torch.equal(weight, values[:4])
