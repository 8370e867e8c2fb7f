"""TRT Report: what ran on engines and what ran native, and why."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from comfy_api.latest import io
from comfy_execution.graph import DynamicPrompt
from comfy_execution.progress import get_progress_state
from server import PromptServer

from ..comfy_model.comfyui_internals import Feature, works
from ..node_names import REPORT
from ..page_api.workflow_graph import drawn_id, drawn_upstream, nodes_of, upstream
from ..sampling.call_stats import CallStats, prompt_stats, want_times
from ..sampling.engine_handle import EngineHandle
from ..sampling.engine_status import status
from ..sampling.report import as_drawn, plot, report_text, verdict
from ..sampling.run_context import executing
from ..streaming.run import FrameTimes, prompt_times
from . import schemas
from .compare import in_one_line

log = logging.getLogger(__name__)

PLOT = 2
"""The number of the plot's output."""


class TRTReport(io.ComfyNode):
    """Any value after the sampler -> the same, and the counts of the sampling before it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schemas.report()

    @classmethod
    def fingerprint_inputs(cls, **_: Any) -> bool:
        """Re-run when the plot is newly connected: the kept result of the run before has none."""
        return _wants_plot(cls.hidden.unique_id)

    @classmethod
    def execute(cls, after: Any, time_calls: bool = True, comparison: str = "") -> io.NodeOutput:
        rows, copies = _rows_before(cls.hidden.dynprompt, cls.hidden.unique_id)
        streams = prompt_times(executing().prompt_id, set(upstream(cls.hidden.dynprompt, cls.hidden.unique_id)))
        engine = None if rows else _engine(after)
        text = report_text(rows, [times.sentence() for times in streams]) if engine is None else status(engine)
        if copies:
            text = f"{text}\nCounted over {copies} samplings that a loop or another node started."
        if comparison:
            text = f"{text}\nTRT Compare: {in_one_line(comparison)}"
        log.info("Hybrid TRT: %s", text.replace("\n", ": "))
        ui = {"text": [text], "report": [report_json(rows, streams)]}
        if rows:
            ui["native"] = [any(row.native for row in rows)]
        drawn = plot(rows) if _wants_plot(cls.hidden.unique_id) else None  # drawing takes as long as a step
        return io.NodeOutput(after, text, drawn, ui=ui)


def _rows_before(prompt: DynamicPrompt, node_id: str) -> tuple[list[CallStats], int]:
    """Return the stats of all sampling before a report, and the number of sampling nodes that other nodes made.

    Nodes of nodes are no part of the user's graph. Inside a loop a report finds its rows by links; behind a loop by
    the nodes that were copied.
    """
    original, everything = prompt.get_original_prompt(), prompt_stats(executing().prompt_id)
    linked = set(upstream(prompt, node_id))
    rows = [row for row in everything if row.sampler_node in linked]
    if node_id in original or not rows:
        drawn = set(drawn_upstream(prompt, node_id))
        copies = {row.sampler_node for row in everything if row.sampler_node not in original}
        linked |= {copy for copy in copies if drawn_id(prompt, copy) in drawn}
        rows = [row for row in everything if row.sampler_node in linked]
    made = {row.sampler_node for row in rows} - original.keys()
    return as_drawn(rows, partial(drawn_id, prompt)), len(made)


def report_json(rows: list[CallStats], streams: Sequence[FrameTimes] = ()) -> dict:
    """Return the counts as data: the verdict, totals over the UNet's rows, all ControlNets and all streams."""
    unets = [row.to_json() for row in rows if row.kind == "unet"]
    summary = verdict(rows)
    return {
        "networks": summary.networks,
        "on_engines": summary.on_engines,
        "missing": summary.missing,
        "unet": {
            "engine": sum(row["engine"] for row in unets),
            "native": sum(row["native"] for row in unets),
            "reasons": dict(sum((Counter(row["reasons"]) for row in unets), Counter())),
        },
        "controlnets": [row.to_json() for row in rows if row.kind == "controlnet"],
        "rows": [row.to_json() for row in rows],
        "streams": [times.to_json() for times in streams],
    }


def _wants_times(prompt_id: str) -> bool:
    """Tell whether a prompt that is being executed has a report that times calls."""
    nodes = _running().get(prompt_id, {}).values()
    return any(n["class_type"] == REPORT and n["inputs"].get("time_calls", True) is not False for n in nodes)


def _wants_plot(node_id: str) -> bool:
    """Tell whether the plot of a report in the running prompt is connected, or may be."""
    node_id = drawn_id(get_progress_state().dynprompt, node_id)  # in a loop it is a copy
    nodes = next((nodes for nodes in _running().values() if node_id in nodes), None)
    if nodes is None or nodes[node_id]["class_type"] != REPORT:  # a node that another node made
        return True
    return any([node_id, PLOT] == value for node in nodes.values() for value in node["inputs"].values())


def _running() -> dict[str, dict[str, dict]]:
    """Return the prompts that are being executed, by id: node id -> node, without malformed ones."""
    server = getattr(PromptServer, "instance", None)  # a process without a server has none
    if server is None or not works(Feature.QUEUE):
        return {}
    running, _ = server.prompt_queue.get_current_queue_volatile()
    return {item[1]: nodes_of(item[2]) for item in running}


want_times(_wants_times)


def _engine(value: Any) -> EngineHandle | None:
    """Return the engine from an engine node, if the report is right behind that node."""
    if isinstance(value, EngineHandle):
        return value
    return getattr(getattr(value, "control_model", None), "handle", None)
