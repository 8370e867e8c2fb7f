"""The kernel for attention that a network is compiled with: the fastest by timing, on GPUs that we did not measure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from compiling import COMPILES
from hybrid_trt.architectures.shapes import Dim, TensorSpec
from hybrid_trt.backends import LiveTask
from hybrid_trt.backends.torch_inductor import attention, compiled
from hybrid_trt.backends.torch_inductor.compile_step import compile_network

ON_A_GPU = SimpleNamespace(device=torch.device("cuda", 0))
"""Stands for a tensor there, of which nothing else is asked."""


@pytest.mark.parametrize(
    ("usual", "milliseconds", "chosen"),
    [
        ("cudnn", {"cudnn": 9.0, "flash": 8.0, "efficient": 12.0}, "flash"),
        ("cudnn", {"cudnn": 9.0, "flash": 8.95, "efficient": 12.0}, "cudnn"),
        ("flash", {"cudnn": 20.0, "flash": 8.0, "efficient": 7.0}, "efficient"),
        ("cudnn", {"flash": 8.0, "efficient": 12.0}, "flash"),
        ("flash", {}, "flash"),
    ],
)
def test_the_fastest_is_taken_unless_the_usual_one_is_as_fast(
    usual: str, milliseconds: dict[str, float], chosen: str
) -> None:
    """Time by given milliseconds: what is not among them fails."""
    assert attention.fastest(usual, milliseconds.__getitem__) == (chosen, milliseconds)


def test_a_gpu_that_we_measured_and_a_cpu_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "fastest", lambda *_: pytest.fail("it was timed"))
    assert attention.choose(torch.nn.Identity(), [torch.zeros(1)]) == (None, {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    assert attention.choose(torch.nn.Identity(), [ON_A_GPU]) == ("cudnn", {})


@pytest.mark.parametrize("capability", [(7, 5), (8, 9), (12, 0)], ids=str)
def test_other_gpus_are(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"cudnn": 3.0, "flash": 2.0, "efficient": 4.0}
    monkeypatch.setattr(attention, "_milliseconds", lambda _function, _given, name: times[name])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    assert attention.choose(torch.nn.Identity(), [ON_A_GPU]) == ("flash", times)


class OneAttention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.nn.functional.scaled_dot_product_attention(x @ self.weight, x, x),)


@COMPILES
def test_each_size_is_compiled_with_what_was_chosen_for_it_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, of_rows = [], {4: ("flash", {"cudnn": 3.0, "flash": 2.0}), 6: ("cudnn", {})}

    @contextlib.contextmanager
    def best_attention(_device: torch.device, first: str | None = None) -> Iterator[None]:
        asked.append(first)
        yield

    monkeypatch.setattr(attention, "choose", lambda _function, given: of_rows[given[0].shape[2]])
    monkeypatch.setattr(compiled, "best_attention", best_attention)
    x, y = (TensorSpec(name, "float32", (Dim("B"), 1, Dim("H"), 8)) for name in "xy")
    sizes = [{"B": 2, "H": rows} for rows in of_rows]
    task = LiveTask((x,), (y,), sizes, "float32", torch.device("cpu"), tmp_path)
    made = compile_network(OneAttention(), task, lambda *_: None)
    assert asked == ["flash", "cudnn"]
    first, second = made["parity"]["cases"]
    assert (first["attention"], first["attention_ms"]) == of_rows[4]
    assert "attention" not in second, "nothing was measured"
