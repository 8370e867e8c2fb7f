"""Schemas of the nodes: inputs, outputs and words. Of ComfyUI it needs only the API that defines nodes."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from .. import node_names
from ..architectures.shapes import MOST, PRECISIONS, TOKEN_STEP, VAE_SETTINGS
from ..backends import AUTO, backends

MAX_ROWS = 16
UNetEngine = io.Custom("TRT_UNET_ENGINE")

SEARCHED_FOR = ["tensorrt", "speed", "speed up", "fast", "faster", "accelerate", "optimize", "compile", "engine"]
"""Search words of users who want a faster workflow: they find TRT Accelerate."""

BUILT_IN, REPLACEABLE = "built in", "replaceable"
"""Weights of an engine: a model's with its LoRAs, or the sampled model's."""

ONE_GPU, ALL_GPUS = "one", "all"


def node_schema(**given: Any) -> io.Schema:
    """Return a node's schema with our category; unless given, its hidden inputs are its id and the prompt."""
    hidden = [io.Hidden.unique_id, io.Hidden.dynprompt]
    return io.Schema(**{"category": "Hybrid TRT", "hidden": hidden, **given})


def accelerate() -> io.Schema:
    """TRT Accelerate."""
    control = "Runs on an engine of its own and comes out of the output of the same name."
    return node_schema(
        node_id=node_names.ACCELERATE,
        display_name="TRT Accelerate",
        description="Makes a workflow faster: the model and its ControlNets run on compiled engines, with the same "
        "picture. Wire it behind the model loader and its LoRAs, and run: engines are built meanwhile.",
        search_aliases=SEARCHED_FOR,
        inputs=[
            io.Model.Input("model", tooltip="Behind the loader and its LoRAs."),
            *_settings(),
            io.Combo.Input(
                "gpus",
                display_name="GPUs",
                options=[ONE_GPU, ALL_GPUS],
                default=ONE_GPU,
                tooltip="all: each GPU computes a part of each step, as behind MultiGPU CFG Split. Videos gain most. "
                "Most models need a build of their own for it.",
                advanced=True,
                optional=True,  # older saved prompts have none
            ),
            io.Vae.Input("vae", optional=True, tooltip="Decodes and encodes on engines of its own."),
            *(io.ControlNet.Input(name, optional=True, tooltip=control) for name in node_names.CONTROL_INPUTS),
        ],
        outputs=[
            io.Model.Output("model_out", display_name="model"),
            io.Vae.Output("vae_out", display_name="vae"),
            *(io.ControlNet.Output(f"{name}_out", display_name=name) for name in node_names.CONTROL_INPUTS),
        ],
    )


def unet_engine() -> io.Schema:
    """TRT UNet Engine."""
    return node_schema(
        node_id=node_names.UNET_ENGINE,
        display_name="TRT UNet Engine",
        description="Finds the compiled engine for this model in models/trt_engines, or builds it. LoRAs "
        "before this node are built into the engine. Wire the engine into TRT Sampler Patch.",
        search_aliases=["tensorrt unet", "compile unet", "trt model"],
        inputs=[io.Model.Input("model"), *_settings()],
        outputs=[UNetEngine.Output("engine", display_name="engine")],
    )


def controlnet_engine() -> io.Schema:
    """TRT ControlNet Engine."""
    return node_schema(
        node_id=node_names.CONTROLNET_ENGINE,
        display_name="TRT ControlNet Engine",
        description="Finds the compiled engine for this ControlNet in models/trt_engines, or builds it. The output "
        "works in TRT Apply ControlNet and in ComfyUI's own Apply ControlNet nodes.",
        search_aliases=["tensorrt controlnet", "compile controlnet", "trt control"],
        inputs=[io.ControlNet.Input("control_net"), *_settings()],
        outputs=[io.ControlNet.Output("control_net_out", display_name="control_net")],
    )


def vae_engine() -> io.Schema:
    """TRT VAE Engine."""
    return node_schema(
        node_id=node_names.VAE_ENGINE,
        display_name="TRT VAE Engine",
        description="Decodes and encodes pictures and videos on compiled engines. Wire it behind the loader of the "
        "VAE; the output works in all of ComfyUI's VAE nodes. Sound is decoded at normal speed.",
        search_aliases=["tensorrt vae", "compile vae", "fast vae decode"],
        inputs=[io.Vae.Input("vae"), *(setting for setting in _settings() if setting.id in VAE_SETTINGS)],
        outputs=[io.Vae.Output("vae_out", display_name="vae")],
    )


