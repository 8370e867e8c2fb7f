"""The report's picture and the ledger behind it."""

from __future__ import annotations

import json

import pack
import pytest

pack.import_comfy()

from hybrid_trt.engine_library import Fallback, Reason  # noqa: E402
from hybrid_trt.engine_runtime import ledger  # noqa: E402
from hybrid_trt.engine_runtime.ledger import Tally, last_run, open_tally  # noqa: E402
from hybrid_trt.engine_runtime.report_plot import ENGINE_COLOUR, LABELS, MARGIN, NATIVE_COLOUR, ROW, WIDTH, plot  # noqa: E402


def tally(calls: str) -> Tally:
    row = Tally("unet", "a.safetensors", "1", "2")
    for call in calls:
        if call == "e":
            row.count_engine("onnxruntime")
        else:
            row.count_native(Fallback(Reason.NO_ENGINE))
    return row


def colours(calls: str, row: int = 0, rows: int = 1) -> list[str]:
    """The colour in the middle of each call's cell."""
    image = plot([tally(calls)] * rows)[0]
    step = (WIDTH - LABELS - MARGIN) / len(calls)
    y = MARGIN + ROW * (row + 1) + 18
    found = [image[y, int(LABELS + (i + 0.4) * step)] for i in range(len(calls))]
    names = {ENGINE_COLOUR: "e", NATIVE_COLOUR: "n"}
    return [names.get("#" + "".join(f"{round(float(c) * 255):02x}" for c in pixel), "?") for pixel in found]


@pytest.mark.parametrize("calls", ["e", "n", "eenne", "n" * 40 + "e" * 60])
def test_the_plot_shows_every_call_in_its_order(calls: str) -> None:
    assert colours(calls) == list(calls)
    assert colours(calls, row=2, rows=3) == list(calls)


def test_a_plot_of_nothing_and_of_very_many_calls_is_an_image() -> None:
    assert plot([]).shape[-1] == 3
    image = plot([tally("e" * 5000)])
    assert image.shape[2] == WIDTH
    assert 0 <= float(image.min()) < float(image.max()) <= 1


def test_calls_are_json() -> None:
    data = json.loads(json.dumps(tally("een").to_json()))
    assert (data["calls"], data["engine"], data["native"]) == ("een", 2, 1)


def test_the_last_run_of_a_node_is_the_latest_prompt_that_called_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Context:
        node_id = "5"

        def __init__(self, prompt_id: str):
            self.prompt_id = prompt_id

    monkeypatch.setattr(ledger, "_prompts", type(ledger._prompts)())
    for prompt, key in (("p1", "a"), ("p2", "a"), ("p3", "b")):
        monkeypatch.setattr(ledger, "executing", lambda prompt=prompt: Context(prompt))
        open_tally("unet", "m", "1", key)
    assert [found[0] if (found := last_run(key)) else None for key in ("a", "b", "c")] == ["p2", "p3", None]
