"""Choices while a network compiles: Inductor's choices that differ meanwhile, and the fastest attention by timing."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import compiling
import pytest
import sympy
import torch
import torch._inductor.config
from hybrid_trt.architectures.blocks import in_blocks
from hybrid_trt.architectures.shapes import Dim, Range, TensorSpec
from hybrid_trt.backends import LiveTask
from hybrid_trt.backends.torch_inductor import attention, compile_kinds
from hybrid_trt.backends.torch_inductor.compile_blocks import compile_blocks
from hybrid_trt.backends.torch_inductor.compiled import can_compile, lifted
from hybrid_trt.backends.torch_inductor.opened_files import open_one
from torch._inductor.dependencies import MemoryDep
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.virtualized import V

if not can_compile():
    pytest.skip("this torch is too old to compile to a file", allow_module_level=True)

from hybrid_trt.backends.torch_inductor import row_sums
from hybrid_trt.backends.torch_inductor.row_sums import our_rows


def reads_once(
    row: int, hint: ReductionHint = ReductionHint.INNER, sums: int = 64, what: tuple[str, ...] = ("sum",),
    apart: int = 320,
) -> bool:  # fmt: skip
    """Tell if that many sums (or another reduction) of rows of so many elements keep these in registers.

    Args:
        apart: how far the elements of a row lie apart.
    """
    which, element = sympy.symbols("d0 d1", integer=True)
    read = MemoryDep("x", which + apart * element, (which, element), (sympy.Integer(sums), sympy.Integer(row)))
    nodes = [SimpleNamespace(node=SimpleNamespace(get_reduction_type=lambda kind=kind: kind),
                             read_writes=SimpleNamespace(reads=[read])) for kind in what]  # fmt: skip
    features = SimpleNamespace(
        get_reduction_hint=lambda: hint,
        reduction_numel=sympy.Integer(row),
        numel=sympy.Integer(sums),
        reduction_nodes=lambda: nodes,
        strict_sum_rblock=lambda: None,  # newer torches ask whether sums keep an order that was asked for
    )
    with V.set_graph_handler(SimpleNamespace(sizevars=SizeVarAllocator())):
        return V.choices.should_use_persistent_reduction(features, False)


@pytest.mark.parametrize(
    ("row", "ours", "inductors"), [(1024, True, True), (1280, True, False), (3840, True, False), (5120, False, False)]
)
def test_rows_of_a_layer_norm_are_read_once_while_we_compile_and_as_inductor_likes_afterwards(
    row: int, ours: bool, inductors: bool
) -> None:
    assert reads_once(row) is inductors
    with our_rows():
        assert reads_once(row) is ours
    assert reads_once(row) is inductors


def test_a_short_row_is_read_once_whatever_else_is_done_with_it_and_a_line_of_pixels_is_not() -> None:
    """As an attention's heads are, of which queries and keys are normed and turned."""
    assert not reads_once(128, ReductionHint.DEFAULT, 126720, apart=1)
    with our_rows():
        assert reads_once(128, ReductionHint.DEFAULT, 126720, apart=1)
        assert not reads_once(128, ReductionHint.DEFAULT, 126720, apart=320)
        assert not reads_once(512, ReductionHint.DEFAULT, 126720, apart=1)


def test_sums_across_rows_stay_inductors() -> None:
    with our_rows():
        assert not reads_once(1280, ReductionHint.OUTER)


@pytest.mark.parametrize(
    ("line", "sums", "what", "ours"),
    [(64, 2 * 64 * 320, ("sum", "sum"), False), (32, 2 * 32 * 640, ("sum", "sum"), False),
     (8, 2 * 8 * 1280, ("sum",), True), (64, 64, ("sum",), True), (64, 2 * 64 * 320, ("sum", "welford_reduce"), True)],
    ids=["64 pixels", "32 pixels", "8 pixels", "few sums", "variances"],
)  # fmt: skip
def test_lines_of_many_channels_are_added_up_step_by_step(line: int, sums: int, what: tuple, ours: bool) -> None:
    assert reads_once(line, ReductionHint.DEFAULT, sums, what)
    with our_rows():
        assert reads_once(line, ReductionHint.DEFAULT, sums, what) is ours


def test_in_a_thread_that_has_decided_nothing_yet_our_choice_ends_too() -> None:
    def compiled_then_asked() -> bool:
        with our_rows():
            pass
        return reads_once(1280)

    with ThreadPoolExecutor(1) as new_thread:
        assert new_thread.submit(threading.get_ident).result() != threading.get_ident()
        assert new_thread.submit(compiled_then_asked).result() is False


def test_what_was_compiled_with_other_choices_is_not_found_in_inductors_caches() -> None:
    before = torch._inductor.config.save_config_portable()
    with our_rows():
        assert torch._inductor.config.save_config_portable() != before
    assert torch._inductor.config.save_config_portable() == before


def test_our_choices_have_the_name_without_which_newer_torches_write_no_file() -> None:
    with our_rows():
        made = torch._inductor.config.inductor_choices_class()
    assert re.fullmatch("[0-9a-f]{64}", made.uuid())


class Joins(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(1280)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.norm(torch.cat([x, x], 1)),)


def test_a_torch_that_has_no_such_choices_compiles_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for missing in (row_sums.__name__, "torch._inductor.inductor_prims"):
        monkeypatch.setitem(sys.modules, missing, None)
    network, x = Joins().requires_grad_(False), torch.randn(1, 2, 3, 1280)
    made = open_one(compiling.compiled(network, [x]).contents)
    with torch.inference_mode():
        assert torch.allclose(made(*lifted(network).values(), x)[0], network(x)[0], atol=1e-5)
    assert sum("networks run slower" in message for message in caplog.messages) == 2


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
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(features, features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x @ self.weight, x, x)


class InTurn(torch.nn.Module):
    """A wide block, then a narrow one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = in_blocks([OneAttention(8), OneAttention(4)])
        self.layers = torch.nn.ModuleList(self.blocks)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.blocks[1](self.blocks[0](x)[..., :4]),)


def test_each_kind_is_compiled_with_what_was_chosen_for_it_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, of_width = [], {8: ("flash", {"cudnn": 3.0, "flash": 2.0}), 4: ("cudnn", {})}

    @contextlib.contextmanager
    def best_attention(_device: torch.device, first: str | None = None) -> Iterator[None]:
        asked.append(first)
        yield

    monkeypatch.setattr(attention, "is_timed", lambda _device: True)
    monkeypatch.setattr(attention, "choose", lambda _function, given: of_width[given[0].shape[3]])
    monkeypatch.setattr(compile_kinds, "best_attention", best_attention)
    x, y = (TensorSpec(name, "float32", (Dim("B"), 1, 6, width)) for name, width in (("x", 8), ("y", 4)))
    task = LiveTask((x,), (y,), "float32", torch.device("cpu"), tmp_path, {"B": Range(1, 2, 9)})
    made = compile_blocks(InTurn().to("meta"), task, lambda *_: None)
    assert asked == ["flash", "cudnn"]
    cases = made["parity"]["cases"]
    assert {case["kind"]: (case.get("attention"), case.get("attention_ms")) for case in cases} == {
        0: of_width[8], 1: (None, None)}, "of the other nothing was measured"  # fmt: skip
