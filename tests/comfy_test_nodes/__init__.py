"""Nodes for the tests only: conditioning and images without models, and latents on disk. Never shipped to users."""

from __future__ import annotations

import copy
import gc
import importlib
import os
import sys
from pathlib import Path

import folder_paths
import numpy
import torch
from comfy import controlnet, model_base, model_management, model_patcher, supported_models
from comfy.cldm.cldm import ControlNet
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from comfy_api.latest import ComfyExtension, io
from comfy_execution.graph_utils import GraphBuilder, is_link

import nodes  # ComfyUI's

from . import other_packs_controls, other_packs_models, other_packs_sampling, other_packs_weights

CATEGORY = "tests"
ENGINE = io.Custom("TRT_UNET_ENGINE")
MAX_SEED = 2**31 - 1
FAMILIES = Path(__file__).resolve().parents[1] / "support" / "families"


def _random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class TestConditioning(io.ComfyNode):
    """Random conditioning of a given shape: needs no text encoder, which for SDXL would outweigh all else."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestConditioning", display_name="Test Conditioning", category=CATEGORY,
            inputs=[
                io.Int.Input("tokens", default=77, min=77, max=77 * 8, step=77),
                io.Int.Input("width", default=768, min=1, max=4096, tooltip="SD1.5: 768, SDXL: 2048"),
                io.Int.Input("pooled", default=0, min=0, max=4096, tooltip="SDXL: 1280; 0: no pooled_output"),
                io.Int.Input("seed", default=0, min=0, max=MAX_SEED),
            ],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, tokens: int, width: int, pooled: int, seed: int) -> io.NodeOutput:
        extras = {"pooled_output": _random(seed + 1, 1, pooled)} if pooled else {}
        return io.NodeOutput([[_random(seed, 1, tokens, width), extras]])


class TestImage(io.ComfyNode):
    """Random images with structure at several scales, each picture of the batch another one."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestImage", display_name="Test Image", category=CATEGORY,
            inputs=[
                io.Int.Input("seed", default=0, min=0, max=MAX_SEED),
                io.Int.Input("width", default=128, min=1, max=8192),
                io.Int.Input("height", default=128, min=1, max=8192),
                io.Int.Input("batch", default=1, min=1, max=64),
                io.Int.Input("channels", default=3, min=1, max=4),
            ],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(cls, seed: int, width: int, height: int, batch: int, channels: int) -> io.NodeOutput:
        image = torch.zeros(batch, channels, height, width)
        for cells in (3, 9, 27):
            noise = _random(seed + cells, batch, channels, cells, cells)
            image += torch.nn.functional.interpolate(noise, (height, width), mode="bilinear") * (3 / cells) ** 0.5
        return io.NodeOutput(image.mul(2).sigmoid().movedim(1, -1).contiguous())


class TestSaveLatent(io.ComfyNode):
    """Writes a latent as latents/<name>.npy (float32) below the output directory and tells its path and shape."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestSaveLatent", display_name="Test Save Latent", category=CATEGORY, is_output_node=True,
            inputs=[io.Latent.Input("latent"), io.String.Input("name", default="latent")],
            outputs=[],
        )

    @classmethod
    def execute(cls, latent: dict, name: str) -> io.NodeOutput:
        folder = Path(folder_paths.get_output_directory()) / "latents"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.npy"
        if path.parent != folder:
            raise ValueError(f"a latent's name is no path: {name!r}")
        values = latent["samples"].detach().to("cpu", torch.float32).numpy()
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            numpy.save(file, values)
        os.replace(temporary, path)
        return io.NodeOutput(ui={"latent": [str(path), list(values.shape)]})


class TestSampleTwice(io.ComfyNode):
    """Two sampling runs inside one execution of a node, as nodes for XY plots do; a batch of both latents."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestSampleTwice", display_name="Test Sample Twice", category=CATEGORY,
            inputs=[
                io.Model.Input("model"),
                io.Model.Input("second_model"),
                io.Conditioning.Input("positive"),
                io.Conditioning.Input("negative"),
                io.Latent.Input("latent_image"),
                io.Int.Input("seed", default=0, min=0, max=MAX_SEED),
                io.Int.Input("steps", default=4, min=1, max=100),
            ],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(
        cls, model: object, second_model: object, positive: list, negative: list, latent_image: dict, seed: int,
        steps: int,
    ) -> io.NodeOutput:
        given = (seed, steps, 5.0, "euler", "normal", positive, negative, latent_image)
        sampled = [nodes.common_ksampler(m, *given)[0]["samples"] for m in (model, second_model)]
        return io.NodeOutput({"samples": torch.cat(sampled)})