def sampler_patch() -> io.Schema:
    """TRT Sampler Patch."""
    return node_schema(
        node_id=node_names.SAMPLER_PATCH,
        display_name="TRT Sampler Patch",
        description="Runs the model on its engine, ControlNets included. Every step that the engine cannot take "
        "runs at normal speed. Wire the model into any sampler.",
        search_aliases=["tensorrt sampler", "trt model patch"],
        inputs=[
            io.Model.Input("model"),
            UNetEngine.Input(
                "engine", optional=True, tooltip="From TRT UNet Engine. Without it the model runs at normal speed."
            ),
        ],
        outputs=[io.Model.Output("model_out", display_name="model")],
    )


def apply_controlnet() -> io.Schema:
    """TRT Apply ControlNet."""
    options = [
        io.DynamicCombo.Option(str(count), [i for n in range(1, count + 1) for i in _row_inputs(n)])
        for count in range(1, MAX_ROWS + 1)
    ]
    return node_schema(
        node_id=node_names.APPLY_CONTROLNET,
        display_name="TRT Apply ControlNet",
        description="Applies several ControlNets at once, each with its own image, strength and range. Rows may be "
        "engine-backed (TRT ControlNet Engine) or plain. For more rows, chain a second node.",
        search_aliases=["controlnet stack", "multi controlnet", "tensorrt controlnet apply"],
        inputs=[
            io.Conditioning.Input("positive"),
            io.Conditioning.Input("negative"),
            io.DynamicCombo.Input("rows", options=options, tooltip="How many ControlNets to stack."),
            io.Vae.Input("vae", optional=True, tooltip="Only for ControlNets that need one."),
        ],
        outputs=[
            io.Conditioning.Output("positive_out", display_name="positive"),
            io.Conditioning.Output("negative_out", display_name="negative"),
        ],
    )


def report() -> io.Schema:
    """TRT Report."""
    anything = io.MatchType.Template("after")
    return node_schema(
        node_id=node_names.REPORT,
        display_name="TRT Report",
        description="Place it after the sampler: it passes its input on and says how many steps of each model were "
        "accelerated, how many ran at normal speed and why, and how long they took.",
        search_aliases=["engine statistics", "fallback reasons", "what ran where"],
        inputs=[
            io.MatchType.Input(
                "after",
                display_name="latent or any",
                template=anything,
                tooltip="The sampler's latent, or any later value.",
            ),
            io.Boolean.Input(
                "time_calls",
                display_name="measure times",
                default=True,
                optional=True,  # prompts from before this input stay valid
                tooltip="Measure how long each step takes; that costs no time.",
            ),
            io.String.Input(
                "comparison",
                optional=True,
                force_input=True,
                tooltip="The text of TRT Compare: its figures become a line of this report. What is compared must not "
                "come out of this report.",
            ),
        ],
        outputs=[
            io.MatchType.Output(template=anything, id="after_out", display_name="latent or any"),
            io.String.Output("report", display_name="report"),
            io.Image.Output(
                "plot",
                display_name="chart",
                tooltip="Each step of each model: accelerated or at normal speed, and how long.",
            ),
        ],
        is_output_node=True,
    )


def compare() -> io.Schema:
    """TRT Compare."""
    return node_schema(
        node_id=node_names.COMPARE,
        display_name="TRT Compare",
        description="Shows how far an accelerated picture is from the normal one: PSNR, SSIM, the largest difference "
        "of a pixel, and the difference as a picture. Sample twice with the same seed, once without TRT nodes.",
        search_aliases=["psnr", "ssim", "image difference", "compare images", "with and without"],
        inputs=[
            io.Image.Input("normal", tooltip="The picture that was made without engines."),
            io.Image.Input("accelerated", tooltip="The same picture, made with engines: the same size and number."),
            io.Int.Input(
                "amplify",
                display_name="brighter",
                default=0,
                min=0,
                max=1000,
                tooltip="How many times as bright the difference is shown; 0 chooses.",
            ),
        ],
        outputs=[
            io.Image.Output("difference", display_name="difference"),
            io.String.Output("text", display_name="text"),
            io.Float.Output("psnr", display_name="PSNR", tooltip="In dB; infinite when no value differs."),
            io.Float.Output("ssim", display_name="SSIM", tooltip="1 is the same picture. Needs torchmetrics."),
            io.Float.Output("largest", display_name="largest", tooltip="Largest difference of a pixel, 0 to 1."),
        ],
        hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo],
        is_output_node=True,
    )


