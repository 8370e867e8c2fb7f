"""Properties that hold for whatever is sent or written: answers are strict JSON and no error of ours, files stay.

Each is tried with a few drawn examples in CI, always the same, and with thousands in the slow profile, which
takes about five minutes: ``pytest -m slow tests/page_api/test_properties.py``. A failure is shown as the smallest
example that has it.
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import http.client
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import slow
from comfy_process import ComfyProcess
from drawn_workflows import TYPES, drawn, wires
from fake_engine import publish
from hybrid_trt.architectures import architectures, profile_words
from hybrid_trt.comfy_model.hash_cache import source_changed
from hybrid_trt.engine_library import Engine, Library, Manifest, trust
from hybrid_trt.engine_library.inventory import BROKEN, entries, verify
from hybrid_trt.engine_library.manifest import ManifestError, read_profile
from hybrid_trt.page_api.node_records import FILE_NAME as NOTES
from hybrid_trt.page_api.node_records import read_records, write_records
from hybrid_trt.page_api.node_states import engine_json
from hybrid_trt.saved_workflows.graph import WorkflowError
from hybrid_trt.saved_workflows.to_prompt import change_prompt, is_prompt, to_prompt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from json_places import changed, places, with_true_key
from our_routes import OURS, answered

log = logging.getLogger(__name__)

Holds = Callable[..., None]

ROUTES = ("/nodes", "/accelerate", "/settings", "/builds/clear", "/builds/x/cancel", "/engines/x/verify")


class Client:
    """Client of the routes; counts what it sends, and checks each answer."""

    def __init__(self, comfy: ComfyProcess) -> None:
        self._comfy, self.sent, self._hung = comfy, 0, ""

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, Any]:
        """Return the status and the JSON of an answer; what ComfyUI itself refuses is text."""
        assert not self._hung, self._hung  # else each smaller example would be waited for too
        self.sent += 1
        asked = f"{method} {path} {headers} {body!r:.3000}"
        try:
            status, kind, text = answered(self._comfy, method, path, body, OURS | headers)
        except TimeoutError:
            self._hung = f"no answer in time to {asked}"
            raise AssertionError(self._hung) from None
        except (http.client.HTTPException, OSError):  # aiohttp may cut off a body that is packed otherwise than it says
            assert "Content-Encoding" in headers, f"no answer to {asked}"
            return 400, None
        assert status < 500, f"{status} for {asked}: {text[:1000]!r}"
        if not kind.startswith("application/json"):
            assert status in (400, 403, 404, 405), text
            return status, None
        data = strict(text)
        assert status == 200 or data["error"].endswith("."), data
        return status, data

    def post(self, path: str, data: Any) -> tuple[int, Any]:
        """Post JSON."""
        return self.ask("POST", path, json.dumps(data).encode(), **{"Content-Type": "application/json"})


def strict(text: bytes) -> Any:
    """Read JSON as other languages do: no NaN, no Infinity, no number that is one there."""
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    data = json.loads(text.decode("utf-8"), parse_constant=refuse)
    json.dumps(data, allow_nan=False)
    return data


@pytest.fixture
def client(comfy: ComfyProcess) -> Iterator[Client]:
    """A client, for as long as nothing but the library's notes changes on the server's disk."""
    library = comfy.base / "models" / "trt_engines"
    publish(library)
    before, hidden = files(comfy.base), hidden_in(library)
    found = Client(comfy)
    yield found
    log.info("%s requests were sent", found.sent)
    assert files(comfy.base) == before
    assert hidden_in(library) <= {*hidden, ".settings.json", NOTES, ".weights_hashes.json", ".lock"}
    (library / ".settings.json").unlink(missing_ok=True)
    for engine in library.glob("[!.]*"):
        if engine.is_dir():
            Library.remove(engine)


def hidden_in(library: Path) -> set[str]:
    return {path.name for path in library.iterdir() if path.name.startswith(".")}


def files(base: Path) -> dict[str, tuple[int, int]]:
    """All files that a server could change, with their sizes and times, but its log and the library's notes."""
    found = {}
    for folder in ("models", "input", "output", "user", "custom_nodes"):
        for path in (base / folder).rglob("*"):
            if path.is_file() and not path.name.startswith(".") and "__pycache__" not in path.parts:
                stat = path.stat()
                found[str(path)] = stat.st_size, stat.st_mtime_ns
    return {path: stat for path, stat in found.items() if not path.endswith((".log", "comfy.settings.json"))}