class TestSecondDevice(io.ComfyNode):
    """A double of a second GPU: from now on ComfyUI takes the CPU under a second name for one, or no more."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestSecondDevice", display_name="Test Second Device", category=CATEGORY,
            inputs=[io.Model.Input("model"), io.Boolean.Input("there")],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model: object, there: bool) -> io.NodeOutput:
        devices = [torch.device("cpu"), torch.device("cpu", 1)][: 2 if there else 1]
        model_management.get_all_torch_devices = lambda exclude_current=False: devices[int(exclude_current):]
        return io.NodeOutput(model)


class TestUnionControlNet(io.ComfyNode):
    """A ControlNet with the parts that make it a union ControlNet, in random weights."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestUnionControlNet", display_name="Test Union ControlNet", category=CATEGORY,
            inputs=[io.ControlNet.Input("control_net"), io.Int.Input("types", default=8, min=1, max=8)],
            outputs=[io.ControlNet.Output()],
        )

    @classmethod
    def execute(cls, control_net: controlnet.ControlNet, types: int) -> io.NodeOutput:
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
        return io.NodeOutput(controlnet.ControlNet(
            net, load_device=control_net.load_device, manual_cast_dtype=control_net.manual_cast_dtype
        ))  # fmt: skip


class TestToyModel(io.ComfyNode):
    """A model and a ControlNet of the toy family, which is added to the pack's families by its file's folder alone."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestToyModel", display_name="Test Toy Model", category=CATEGORY,
            inputs=[io.Int.Input("seed", default=0, min=0, max=MAX_SEED)],
            outputs=[io.Model.Output(), io.ControlNet.Output()],
        )

    @classmethod
    def execute(cls, seed: int) -> io.NodeOutput:
        families = next(m for name, m in sys.modules.items() if name.endswith("hybrid-trt.architectures"))
        if str(FAMILIES) not in families.__path__:
            families.__path__.append(str(FAMILIES))
        toy = importlib.import_module(f"{families.__name__}.toy")
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            backbone, control = toy.ToyNet().requires_grad_(False), toy.ToyControl().requires_grad_(False)
        config = supported_models.SD15({"disable_unet_model_creation": True})
        config.unet_config = {"disable_unet_model_creation": True}
        config.manual_cast_dtype = None
        base = model_base.BaseModel(config)
        base.diffusion_model = backbone
        device = model_management.get_torch_device()
        model = model_patcher.ModelPatcher(base, load_device=device, offload_device=torch.device("cpu"))
        return io.NodeOutput(model, controlnet.ControlNet(control, load_device=device, extra_conds=[]))


class TestStartLoop(io.ComfyNode):
    """Makes a copy of the nodes between it and the node that ends the loop for each number, as ComfyUI's own loops do.

    The links into the loop are taken from that node in the running prompt; there alone, not in the user's.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestStartLoop", display_name="Test Start Loop", category=CATEGORY, enable_expand=True,
            inputs=[
                io.Int.Input("first", default=0, min=0, max=MAX_SEED),
                io.Int.Input("step", default=1, min=1, max=MAX_SEED),
                io.Int.Input("count", default=2, min=1, max=8),
            ],
            outputs=[io.Int.Output(tooltip="The number of this iteration."), io.Latent.Output(tooltip="All results.")],
            hidden=[io.Hidden.dynprompt, io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, **_: object) -> float:
        """It runs anew in each prompt: what stands in the loop is no input of it."""
        return float("nan")

    @classmethod
    def execute(cls, first: int, step: int, count: int) -> io.NodeOutput:
        prompt, start = cls.hidden.dynprompt, cls.hidden.unique_id
        own = prompt.get_original_prompt()
        end = next(node for node in own if own[node]["class_type"] == "TestEndLoop")
        result, body = own[end]["inputs"]["value"], cls._behind(own, start) - {end}
        graph, results = GraphBuilder(), []
        for i in range(count):
            copies = {node: graph.node(own[node]["class_type"], f"{i}_{node}") for node in body}
            for node, one in copies.items():
                one.set_override_display_id(node)
                for name, value in own[node]["inputs"].items():
                    one.set_input(name, cls._copied(value, copies, start, first + i * step))
            results.append(copies[result[0]].out(result[1]))
        for other in results[1:]:
            results[0] = graph.node("LatentBatch", samples1=results[0], samples2=other).out(0)
        inputs = {name: value for name, value in own[end]["inputs"].items() if name != "value"}
        prompt.ephemeral_prompt[end] = {"class_type": own[end]["class_type"], "inputs": inputs}
        return io.NodeOutput(first, results[0], expand=graph.finalize())

    @staticmethod
    def _behind(prompt: dict, start: str) -> set[str]:
        """The nodes that depend on another one, but for what stands behind the loop."""
        found, before = {start}, -1
        while before != len(found):
            before = len(found)
            found |= {n for n in prompt for value in prompt[n]["inputs"].values()
                      if is_link(value) and value[0] in found and prompt[value[0]]["class_type"] != "TestEndLoop"}
        return found - {start}

    @staticmethod
    def _copied(value: object, copies: dict, start: str, number: int) -> object:
        if not is_link(value):
            return value
        if value[0] == start:
            return number
        return copies[value[0]].out(value[1]) if value[0] in copies else value


