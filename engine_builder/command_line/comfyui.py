"""The command line's ComfyUI: where it lies, its folders, and models loaded by its own loaders into main memory."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ...comfy_model import hash_cache
from ...engine_library import Library
from ...node_names import ACCELERATE

if TYPE_CHECKING:
    import torch

    from ...comfy_model.network import NativeNetwork

log = logging.getLogger(__name__)

PACK = Path(__file__).absolute().parents[2]
FOLDER_KEY = "trt_engines"
MODEL_FOLDERS = {"checkpoint": "checkpoints", "unet": "diffusion_models", "controlnet": "controlnet"}


class Unusable(Exception):
    """Model, folder or device that cannot be used; the text says why and what to do."""


def library(folder: Path | None, comfyui: Path | None) -> Library:
    """Return the library in a folder, or a ComfyUI's library; its modules can be imported afterwards.

    Raises:
        Unusable: neither is known.
    """
    root = find(comfyui)
    if root is not None:
        _enter(root)
    elif folder is None:
        raise Unusable(
            "No ComfyUI was found, so it is not known where the engines are. Give --comfyui or --library, or set "
            "COMFYUI_PATH."
        )
    roots = [folder] if folder is not None else library_folders()
    hash_cache.use(roots[0])
    return Library(roots)


def find(comfyui: Path | None) -> Path | None:
    """Return the ComfyUI to use: the given folder, COMFYUI_PATH, or the ComfyUI with this pack.

    Raises:
        Unusable: the named folder is no ComfyUI.
    """
    named = comfyui or (Path(value) if (value := os.environ.get("COMFYUI_PATH")) else None)
    root = named if named is not None else PACK.parents[1]
    if (root / "main.py").is_file() and (root / "folder_paths.py").is_file():
        return root.absolute()
    if named is not None:
        raise Unusable(f"{named} holds no ComfyUI (no main.py and folder_paths.py); correct --comfyui or COMFYUI_PATH.")
    return None


def start(comfyui: Path | None, folder: Path | None, device: str | None) -> str:
    """Load the nodes of ComfyUI and of all packs, and return this pack's name as a package there.

    Args:
        folder: the library, in place of ComfyUI's.
        device: ``"cpu"``, or the GPU to use.

    Raises:
        Unusable: there is no ComfyUI.
    """
    root = find(comfyui)
    if root is None:
        raise Unusable("No ComfyUI was found, so no node is known. Give --comfyui, or set COMFYUI_PATH.")
    if device and device.startswith("cuda:"):
        os.environ["CUDA_VISIBLE_DEVICES"] = device.partition(":")[2]
    _enter(root)
    import torch
    from comfy.cli_args import args

    args.cpu = args.cpu or device == "cpu" or not torch.cuda.is_available()
    if folder is not None:
        _folder_paths().add_model_folder_path(FOLDER_KEY, str(folder.absolute()), is_default=True)
    from server import PromptServer

    import nodes

    loop = asyncio.new_event_loop()
    PromptServer(loop)  # packs add their routes to it; nobody listens
    loop.run_until_complete(nodes.init_extra_nodes(init_api_nodes=False))
    if ACCELERATE not in nodes.NODE_CLASS_MAPPINGS:
        loop.run_until_complete(nodes.load_custom_node(str(PACK)))
    threading.Thread(target=loop.run_forever, daemon=True).start()  # it takes the nodes' messages to the page
    return nodes.NODE_CLASS_MAPPINGS[ACCELERATE].__module__.rpartition(".nodes.")[0]


def node_infos() -> dict[str, Any]:
    """Return the parts of GET /object_info that readers of graphs need, for the nodes that ``start`` has loaded."""
    import nodes

    return {name: _info(node) for name, node in nodes.NODE_CLASS_MAPPINGS.items()}


def _info(node: Any) -> dict[str, Any]:
    if hasattr(node, "GET_NODE_INFO_V1"):
        return node.GET_NODE_INFO_V1()
    try:
        inputs = node.INPUT_TYPES()
    except Exception as error:  # another pack's node, which the graph may not use
        log.debug("Hybrid TRT: %s does not tell its inputs (%s)", node, error)
        inputs = {}
    order = {group: list(specs) for group, specs in inputs.items()}
    return {"input": inputs, "input_order": order, "output": node.RETURN_TYPES}


def device(name: str | None) -> torch.device:
    """Return the device to build for and to judge by: the one named, else the first GPU, else the CPU."""
    import torch

    try:
        return torch.device(name or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise Unusable(f"{name} is no device ({str(error).splitlines()[0]}); use cpu, cuda or cuda:0.") from None


def load(kind: str, name: str, precision: str, target: torch.device) -> NativeNetwork:
    """Load a model as ComfyUI would for this machine; its weights stay in main memory.

    Without a GPU ComfyUI would load in float32; then ``precision`` decides, since it says what a GPU will run.

    Raises:
        Unusable: the file is missing or not of this kind.
    """
    import torch

    if "folder_paths" not in sys.modules:
        raise Unusable("Loading a model needs ComfyUI, and none was found. Give --comfyui, or set COMFYUI_PATH.")
    from comfy.cli_args import args

    on_cpu = not torch.cuda.is_available()
    args.cpu = args.cpu or on_cpu
    path = _path(kind, name)
    options = {"dtype": getattr(torch, precision)} if on_cpu and hasattr(torch, precision) else {}
    import comfy.controlnet
    import comfy.sd

    from ...comfy_model.network import NativeNetwork

    try:
        if kind == "controlnet":
            net = comfy.controlnet.load_controlnet(path, model_options=options)
            if type(net) is not comfy.controlnet.ControlNet:
                raise Unusable(f"{path} is no ControlNet that can become an engine ({type(net).__name__}).")
            return NativeNetwork.of_controlnet(net, Path(path).name)
        if kind == "unet":
            model = comfy.sd.load_diffusion_model(path, model_options=options)
        else:
            model = comfy.sd.load_checkpoint_guess_config(
                path, output_vae=False, output_clip=False, model_options=options
            )[0]
        return NativeNetwork.of_model(model, Path(path).name)
    except (RuntimeError, OSError, KeyError, TypeError, ValueError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        why = f"{path} could not be loaded as a {kind} ({lines[0]})"
        raise Unusable(f"{why}; check the file and the option.") from error


def limits() -> list[str]:
    """Return sentences on what this ComfyUI is not used for."""
    import torch
    from comfy.cli_args import args

    from ...comfy_model.comfyui_internals import switched_off

    args.cpu = args.cpu or not torch.cuda.is_available()
    return switched_off()


def _path(kind: str, name: str) -> str:
    if Path(name).is_file():
        return str(Path(name).absolute())
    if "folder_paths" in sys.modules and (found := _folder_paths().get_full_path(MODEL_FOLDERS[kind], name)):
        return found
    raise Unusable(f"There is no file {name}, neither here nor in ComfyUI's models/{MODEL_FOLDERS[kind]}.")


def _enter(root: Path) -> None:
    """Make ComfyUI's modules importable, and apply its extra_model_paths.yaml."""
    if str(root) in sys.path:
        return
    sys.path.insert(0, str(root))
    _folder_paths()
    extra = root / "extra_model_paths.yaml"
    if extra.is_file():
        from utils.extra_config import load_extra_path_config

        load_extra_path_config(str(extra))


def _folder_paths() -> ModuleType:
    import folder_paths

    return folder_paths


def library_folders() -> list[Path]:
    """Return the folders of the library. Builds go to the first; folders of extra_model_paths.yaml come before ours."""
    paths = _folder_paths()
    paths.add_model_folder_path(FOLDER_KEY, str(Path(paths.models_dir) / FOLDER_KEY))
    return [Path(folder) for folder in paths.get_folder_paths(FOLDER_KEY)]
