"""Count the share of clicks on ComfyUI's templates whose diffusion models engines serve.

    python tools/environment.py run -- python tools/template_clicks.py

The index of ``comfyui-workflow-templates`` has the recent clicks on each template. A template of open models counts by
the files that its loaders name; it is served if engines serve one of them. Templates without such a file are left out.
"""

from __future__ import annotations

import json
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SERVED = {
    "MiniMax H3": r"^minimax_h3",
    "LTX-2": r"^ltx-2(\.[35])?-",
    "Qwen-Image 2.1": r"^qwen_image_2\.1",
    "Z-Image": r"^z_image",
    "Wan": r"^wan2\.[12]_(?!.*(SCAIL|bernini|animate))",
    "Krea 2": r"^krea2",
    "Qwen-Image": r"^(qwen_image(_edit)?(_25\d\d)?_(fp8|int8|bf16)|FireRed-Image-Edit)",
    "Flux.2": r"^flux-?2",
    "Flux.1": r"^flux1-",
    "Anima": r"^anima",
    "HunyuanVideo 1.5": r"^hunyuanvideo1\.5",
    "SD1.5 and SDXL": r"^(sd_xl|sdxl|v1-5|sd-?v?1\.?5|dreamshaper)",
}
"""Family -> the beginning of its files' names."""

LOADERS = frozenset({"UNETLoader", "CheckpointLoaderSimple", "ImageOnlyCheckpointLoader"})


def templates() -> Path:
    """Return the folder of the installed templates."""
    return next(Path(sysconfig.get_paths()["purelib"]).glob("comfyui_workflow_templates*/templates/index.json")).parent


def diffusion_files(workflow: dict[str, Any]) -> set[str]:
    """Return the names of the files that a workflow's diffusion loaders name, also in subgraphs."""
    graphs = [workflow, *workflow.get("definitions", {}).get("subgraphs", ())]
    named = (node.get("widgets_values") for graph in graphs for node in graph.get("nodes", ())
             if node["type"] in LOADERS)  # fmt: skip
    return {str(values[0]).rpartition("/")[2] for values in named if isinstance(values, list) and values}


def family_of(file: str) -> str | None:
    """Return the served family of a file, or None."""
    return next((name for name, start in SERVED.items() if re.match(start, file, re.IGNORECASE)), None)


def clicks(folder: Path) -> Iterator[tuple[int, str, str | None]]:
    """Iterate over each open template's clicks, its name or its first diffusion file, and its served family."""
    groups = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    for entry in (one for group in groups for one in group["templates"] if one.get("openSource", True)):
        file = folder / f"{entry['name']}.json"
        files = sorted(diffusion_files(json.loads(file.read_text(encoding="utf-8")))) if file.exists() else []
        if files:
            family = next(filter(None, map(family_of, files)), None)
            yield entry.get("usage", 0), files[0], family


def main() -> None:
    served, left = Counter(), Counter()
    for count, file, family in clicks(templates()):
        (left if family is None else served)[family or file] += count
    total = served.total() + left.total()
    print(f"{served.total() / total:.1%} of {total} clicks on templates of open models")
    for title, found in (("served", served), ("not served", left)):
        print(f"\n{title}")
        for name, count in found.most_common(20):
            print(f"  {count / total:6.1%}  {name}")


if __name__ == "__main__":
    main()