def _settings() -> list[io.Input]:
    """Return the inputs after the model, the same on all engine nodes."""
    return [
        io.Combo.Input(
            node_names.WHEN_MISSING,
            display_name="If no engine yet",
            options=[AUTO, node_names.USE_NATIVE, node_names.BUILD_NOW, node_names.IN_BACKGROUND],
            default=AUTO,
            tooltip="What to do when the library has no engine for this model: run at normal speed; build one "
            "first; or run at normal speed and build one meanwhile, which the next prompt uses. auto builds "
            "meanwhile with the torch backend where the GPU has room, and runs at normal speed otherwise.",
        ),
        _size("min_size", "Smallest size", "Smallest width or height in pixels."),
        _size("opt_size", "Best size", "Size in pixels to be fastest at."),
        _size("max_size", "Largest size", "Largest width or height in pixels."),
        io.Int.Input(
            "max_images",
            display_name="Images at once",
            default=0,
            min=0,
            max=MOST["max_images"],
            tooltip="Largest batch size of the latent image; 0: one image.",
            advanced=True,  # the page names sizes by a preset
        ),
        io.Int.Input(
            "max_tokens",
            display_name="Prompt tokens",
            default=0,
            min=0,
            max=MOST["max_tokens"],
            step=TOKEN_STEP,
            tooltip=f"Longest prompt in tokens, in steps of {TOKEN_STEP}; 0: {3 * TOKEN_STEP}.",
            advanced=True,
        ),
        io.Combo.Input(
            "precision",
            display_name="Precision",
            options=[AUTO, *PRECISIONS],
            default=AUTO,
            tooltip="What the engine computes in; auto is what ComfyUI uses for this model.",
            advanced=True,
        ),
        io.Combo.Input(
            "backend",
            display_name="Backend",
            options=[AUTO, *backends()],
            default=AUTO,
            tooltip="Which library builds and runs the engine; auto takes the one that was the fastest on this GPU, "
            "else torch on NVIDIA GPUs and onnxruntime on the CPU, with which it also builds."
            + "".join(f" {name} is {backend.notice}." for name, backend in backends().items() if backend.notice),
            advanced=True,
        ),
        io.Combo.Input(
            "weights",
            display_name="Engine is for",
            options=[BUILT_IN, REPLACEABLE],
            default=BUILT_IN,
            tooltip="This model only, with the LoRAs before the node; or every model of this kind with any LoRA at any "
            "strength: then a change needs no build. The torch backend always is that way.",
            advanced=True,
            optional=True,  # older saved prompts have none
        ),
    ]


def _size(name: str, title: str, tooltip: str) -> io.Input:
    tooltip += " 0: what fits the model."
    return io.Int.Input(name, title, default=0, min=0, max=MOST[name], step=8, tooltip=tooltip, advanced=True)


def row_defaults(n: int) -> dict[str, float | None]:
    """Return the inputs of a row of TRT Apply ControlNet, with their defaults."""
    return {given.id: getattr(given, "default", None) for given in _row_inputs(n)}


def _row_inputs(n: int) -> list[io.Input]:
    part = {"min": 0.0, "max": 1.0, "step": 0.001}
    return [
        io.ControlNet.Input(f"control_net_{n}", optional=True, tooltip="Leave it open to skip this row."),
        io.Image.Input(f"image_{n}", optional=True, tooltip="The control image (edges, depth, pose ...)."),
        io.Float.Input(f"strength_{n}", default=1.0, min=0.0, max=10.0, step=0.01, tooltip="0 switches the row off."),
        io.Float.Input(f"start_{n}", default=0.0, **part, tooltip="Where in the sampling it starts to act, 0 to 1."),
        io.Float.Input(f"end_{n}", default=1.0, **part, tooltip="Where in the sampling it stops acting, 0 to 1."),
    ]
