"""Full-size models with random weights: speed does not depend on what the weights say.

    python benchmarks/models.py full_sd15 full_sd15_a --comfyui ~/ComfyUI --base /tmp/benchmark
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import tiny_models
import tiny_recipes
from tiny_recipes import Part, Recipe

_SD15 = tiny_recipes.SD15 | {"channel_mult": [1, 2, 4, 4], "num_res_blocks": [2] * 4,
                            "transformer_depth": [1] * 6 + [0] * 2, "transformer_depth_middle": 1,
                            "transformer_depth_output": [1] * 9 + [0] * 3}
_SDXL = tiny_recipes.SDXL | {"channel_mult": [1, 2, 4], "num_res_blocks": [2] * 3,
                            "transformer_depth": [0, 0, 2, 2, 10, 10], "transformer_depth_middle": 10,
                            "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10]}
CONFIGS = {"sd15": _SD15, "sdxl": _SDXL}
RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (
    Recipe("checkpoints/full_sd15.safetensors", (
        Part("unet", 1, _SD15, "model.diffusion_model."), Part("vae", 2, {}, "first_stage_model."),
        Part("clip_l", 3, {}, "cond_stage_model.transformer."))),
    Recipe("diffusion_models/full_sdxl.safetensors", (Part("unet", 4, _SDXL),)),
    *(Recipe(f"diffusion_models/full_sdxl_{name}.safetensors", (Part("quantised_unet", 4, _SDXL | {"format": kind}),))
      for name, kind in (("fp8", "float8_e4m3fn"), ("int8", "int8_tensorwise"))),
    Recipe("vae/full_kl.safetensors", (Part("vae", 2),)),
    Recipe("vae/full_taesd.safetensors", (Part("taesd", 3, {"scale": 0.18215}),)),
    *(Recipe(f"controlnet/full_sd15_{name}.safetensors", (Part("controlnet", 10 + i, _SD15, "control_model."),))
      for i, name in enumerate("abcd")),
    *(Recipe(f"controlnet/full_sdxl_{name}.safetensors", (Part("controlnet", 20 + i, _SDXL, "control_model."),))
      for i, name in enumerate("ab")),
)}


def make(comfyui: Path, base: Path, names: list[str] | None = None) -> dict[str, Path]:
    """Make models and control images below a base directory; what is there already stays."""
    if str(comfyui) not in sys.path:
        sys.path.append(str(comfyui))
    tiny_models.make_images(base / "input")
    return tiny_models.make(base / "models", names, lambda text: print(text, flush=True), RECIPES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=RECIPES)
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--base", type=Path, required=True)
    options = parser.parse_args()
    make(options.comfyui, options.base, options.names)


if __name__ == "__main__":
    main()
