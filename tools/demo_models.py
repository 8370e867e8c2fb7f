"""Small trained models for the demo and the tests: a checkpoint of SD1.5's kind, an edge ControlNet, ten emoji.

``trained_emoji/README.md`` says where they are from.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from train_demo import ENCODER, FILES, SIDE, edges, pixels, unpack
from workflow_recipes import with_tiny_models
from workflow_to_prompt import ObjectInfo, Workflow, set_widget

TOOLS = Path(__file__).resolve().parent
FOLDER = TOOLS / "trained_emoji"
CHECKPOINT, CONTROLNET = "trained_emoji.safetensors", Path(FILES["controlnet"]).name
EMOJI = ("butterfly", "castle", "hamburger", "lighthouse", "octopus", "penguin", "rocket", "sunflower", "teapot",
         "red apple")  # fmt: skip
"""Names of the pictures in emoji.png, from left to right."""
STEPS, CFG = 20, 4.0
PREFIX = {"unet": "model.diffusion_model.", "vae": "first_stage_model.", "encoder": "cond_stage_model.transformer."}


def emoji() -> dict[str, numpy.ndarray]:
    """Return some pictures that the models were trained on, (128, 128, 3) from 0 to 255, by name."""
    with Image.open(FOLDER / "emoji.png") as file:
        pictures = numpy.asarray(file.convert("RGB"))
    return dict(zip(EMOJI, numpy.split(pictures, pictures.shape[1] // SIDE, axis=1), strict=True))


def edges_of(name: str) -> str:
    """Return the name of the input file with an emoji's edges."""
    return f"edges_{name.replace(' ', '_')}.png"


def put(comfyui: Path, base: Path) -> None:
    """Write the trained models, and the edges of each emoji, where a ComfyUI finds them."""
    models = base / "models"
    command = ["--comfyui", str(comfyui), "--models", str(models), ENCODER]
    subprocess.run([sys.executable, str(TOOLS / "tiny_models.py"), *command], check=True, stdout=subprocess.DEVNULL)
    unpack(FOLDER / "demo.safetensors", models)
    files = FILES | {"encoder": f"text_encoders/{ENCODER}.safetensors"}
    whole = {PREFIX[kind] + key: value for kind in PREFIX for key, value in load_file(models / files[kind]).items()}
    for folder in (models / "checkpoints", base / "input"):
        folder.mkdir(exist_ok=True)
    save_file(whole, models / "checkpoints" / CHECKPOINT)
    for name, picture in emoji().items():
        (found,) = edges(pixels(torch.tensor(picture)[None], slice(None)))
        image = Image.fromarray((255 * found).byte().permute(1, 2, 0).numpy())
        image.save(base / "input" / edges_of(name))


def with_trained_models(workflow: Workflow, object_info: ObjectInfo, name: str = EMOJI[0]) -> Workflow:
    """A copy of a shipped SD1.5 workflow that paints an emoji by its name and its edges."""
    workflow = with_tiny_models(workflow, object_info, (Path(CONTROLNET).stem,) * 2)
    for node, widget, value in (
        ("CheckpointLoaderSimple", "ckpt_name", CHECKPOINT), ("LoadImage", "image", edges_of(name)),
        ("Prompt", "text", name), ("Negative prompt", "text", ""),  # trained as what a prompt is compared with
        ("KSampler", "steps", STEPS), ("KSampler", "cfg", CFG),
    ):
        set_widget(workflow, node, widget, value, object_info)
    return workflow
