"""Nodes for the tests only: conditioning and images without models, and latents on disk. Never shipped to users."""

from __future__ import annotations

import copy
import gc
import importlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import folder_paths
import numpy
import torch
from comfy import controlnet, model_base, model_management, model_patcher, supported_models
from comfy.cldm.cldm import ControlNet
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from comfy.nested_tensor import NestedTensor
from comfy_api.latest import ComfyExtension, io
from comfy_execution.graph_utils import GraphBuilder, is_link

from . import held_memory, image_nodes, interrupts, model_patches, other_packs_sampling, prompt_parts, stream_double

SUPPORT = Path(__file__).resolve().parents[1] / "support"
TOOLS = SUPPORT.parents[1] / "tools"
FAMILIES = SUPPORT / "families"
ENGINE = io.Custom("TRT_UNET_ENGINE")
MODEL, CONTROL, LATENT = io.Model.Input("model"), io.ControlNet.Input("control_net"), io.Latent.Input("latent_image")
CONDITIONINGS = [io.Conditioning.Input("positive"), io.Conditioning.Input("negative")]


def integer(name: str, default: int, least: int, most: int = 2**31 - 1, **options: Any) -> io.Int.Input:
    return io.Int.Input(name, default=default, min=least, max=most, **options)


SEED, STEPS = integer("seed", 0, 0), integer("steps", 4, 1, 100)


def _node(name: str, run: Callable, inputs: Sequence[Any], *outputs: Any, always: bool = False, **options: Any) -> type:
    """Return a node class that calls ``run`` with its inputs; ``always`` runs it in each prompt.

    ``run`` returns the only output or a ``NodeOutput``. With ``hidden`` inputs it gets them first.
    """

    def define_schema(cls: type) -> io.Schema:
        return io.Schema(node_id=name, display_name=name, category="tests", inputs=list(inputs),
                         outputs=[output.Output() for output in outputs], is_output_node=not outputs, **options)

    def execute(cls: Any, **given: Any) -> io.NodeOutput:
        result = run(cls.hidden, **given) if "hidden" in options else run(**given)
        return result if isinstance(result, io.NodeOutput) else io.NodeOutput(result)

    methods: dict[str, Any] = {"define_schema": define_schema, "execute": execute}
    if always:
        methods["fingerprint_inputs"] = lambda cls, **_: float("nan")
    return type(name, (io.ComfyNode,), {key: classmethod(method) for key, method in methods.items()})


def _random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def conditioning(tokens: int, width: int, pooled: int, seed: int) -> list:
    """Return random conditioning: it needs no text encoder, which for SDXL would outweigh all else.

    ``width`` is 768 for SD1.5 and 2048 for SDXL, ``pooled`` 1280 for SDXL; 0 gives no ``pooled_output``.
    """
    extras = {"pooled_output": _random(seed + 1, 1, pooled)} if pooled else {}
    return [[_random(seed, 1, tokens, width), extras]]


def prompt_mask(conditioning: list, words: int) -> list:
    """Return prompts of which the first tokens alone are words, as text encoders tell of padded ones."""
    return [[tokens, {**more, "attention_mask": (torch.arange(tokens.shape[1]) < words).long()[None]}]
            for tokens, more in conditioning]


def image(seed: int, width: int, height: int, batch: int, channels: int) -> torch.Tensor:
    """Return random images with structure at several scales, each picture of the batch another one."""
    made = torch.zeros(batch, channels, height, width)
    for cells in (3, 9, 27):
        noise = _random(seed + cells, batch, channels, cells, cells)
        made += torch.nn.functional.interpolate(noise, (height, width), mode="bilinear") * (3 / cells) ** 0.5
    return made.mul(2).sigmoid().movedim(1, -1).contiguous()


def save_latent(latent: dict, name: str) -> io.NodeOutput:
    """Write a latent as latents/<name>.npy (float32) below the output directory; tell its path and shape."""
    folder = Path(folder_paths.get_output_directory()) / "latents"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.npy"
    if path.parent != folder:
        raise ValueError(f"a latent's name is no path: {name!r}")
    found = latent["samples"]
    if found.is_nested:  # a video and its sound
        found = torch.cat([part.flatten() for part in found.unbind()])
    values = found.detach().to("cpu", torch.float32).numpy()
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        numpy.save(file, values)
    os.replace(temporary, path)
    return io.NodeOutput(ui={"latent": [str(path), list(values.shape)]})


