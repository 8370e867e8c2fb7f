"""For ``memory_limit.py`` only: builds stand-in engines, and tells what ComfyUI loads and unloads."""

from __future__ import annotations

import importlib
import sys
import time
from types import ModuleType
from typing import Any

from aiohttp import web
from comfy import model_management
from comfy_api.latest import ComfyExtension, io
from server import PromptServer

CATEGORY = "benchmarks"
MB = 1e6
MAX_EVENTS = 10_000

events: list[dict[str, Any]] = []


def pack(name: str) -> ModuleType:
    """A module of the Hybrid TRT pack that this server has loaded."""
    root = next(module for module in sys.modules if module.endswith(".sampling")).rpartition(".")[0]
    return importlib.import_module(f"{root}.{name}")


def build(network: Any) -> str:
    """A stand-in engine for a network, published in the server's library; its folder's name."""
    builder, backends = pack("engine_builder.build"), pack("backends").backends()
    profile = network.architecture().profile(pack("architectures.sizes").RequestedSizes(64, 512, 1024, 4, 616))
    order = pack("engine_builder.order").BuildOrder(network, network.precision, profile, backends["stand_in"])
    make_files = pack("backends.stand_in").make_files
    library = pack("page_api.library_folder").library()
    engine = builder.build_engine(order, library, lambda *_: None, run=lambda task, *_: make_files(task))
    return engine.folder.name


class StandInUNetEngine(io.ComfyNode):
    """Builds the stand-in engine of a MODEL."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(node_id="StandInUNetEngine", category=CATEGORY, is_output_node=True,
                         inputs=[io.Model.Input("model")], outputs=[])

    @classmethod
    def execute(cls, model: Any) -> io.NodeOutput:
        network = pack("comfy_model.network").NativeNetwork.of_model(model, "stand-in UNet")
        return io.NodeOutput(ui={"engine": [build(network)]})


class StandInControlNetEngine(io.ComfyNode):
    """Builds the stand-in engine of a CONTROL_NET."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(node_id="StandInControlNetEngine", category=CATEGORY, is_output_node=True,
                         inputs=[io.ControlNet.Input("control_net")], outputs=[])

    @classmethod
    def execute(cls, control_net: Any) -> io.NodeOutput:
        network = pack("comfy_model.network").NativeNetwork.of_controlnet(control_net, "stand-in ControlNet")
        return io.NodeOutput(ui={"engine": [build(network)]})


def name_of(patcher: Any) -> str:
    """What is in a patcher, in the table's words."""
    names = {"AutoencoderKL": "VAE", "SD1ClipModel": "text encoder", "SDXLClipModel": "text encoder",
             "BaseModel": "native UNet", "SDXL": "native UNet", "ControlNet": "native ControlNet"}
    kind = type(patcher.model).__name__
    if kind == "EngineModule":
        session = patcher.model.session
        if session is None:
            return "engine none"
        kinds = [engine.manifest.kind for engine in session.engines]
        return f"engine {kinds[0] if kinds else session.label}"
    return names.get(kind, kind)


def loaded() -> list[dict[str, Any]]:
    """The models that ComfyUI manages, with what they hold on the device."""
    live = [entry.model for entry in model_management.current_loaded_models if entry.model is not None]
    return [{"name": name_of(m), "mb": round(m.loaded_size() / MB), "of_mb": round(m.model_size() / MB)} for m in live]


def watch() -> None:
    """Note each loading and unloading that ComfyUI does."""
    kind = model_management.LoadedModel
    load, unload, plan = kind.model_load, kind.model_unload, model_management.load_models_gpu

    def note(what: str, name: str, before: int, after: int) -> None:
        if len(events) < MAX_EVENTS:
            events.append({"what": what, "name": name, "mb": round((after - before) / MB), "at": time.time()})

    def model_load(self: Any, *arguments: Any, **options: Any) -> Any:
        before = self.model.loaded_size()
        result = load(self, *arguments, **options)
        note("load", name_of(self.model), before, self.model.loaded_size())
        return result

    def model_unload(self: Any, *arguments: Any, **options: Any) -> Any:
        model = self.model
        name, before = name_of(model), model.loaded_size()
        result = unload(self, *arguments, **options)
        note("unload" if result else "unload in part", name, before, model.loaded_size())
        return result

    def load_models_gpu(models: Any, *arguments: Any, **options: Any) -> Any:
        events.append({"what": "plan", "names": [name_of(m) for m in models], "loaded": loaded(), "at": time.time()})
        return plan(models, *arguments, **options)

    kind.model_load, kind.model_unload, model_management.load_models_gpu = model_load, model_unload, load_models_gpu


@PromptServer.instance.routes.get("/memory_limit/events")
async def tell(_request: web.Request) -> web.Response:
    """What happened since the last question, and what is loaded now."""
    told = {"events": list(events), "loaded": loaded()}
    events.clear()
    return web.json_response(told)


class MemoryNodes(ComfyExtension):
    """What ComfyUI asks for the nodes of this pack."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [StandInUNetEngine, StandInControlNetEngine]


async def comfy_entrypoint() -> MemoryNodes:
    """Called by ComfyUI when it loads the pack."""
    watch()
    return MemoryNodes()