class TestEndLoop(io.ComfyNode):
    """Hands on what the iterations of a loop made; never asks for the nodes that they are copies of."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestEndLoop", display_name="Test End Loop", category=CATEGORY,
            inputs=[
                io.Latent.Input("value", optional=True, lazy=True, tooltip="The link into the loop."),
                io.Latent.Input("results", tooltip="From the node that starts it."),
            ],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def check_lazy_status(cls, **_: object) -> list[str]:
        return []

    @classmethod
    def execute(cls, results: dict, value: dict | None = None) -> io.NodeOutput:
        return io.NodeOutput(results)


class TestSampler(io.ComfyNode):
    """A node that puts two of ComfyUI's samplers in its place, one after the other."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestSampler", display_name="Test Sampler", category=CATEGORY, enable_expand=True,
            inputs=[io.Model.Input("model"), io.Conditioning.Input("positive"), io.Conditioning.Input("negative"),
                    io.Latent.Input("latent_image"), io.Int.Input("steps", default=2, min=1, max=100)],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, latent_image: dict, **given: object) -> io.NodeOutput:
        graph, latent = GraphBuilder(), latent_image
        options = {"cfg": 5.0, "sampler_name": "euler", "scheduler": "normal", "denoise": 0.7}
        for seed in range(2):
            latent = graph.node("KSampler", **given, **options, seed=seed, latent_image=latent).out(0)
        return io.NodeOutput(latent, expand=graph.finalize())


class TestPictures(io.ComfyNode):
    """Tells which pictures an engine node found in the prompt."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestPictures", display_name="Test Pictures", category=CATEGORY,
            inputs=[ENGINE.Input("engine")], outputs=[ENGINE.Output()],
        )

    @classmethod
    def execute(cls, engine: object) -> io.NodeOutput:
        pictures = [[p.width, p.height, *p.batches] for p in engine.choice.pictures]
        return io.NodeOutput(engine, ui={"pictures": pictures})


class TestModelsAlive(io.ComfyNode):
    """How many UNets and ControlNets live in this process, whoever holds them."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestModelsAlive", display_name="Test Models Alive", category=CATEGORY, is_output_node=True,
            inputs=[
                io.Int.Input("turn", default=0, min=0, max=MAX_SEED),
                io.Latent.Input("after", optional=True, tooltip="To be counted when this is there."),
            ],
            outputs=[],
        )

    @classmethod
    def execute(cls, turn: int, after: dict | None = None) -> io.NodeOutput:
        alive = [type(found).__name__ for found in gc.get_objects() if type(found) in (UNetModel, ControlNet)]
        return io.NodeOutput(ui={"alive": [alive.count("UNetModel"), alive.count("ControlNet")]})


class TestNodes(ComfyExtension):
    """What ComfyUI asks for the nodes of this pack."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [
            TestConditioning, TestEndLoop, TestImage, TestModelsAlive, TestPictures, TestSampleTwice, TestSampler,
            TestSaveLatent, TestSecondDevice, TestStartLoop, TestToyModel, TestUnionControlNet,
            *other_packs_controls.NODES, *other_packs_models.NODES, *other_packs_sampling.NODES,
            *other_packs_weights.NODES,
        ]


async def comfy_entrypoint() -> TestNodes:
    """Called by ComfyUI when it loads the pack."""
    return TestNodes()