@pytest.fixture(params=slow.cases({"few": 15, "many": 1200}, slow=["many"]))
def holds(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Tries a property with examples: the same ones in each run of CI, others in each long run."""

    def tried(check: Callable[..., None], times: int = 1, **drawn_from: st.SearchStrategy) -> None:
        chosen = settings(max_examples=times * request.param, derandomize=request.param < 100, deadline=None,
                          database=None, suppress_health_check=list(HealthCheck))  # fmt: skip
        chosen(given(**drawn_from)(check))()

    return tried


# What is drawn

ODD = ["", "\ud800", "a\0b", "../../x", "x" * 2000, "__proto__", "link", "2"]
TEXT = st.text(max_size=20) | st.sampled_from(ODD)
NUMBERS = (
    st.integers(-3, 20000) | st.sampled_from([10**400, -(10**400), 2**63, 1 << 1023, 1e308, -0.0, 5e-324, 1.5])
    | st.floats(allow_nan=False, allow_infinity=False)
)  # fmt: skip
SCALARS = st.none() | st.booleans() | NUMBERS | TEXT
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4), max_leaves=12
)
NESTED = st.integers(1, 2000).map(lambda depth: b"[" * depth + b"]" * depth)
IDS = [str(number) for number in range(1, 10)]
CLASSES = ["TRTUNetEngine", "TRTControlNetEngine", "TRTVAEEngine", "TRTAccelerate", "TRTReport",
           "CheckpointLoaderSimple", "KSampler", "SamplerCustomAdvanced", "CFGGuider", "EmptyLatentImage", "VAEDecode",
           "VAEDecodeTiled", "VAEEncode", "PrimitiveInt", "LoraLoader", "ControlNetApplyAdvanced"]  # fmt: skip
ENGINES = CLASSES[:4]
INPUTS = ["model", "vae", "control_net", "control_net_1", "control_net_2", "latent_image", "samples", "pixels",
          "image", "guider", "conditioning", "cfg", "width", "height", "batch_size", "tile_size", "value", "min_size",
          "opt_size", "max_size", "max_images", "max_tokens", "when_missing", "weights", "backend", "precision",
          "ckpt_name", "unet_name", "lora_name"]  # fmt: skip


@st.composite
def graphs(draw: Callable, cycles: bool, malformed: bool) -> dict[str, Any]:
    """Graphs of nodes that matter to the pack; links lead to later nodes alone, or anywhere."""
    graph: dict[str, Any] = {}
    for place, node in enumerate(IDS):
        targets = [*IDS, "none"] if cycles else IDS[place + 1:]
        links = st.builds(lambda to, slot: [to, slot], st.sampled_from(targets), st.integers(0, 3)) if targets else None
        usual = st.integers(0, 5000) | st.sampled_from(["auto", "a.safetensors", True, 1.5, [1]])
        plain = VALUES | usual if malformed else usual
        names = st.sampled_from(INPUTS) if not malformed else st.sampled_from(INPUTS) | TEXT
        value = links | plain if links is not None else plain
        inputs = draw(st.dictionaries(names, value, max_size=6))
        graph[node] = {"class_type": draw(st.sampled_from(CLASSES)), "inputs": inputs}
        if malformed and draw(st.integers(0, 5)) == 0:
            graph[node] = draw(VALUES | st.fixed_dictionaries({"class_type": VALUES, "inputs": VALUES}))
    return graph


def renamed(graph: dict[str, Any]) -> dict[str, Any]:
    """The same graph under other ids, in another order."""
    def link(value: Any) -> Any:
        return [f"5:{value[0]}", value[1]] if isinstance(value, list) and len(value) == 2 else value

    return {f"5:{node}": {**entry, "inputs": {name: link(value) for name, value in entry["inputs"].items()}}
            for node, entry in reversed(graph.items())}  # fmt: skip


# Routes


def test_engine_nodes_of_an_acyclic_graph_have_states_that_do_not_depend_on_ids(client: Client, holds: Holds) -> None:
    def check(graph: dict[str, Any]) -> None:
        nodes = [node for node, entry in graph.items() if entry["class_type"] in ENGINES]
        status, answer = client.post("/nodes", {"prompt": graph, "nodes": nodes})
        assert status == 200, answer
        again = client.post("/nodes", {"prompt": renamed(graph), "nodes": [f"5:{node}" for node in nodes]})[1]["nodes"]
        for node in nodes:
            assert answer["nodes"][node]["key"] == again[f"5:{node}"]["key"]
            assert answer["nodes"][node]["state"] in ("unknown", "unavailable")

    holds(check, graph=graphs(cycles=False, malformed=False))


@pytest.mark.fault("the page asks about a graph that goes in circles", see="an answer, or an error in one sentence")
def test_cyclic_and_malformed_graphs_are_answered(client: Client, holds: Holds) -> None:
    def check(graph: dict[str, Any], nodes: Any) -> None:
        status, answer = client.post("/nodes", {"prompt": graph, "nodes": nodes})
        assert status in (200, 400)
        for node, state in (answer["nodes"] if status == 200 else {}).items():
            assert node in graph
            assert len(state["key"]) == 24

    some = st.lists(st.sampled_from(IDS) | st.lists(st.sampled_from(IDS), max_size=3) | VALUES, max_size=5)
    drawn_graphs = graphs(cycles=True, malformed=True) | graphs(cycles=True, malformed=False)
    holds(check, graph=drawn_graphs, nodes=some | st.sampled_from(IDS).map(lambda node: [node]))


@pytest.mark.fault("anything is posted to a route", see="an answer in strict JSON, or an error in one sentence")
def test_whatever_is_posted_to_a_route_is_answered(client: Client, holds: Holds) -> None:
    fields = st.fixed_dictionaries({}, optional={name: VALUES for name in (
        "prompt", "nodes", "workflow", "what", "limit_gb", "build_minutes", "tensorrt_level", "folder")})  # fmt: skip
    bodies = (
        st.binary(max_size=300) | NESTED | (VALUES | fields).map(lambda data: json.dumps(data).encode())
        | VALUES.map(lambda data: gzip.compress(json.dumps(data).encode()))
    )  # fmt: skip
    headers = st.fixed_dictionaries({}, optional={
        "Content-Type": st.sampled_from(["application/json", "text/plain", "multipart/form-data"]),
        "Content-Encoding": st.sampled_from(["gzip", "deflate", "br", "x"]),
        "Origin": st.sampled_from(["null", "https://evil.example", "x"]),
    })  # fmt: skip

    def check(path: str, body: bytes, headers: dict[str, str]) -> None:
        assert client.ask("POST", path, body, **headers)[0] in (200, 400, 403, 404, 409, 413, 415)

    holds(check, path=st.sampled_from(ROUTES), body=bodies, headers=headers)


@pytest.mark.fault("a request names a path outside the library", see="an error in one sentence; no file is touched")
def test_no_path_leads_out_of_the_library(client: Client, holds: Holds) -> None:
    names = TEXT | st.sampled_from(["..", ".", "../checkpoints", "..%2f..", "%2e%2e", ".settings.json", NOTES, "con"])

    def check(method: str, path: str, name: str) -> None:
        escaped = quote(name, safe="%.*", errors="replace")
        assert client.ask(method, path.format(escaped))[0] in (400, 403, 404, 405)

    paths = st.sampled_from(["/engines/{}", "/engines/{}/verify", "/builds/{}/cancel", "/builds/none{}", "/none{}"])
    holds(check, method=st.sampled_from(["DELETE", "POST", "PUT"]), path=paths, name=names)


@st.composite
def workflows(draw: Callable, malformed: bool) -> dict[str, Any]:
    """Workflows in UI format with any wires, of which some places hold anything."""
    kinds = draw(st.lists(st.sampled_from(sorted(set(TYPES) - {"SetNode", "GetNode"})), min_size=2, max_size=7))
    nodes = {f"n{place}": kind for place, kind in enumerate(kinds)}
    links = []
    for target, kind in nodes.items():
        for slot, wanted in enumerate(TYPES[kind][0]):
            origins = [f"{one}.{out}" for one, made in nodes.items() for out, word in enumerate(TYPES[made][1])
                       if (malformed or one < target) and _alike(word, wanted)]  # fmt: skip
            if origins and draw(st.booleans()):
                links.append(f"{draw(st.sampled_from(origins))} {target}.{slot}")
    workflow = drawn(nodes, ", ".join(links))
    for _ in range(draw(st.integers(1, 3)) if malformed else 0):
        path = draw(st.sampled_from([path for path in places(workflow) if path]))
        at = workflow
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = draw(VALUES)
    return workflow


def _alike(made: str, wanted: str) -> bool:
    made, wanted = made.rpartition(":")[2], wanted.rpartition(":")[2]
    return made == wanted or "*" in (made, wanted)


def test_acceleration_that_is_taken_out_leaves_the_workflow_as_it_was(client: Client, holds: Holds) -> None:
    def check(workflow: dict[str, Any]) -> None:
        status, answer = client.post("/accelerate", {"workflow": workflow, "what": "add"})
        assert status == 200, answer
        if any(node["type"].startswith("TRT") for node in workflow["nodes"]):
            return  # those are taken out too
        back = client.post("/accelerate", {"workflow": answer["workflow"], "what": "remove"})[1]
        assert back["count"] == answer["count"]
        assert wires(back["workflow"]) == wires(workflow)

    holds(check, workflow=workflows(malformed=False))


def test_any_workflow_is_changed_or_refused(client: Client, holds: Holds) -> None:
    def check(workflow: dict[str, Any], what: str) -> None:
        assert client.post("/accelerate", {"workflow": workflow, "what": what})[0] in (200, 400)

    holds(check, workflow=workflows(malformed=True) | VALUES, what=st.sampled_from(["add", "remove"]))


# Files


def test_any_workflow_file_is_read_or_refused_in_words(comfy: ComfyProcess, holds: Holds) -> None:
    known = comfy.object_info()

    def check(data: Any, prompt: Any) -> None:
        if isinstance(data, dict):
            with contextlib.suppress(WorkflowError):
                json.dumps(to_prompt(data, known))
        if is_prompt(prompt):
            with contextlib.suppress(WorkflowError):
                change_prompt(copy.deepcopy(prompt), known, lambda workflow: workflow.save())

    drawn_prompts = graphs(cycles=True, malformed=True) | graphs(cycles=False, malformed=False)
    holds(check, data=workflows(malformed=True) | VALUES, prompt=drawn_prompts)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    """An engine whose manifest has all that one can have."""
    name = publish(tmp_path / "library")
    path = tmp_path / "library" / name / "manifest.json"
    data = json.loads(path.read_text())
    data["identity"]["layout"] = "layout2-" + "a" * 56
    names = ("rel_err", "native_rel_err", "limit", "native_ms", "engine_ms", "relative_time", "refit_s")
    figures = dict.fromkeys(names, 1.0)
    data |= {"fingerprint": "f", "parameters": 7, "built_with": "b" * 64, "parity": {**figures, "cases": [{"t": 1}]},
             "source": {"path": "/x/a.safetensors", "size": 1, "mtime_ns": 2, "name": "a"}}  # fmt: skip
    manifest = Manifest.parse(json.dumps(with_true_key(data)).encode(), "it")
    path.write_text(json.dumps(manifest.to_json()))
    found = Engine(path.parent, manifest)
    trust.keep(found.folder, manifest, trust.BUILT_HERE)
    return found


def test_an_engine_with_anything_in_its_manifest_is_listed_or_broken(engine: Engine, holds: Holds) -> None:
    path, library = engine.folder / "manifest.json", Library([engine.folder.parent])
    data = json.loads(path.read_text())
    every = list(places(data))

    def check(place: int, value: Any, true_key: bool) -> None:
        lie = changed(data, every[place % len(every)], value)
        path.write_text(json.dumps(with_true_key(lie) if true_key else lie))
        (entry,) = entries(library, lambda _: None, source_changed)
        strict(json.dumps(entry.to_json(), allow_nan=False).encode())
        assert entry.state == BROKEN or entry.engine is not None
        assert verify(entry) is not None or entry.state != BROKEN
        if entry.engine is not None:
            strict(json.dumps(engine_json(entry.engine), allow_nan=False).encode())

    holds(check, times=4, place=st.integers(0, 10**6), value=VALUES, true_key=st.booleans())


@pytest.mark.fault("a manifest is any bytes", see="the panel calls the engine broken")
def test_any_bytes_in_place_of_a_manifest_are_a_broken_engine(engine: Engine, holds: Holds) -> None:
    path, library = engine.folder / "manifest.json", Library([engine.folder.parent])

    def check(text: bytes) -> None:
        with contextlib.suppress(ManifestError):
            Manifest.parse(text, "it")
        path.write_bytes(text)
        (entry,) = entries(library, lambda _: None, source_changed)
        assert entry.state == BROKEN

    holds(check, text=st.binary(max_size=300) | NESTED | VALUES.map(lambda data: json.dumps(data).encode()))


def test_the_shapes_of_any_manifest_are_told_in_words_for_every_family(holds: Holds) -> None:
    def check(sizes: dict[str, list[int]]) -> None:
        profile = read_profile({name: sorted(three) for name, three in sizes.items()})
        for family in (*architectures(), "none"):
            assert isinstance(profile_words(family, profile), str)

    ranges = st.lists(st.integers(0, 1 << 31), min_size=3, max_size=3)
    names = st.sampled_from(["B", "H", "W", "T", "HB", "R", "C", "L", "N", "X"])
    holds(check, sizes=st.dictionaries(names, ranges))


def test_any_notes_on_nodes_are_read_without_an_error_and_written_again(tmp_path: Path, holds: Holds) -> None:
    record = {"label": "a", "architecture": "sd15_unet", "precision": "float16", "profile": {"B": [1, 1, 2]},
              "backend": "auto", "device": "cpu", "weights": "w", "refusal": ["no engine", "a"],
              "source": {"path": "/x", "size": 1, "mtime_ns": 1}, "without_engine": "", "kind": "unet", "parameters": 1}
    every = list(places(record))
    path = tmp_path / NOTES

    def check(place: int, value: Any) -> None:
        path.write_text(json.dumps({"a": changed(record, every[place % len(every)], value), "b": record}))
        known = read_records(path)
        assert "b" in known
        write_records(path, known)
        assert read_records(path) == known

    holds(check, times=2, place=st.integers(0, 10**6), value=VALUES)