def union(control_net: controlnet.ControlNet, types: int) -> controlnet.ControlNet:
    """Return a ControlNet with the parts that make it a union ControlNet, in random weights."""
    net = copy.deepcopy(control_net.control_model)
    donor = ControlNet(
        image_size=32, in_channels=4, hint_channels=3, model_channels=320, num_res_blocks=[1], channel_mult=[1],
        num_heads=8, use_spatial_transformer=True, transformer_depth=[1], transformer_depth_middle=-1,
        context_dim=768, union_controlnet_num_control_type=types, dtype=net.dtype,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    for name in ("transformer_layes", "spatial_ch_projs", "control_add_embedding", "task_embedding"):
        part = getattr(donor, name)
        for weight in [part] if isinstance(part, torch.nn.Parameter) else part.parameters():
            scale = weight[0].numel() ** -0.5 if weight.ndim > 1 else 0.1
            weight.data = (torch.randn(weight.shape, generator=generator) * scale).to(weight.dtype)
            weight.requires_grad_(False)
        setattr(net, name, part)
    net.num_control_type = types
    dtype = control_net.manual_cast_dtype
    return controlnet.ControlNet(net, load_device=control_net.load_device, manual_cast_dtype=dtype)


def toy_model(seed: int) -> io.NodeOutput:
    """Return a model and a ControlNet of the toy family, which its file's folder alone adds to the pack's families."""
    families = next(m for name, m in sys.modules.items() if name.endswith("hybrid-trt.architectures.families"))
    if str(FAMILIES) not in families.__path__:
        families.__path__.append(str(FAMILIES))
    toy = importlib.import_module(f"{families.__name__}.toy")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        backbone, control = toy.ToyNet().requires_grad_(False), toy.ToyControl().requires_grad_(False)
    config = supported_models.SD15({"disable_unet_model_creation": True})
    config.unet_config = {"disable_unet_model_creation": True}
    config.manual_cast_dtype = None
    config.sampling_settings = {"multiplier": 1.0}  # it is told sigmas from 0 to 1
    base = model_base.BaseModel(config, model_base.ModelType.FLOW)
    base.diffusion_model = backbone
    device = model_management.get_torch_device()
    model = model_patcher.ModelPatcher(base, load_device=device, offload_device=torch.device("cpu"))
    return io.NodeOutput(model, controlnet.ControlNet(control, load_device=device, extra_conds=[]))


def other_packs_weights(unet_name: str, kind: str) -> model_patcher.ModelPatcher:
    """Return the model of a file as the loader of a pack with weights of its own would have it."""
    path = folder_paths.get_full_path_or_raise("diffusion_models", unet_name)
    return _support("other_packs_weights").load(path, kind)


def in_tiles(model: model_patcher.ModelPatcher, way: str) -> model_patcher.ModelPatcher:
    """Return a model that another pack has computed in tiles, with the tile's part of each ControlNet's image."""
    return _support("other_packs_controls").in_tiles(model, way)


def token_network(unet_name: str, weight_dtype: str) -> model_patcher.ModelPatcher:
    """Return the model of a tiny file of a family whose sizes are in no file."""
    return _support("token_networks").load(folder_paths.get_full_path_or_raise("diffusion_models", unet_name))


def token_control(control_net_name: str) -> controlnet.ControlNet:
    """Return the ControlNet of a tiny file of such a family."""
    return _support("token_networks").load_control(folder_paths.get_full_path_or_raise("controlnet", control_net_name))


def seen(seed: int) -> SimpleNamespace:
    """Return what a CLIP vision model tells Wan of a picture, at random."""
    return SimpleNamespace(penultimate_hidden_states=_random(seed, 1, 257, 1280))


def with_sound(width: int, height: int, length: int, batch: int) -> dict:
    """Return an empty latent of a video with its sound, as LTX-2's nodes make it: they need a VAE for sound."""
    sizes = (batch, 128, (length - 1) // 8 + 1, height // 32, width // 32), (batch, 8, length, 16)
    return {"samples": NestedTensor(torch.zeros(*size) for size in sizes)}


def latent(seed: int, width: int, height: int, channels: int) -> dict:
    """Return a random latent, as a VAE might have encoded one."""
    return {"samples": _random(seed, 1, channels, height, width)}


def fun_patch(version: str, other: bool = False) -> model_patcher.ModelPatcher:
    """Return a tiny Fun control as ModelPatchLoader loads one, whose sizes are in no file."""
    tiny = _support("tiny_fun")
    return tiny.control(other=other, **tiny.VERSIONS[version][1])


def h3_vae(vae_name: str) -> Any:
    """Return a tiny VAE of MiniMax H3, whose size is in no file."""
    return _support("tiny_h3_vae").load()


def _support(name: str) -> Any:
    """Return a module that the tests share, which may take others of theirs."""
    for folder in (SUPPORT, TOOLS):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    return importlib.import_module(name)


def start_loop(hidden: Any, first: int, step: int, count: int) -> io.NodeOutput:
    """Copy the nodes up to the one that ends the loop, once for each number, as ComfyUI's own loops do.

    The links into the loop are taken from that node in the running prompt; there alone, not in the user's.
    """
    prompt, start = hidden.dynprompt, hidden.unique_id
    own = prompt.get_original_prompt()
    end = next(node for node in own if own[node]["class_type"] == "TestEndLoop")
    result, body = own[end]["inputs"]["value"], _behind(own, start) - {end}
    graph, results = GraphBuilder(), []
    for i in range(count):
        copies = {node: graph.node(own[node]["class_type"], f"{i}_{node}") for node in body}
        for node, one in copies.items():
            one.set_override_display_id(node)
            for name, value in own[node]["inputs"].items():
                if is_link(value) and value[0] == start:
                    value = first + i * step
                elif is_link(value) and value[0] in copies:
                    value = copies[value[0]].out(value[1])
                one.set_input(name, value)
        results.append(copies[result[0]].out(result[1]))
    for other in results[1:]:
        results[0] = graph.node("LatentBatch", samples1=results[0], samples2=other).out(0)
    inputs = {name: value for name, value in own[end]["inputs"].items() if name != "value"}
    prompt.ephemeral_prompt[end] = {"class_type": own[end]["class_type"], "inputs": inputs}
    return io.NodeOutput(first, results[0], expand=graph.finalize())


def _behind(prompt: dict, start: str) -> set[str]:
    """Return the nodes that depend on another one, but for those behind the loop."""
    found, before = {start}, -1
    while before != len(found):
        before = len(found)
        found |= {n for n in prompt for value in prompt[n]["inputs"].values()
                  if is_link(value) and value[0] in found and prompt[value[0]]["class_type"] != "TestEndLoop"}
    return found - {start}


class TestEndLoop(io.ComfyNode):
    """Hand on what the iterations of a loop made; never ask for the nodes that they are copies of."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.Latent.Input("value", optional=True, lazy=True), io.Latent.Input("results")]
        return io.Schema(node_id="TestEndLoop", category="tests", inputs=inputs, outputs=[io.Latent.Output()])

    @classmethod
    def check_lazy_status(cls, **_: object) -> list[str]:
        return []

    @classmethod
    def execute(cls, results: dict, value: dict | None = None) -> io.NodeOutput:
        return io.NodeOutput(results)


def sampler(latent_image: dict, **given: object) -> io.NodeOutput:
    """Put two of ComfyUI's samplers in the node's place, one after the other."""
    graph, latent = GraphBuilder(), latent_image
    options = {"cfg": 5.0, "sampler_name": "euler", "scheduler": "normal", "denoise": 0.7}
    for seed in range(2):
        latent = graph.node("KSampler", **given, **options, seed=seed, latent_image=latent).out(0)
    return io.NodeOutput(latent, expand=graph.finalize())


def pixels(image: torch.Tensor) -> dict:
    """Return images as the values of a latent, to be saved as these are."""
    return {"samples": image.movedim(-1, 1)}


def pictures(engine: Any) -> io.NodeOutput:
    """Tell which pictures an engine node found in the prompt."""
    return io.NodeOutput(engine, ui={"pictures": [[p.width, p.height, *p.batches] for p in engine.choice.pictures]})


def models_alive(turn: int, after: dict | None = None) -> io.NodeOutput:
    """Count the UNets and ControlNets that live in this process, whoever holds them."""
    alive = [type(found).__name__ for found in gc.get_objects() if type(found) in (UNetModel, ControlNet)]
    return io.NodeOutput(ui={"alive": [alive.count("UNetModel"), alive.count("ControlNet")]})


def hold_builds(phase: str) -> io.NodeOutput:
    """Have each build from now on stand still in the first phase of this name, until the server is killed."""
    jobs = next(m for name, m in sys.modules.items() if name.endswith("engine_builder.jobs"))
    build_engine = jobs.build_engine

    def held(order: Any, library: Any, progress: Callable, *rest: Any, **options: Any) -> Any:
        def tell(now: str, fraction: float) -> None:
            progress(now, fraction)
            if now.startswith(phase):
                time.sleep(600)

        return build_engine(order, library, tell, *rest, **options)

    jobs.build_engine = held
    return io.NodeOutput()


NODES = [
    TestEndLoop,
    *image_nodes.NODES,
    _node("TestConditioning", conditioning, [
        integer("tokens", 77, 1, 77 * 16), integer("width", 768, 1, 1 << 15), integer("pooled", 0, 0, 4096), SEED,
    ], io.Conditioning),
    _node("TestPromptMask", prompt_mask, [io.Conditioning.Input("conditioning"), integer("words", 9, 1)],
          io.Conditioning),
    _node("TestImage", image, [
        SEED, integer("width", 128, 1, 8192), integer("height", 128, 1, 8192), integer("batch", 1, 1, 64),
        integer("channels", 3, 1, 4),
    ], io.Image),
    _node("TestSaveLatent", save_latent, [io.Latent.Input("latent"), io.String.Input("name", default="latent")]),
    _node("TestUnionControlNet", union, [CONTROL, integer("types", 8, 1, 8)], io.ControlNet),
    _node("TestOtherPacksWeights", other_packs_weights, [
        io.String.Input("unet_name"), io.String.Input("kind", default="GGUF")], io.Model),
    _node("TestTokenNetwork", token_network, [io.String.Input("unet_name"), io.String.Input("weight_dtype")], io.Model),
    _node("TestTokenControl", token_control, [io.String.Input("control_net_name")], io.ControlNet),
    _node("TestVideoWithSound", with_sound, [
        integer("width", 64, 32), integer("height", 64, 32), integer("length", 9, 1),
        integer("batch", 1, 1)], io.Latent),
    _node("TestLatent", latent, [SEED, *(integer(name, 8, 1, 1024) for name in ("width", "height", "channels"))],
          io.Latent),
    _node("TestSeen", seen, [SEED], io.ClipVisionOutput),
    _node("TestFunPatch", fun_patch, [
        io.String.Input("version", default="2.1"), io.Boolean.Input("other", default=False, optional=True)],
        io.Custom("MODEL_PATCH")),
    _node("TestH3VAE", h3_vae, [io.String.Input("vae_name")], io.Vae),
    _node("TestToyModel", toy_model, [SEED], io.Model, io.ControlNet),
    # what stands in the loop is no input of its start
    _node("TestStartLoop", start_loop, [integer("first", 0, 0), integer("step", 1, 1), integer("count", 2, 1, 8)],
          io.Int, io.Latent, always=True, enable_expand=True, hidden=[io.Hidden.dynprompt, io.Hidden.unique_id]),
    _node("TestSampler", sampler, [MODEL, *CONDITIONINGS, LATENT, STEPS], io.Latent, enable_expand=True),
    _node("TestPixels", pixels, [io.Image.Input("image")], io.Latent),
    _node("TestPromptParts", prompt_parts.prompt_parts, [io.String.Input("action"), integer("turn", 0, 0)],
          always=True),
    _node("TestHostWaits", prompt_parts.host_waits, [io.String.Input("action"), integer("turn", 0, 0)], always=True),
    _node("TestPictures", pictures, [ENGINE.Input("engine")], ENGINE),
    _node("TestModelsAlive", models_alive, [integer("turn", 0, 0), io.Latent.Input("after", optional=True)]),
    _node("TestStreamDouble", stream_double.stream_double, [
        io.Float.Input("seconds", default=0.0), io.Float.Input("patience", default=10.0), integer("turn", 0, 0),
        integer("fail_at", -1, -1)], always=True, hidden=[io.Hidden.unique_id]),
    _node("TestInterruptedAt", interrupts.interrupted_at, [io.Latent.Input("samples"), integer("operation", 1, 1)],
          io.Latent, always=True),
    _node("TestHoldBuilds", hold_builds, [io.String.Input("phase")]),
    _node("TestModelPatch", model_patches.patched, [
        MODEL, io.Combo.Input("kind", options=list(model_patches.KINDS))], io.Model),
    _node("TestQwenFun", model_patches.qwen_fun, [CONTROL], io.ControlNet),
    _node("TestTiles", in_tiles, [MODEL, io.String.Input("way")], io.Model),
    _node("TestOwnForward", other_packs_sampling.with_own_forward, [
        MODEL, integer("every", 0, 0, 9, optional=True), io.Boolean.Input("replaced", default=False, optional=True)],
        io.Model),
    _node("TestSampleInThread", other_packs_sampling.sample_in_thread, [
        MODEL, *CONDITIONINGS, LATENT, SEED, STEPS, io.Combo.Input("way", options=["thread", "executor"])], io.Latent),
]  # fmt: skip


class TestNodes(ComfyExtension):
    """The nodes of this pack, as ComfyUI asks for them."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return NODES


async def comfy_entrypoint() -> TestNodes:
    """Called by ComfyUI when it loads the pack."""
    _support("tiny_transformers").let_comfyui_load_zimage()
    held_memory.add_route()
    gc.freeze()  # ComfyUI collects garbage after prompts, and would look at all that was imported each time
    return TestNodes()
