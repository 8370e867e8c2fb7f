"""Tables, a regression check and plots from result files.

    python benchmarks/table.py benchmarks/results/h200.json
    python benchmarks/table.py new.json --against old.json
    python benchmarks/table.py benchmarks/results/h200.json --plot docs/images/speed.png --readme README.md
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

COLUMNS = ("native_ms", "graph_ms", "engine_ms", "floor_ms", "rel_err", "vram_ratio", "host_us")
TOLERANCE = 1.08
"""A time may grow by this factor from one file to the next before it counts as slower."""


def name(row: dict[str, Any]) -> str:
    """A row's case, with ComfyUI's way to load weights where that differs."""
    return row["case"] + (f" ({row['mode']})" if "mode" in row else "")


def cell(value: Any) -> str:
    """A number as the table shows it."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < abs(value) < 0.01 else f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)


def markdown(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table, with how many times faster than native the engine is."""
    lines = ["| case | " + " | ".join(COLUMNS) + " | speed-up |", "|---" * (len(COLUMNS) + 2) + "|"]
    for row in rows:
        if "native_ms" not in row:
            continue
        ratio = f"{row['native_ms'] / row['engine_ms']:.1f}x" if row.get("engine_ms") else ""
        lines.append(f"| {name(row)} | " + " | ".join(cell(row.get(c)) for c in COLUMNS) + f" | {ratio} |")
    return "\n".join(lines)


WORDS = {
    "sd15_unet": "SD1.5 512 px: UNet with residuals", "sd15_controlnet": "SD1.5 512 px: one ControlNet",
    "sd15_step_2cn": "SD1.5 512 px: a sampling step, 2 ControlNets",
    "sd15_step_4cn": "SD1.5 512 px: a sampling step, 4 ControlNets",
    "sd15_ksampler_2cn (default)": "SD1.5 512 px: a whole prompt, 20 steps, 2 ControlNets",
    "sd15_ksampler_2cn (disable-dynamic-vram)": "the same with `--disable-dynamic-vram`",
    "sdxl_unet": "SDXL 1024 px: UNet with residuals", "sdxl_controlnet": "SDXL 1024 px: one ControlNet",
    "sdxl_step_2cn": "SDXL 1024 px: a sampling step, 2 ControlNets",
}
"""The rows that the README shows, in its words."""

AUTO = """
What `auto` takes, and what is known of it:

| card | `auto` | known |
|---|---|---|
| {gpu} | `torch`: a CUDA graph at once, compiled after a build | measured by us, the table above |
| other NVIDIA data-centre cards, GeForce and RTX | the same | not measured by us |
| the same, with an engine of TensorRT or -RTX | it, where it proved faster there | 8.6, H200: slower than `torch` |
| no GPU | `onnxruntime` on the CPU | run in our tests, about as fast as native |
| AMD, Intel and Apple GPUs | native | no backend of ours runs there |
"""
"""Table of what users of each kind of card get; the figures' own card is filled in."""

MARKS = ("<!-- speed: made by benchmarks/table.py -->\n", "<!-- end of speed -->\n")


def for_readme(data: dict[str, Any]) -> str:
    """Return what the README says: the most telling rows, and on what they were measured."""
    meta, rows = data["meta"], {name(row): row for row in data["rows"]}
    said = (f"Milliseconds on an {meta['gpu']}, torch {meta['torch']}, ComfyUI {meta['comfyui']}, fp16, batch 2 (one "
            "image with CFG), random weights, medians, native and engine in one run. Networks and steps are measured "
            "with `--disable-dynamic-vram`, which is native's faster way:")
    lines = [*textwrap.wrap(said, 118), "",
             "| what | native | CUDA graph, no build | `torch` engine | faster than native | than the graph | "
             "relative error |", "|---" * 7 + "|"]
    for case, words in WORDS.items():
        row = rows[case]
        times = [row["native_ms"], row.get("graph_ms"), row["engine_ms"]]
        native, graph = (f"{time / times[-1]:.1f}x" if time else "" for time in times[:-1])
        cells = [*map(cell, times), f"**{native}**", graph, cell(row["rel_err"])]
        lines.append(f"| {words} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n" + AUTO.format(gpu=meta["gpu"])


def refit(readme: Path, text: str) -> None:
    """Replace what stands between the marks."""
    old = readme.read_text(encoding="utf-8")
    before, rest = old.split(MARKS[0])
    readme.write_text(before + MARKS[0] + text + MARKS[1] + rest.split(MARKS[1])[1], encoding="utf-8")


def regressions(new: list[dict[str, Any]], old: list[dict[str, Any]]) -> list[str]:
    """List what got slower or less exact than before, a sentence each; native times are not compared."""
    before = {name(row): row for row in old}
    found = []
    for row in new:
        reference = before.get(name(row), {})
        for column in ("graph_ms", "engine_ms", "host_us", "vram_ratio"):
            if row.get(column) and reference.get(column) and row[column] > reference[column] * TOLERANCE:
                found.append(f"{name(row)}: {column} rose from {reference[column]} to {row[column]}")
        if row.get("rel_err", 0) > max(1e-2, 2 * reference.get("rel_err", 1)):
            found.append(f"{name(row)}: rel_err is {row['rel_err']:.1e}")
    return found


def plot(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """The README's rows as bars: the part of native's time that the graph and the engine take, with milliseconds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [row for row in rows if name(row) in WORDS]
    figure, axes = plt.subplots(figsize=(9, 0.62 * len(shown) + 1.2))
    for i, (column, colour) in enumerate((("native_ms", "#999999"), ("graph_ms", "#5b9bd5"), ("engine_ms", "#70ad47"))):
        for y, row in enumerate(shown):
            if row.get(column):
                part = row[column] / row["native_ms"]
                axes.barh(y + (i - 1) * 0.28, part, height=0.26, color=colour,
                          label=column[:-3] if y == 0 else None)
                axes.text(part + 0.01, y + (i - 1) * 0.28, f"{cell(row[column])} ms", va="center", fontsize=7)
    axes.set_yticks(range(len(shown)), [WORDS[name(row)].replace("`", "") for row in shown], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12)
    axes.set_xlabel("time, native = 1")
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--against", type=Path, help="an older file: exit with 1 when something got worse")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--readme", type=Path, help="put the table for users between the marks in this file")
    options = parser.parse_args()
    data = json.loads(options.results.read_text(encoding="utf-8"))
    sys.stdout.write(markdown(data["rows"]) + "\n")
    if options.plot:
        plot(data["rows"], options.plot, f"{data['meta'].get('gpu', '')}, torch {data['meta'].get('torch', '')}")
    if options.readme:
        refit(options.readme, for_readme(data))
    if options.against:
        found = regressions(data["rows"], json.loads(options.against.read_text(encoding="utf-8"))["rows"])
        sys.stdout.write("\n".join(found) + "\n" if found else "nothing got worse\n")
        return int(bool(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
