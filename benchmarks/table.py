"""Tables, a regression check and plots from result files.

    python benchmarks/table.py benchmarks/results/h200.json
    python benchmarks/table.py new.json --against old.json
    python benchmarks/table.py benchmarks/results/h200.json --plot docs/images/speed.png --page
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLUMNS = ("native_ms", "graph_ms", "engine_ms", "floor_ms", "rel_err", "vram_ratio", "host_us")
TOLERANCE = 1.08
"""A time may grow by this factor from one file to the next before it counts as slower."""


def name(row: dict[str, Any]) -> str:
    """Return a row's case, with ComfyUI's way to load weights where rows differ in it."""
    return row["case"] + (f" ({row['mode']})" if "mode" in row else "")


def cell(value: Any) -> str:
    """Return a number as the tables show it."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < abs(value) < 0.01 else f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return all rows as a Markdown table, with the speed-up over native."""
    lines = ["| case | " + " | ".join(COLUMNS) + " | speed-up |", "|---" * (len(COLUMNS) + 2) + "|"]
    for row in rows:
        if "native_ms" not in row:
            continue
        ratio = f"{row['native_ms'] / row['engine_ms']:.1f}x" if row.get("engine_ms") else ""
        lines.append(f"| {name(row)} | " + " | ".join(cell(row.get(c)) for c in COLUMNS) + f" | {ratio} |")
    return "\n".join(lines)


WORDS = {
    "sd15_ksampler_2cn (default)": "SD1.5 512 px: a whole prompt, 20 steps, 2 ControlNets",
    "sd15_ksampler_2cn (disable-dynamic-vram)": "the same with `--disable-dynamic-vram`",
    "sd15_step_2cn": "SD1.5 512 px: a sampling step, 2 ControlNets",
    "sd15_step_4cn": "SD1.5 512 px: a sampling step, 4 ControlNets",
    "sd15_unet": "SD1.5 512 px: the UNet", "sd15_controlnet": "SD1.5 512 px: one ControlNet",
    "sdxl_step_2cn": "SDXL 1024 px: a sampling step, 2 ControlNets",
    "sdxl_unet": "SDXL 1024 px: the UNet", "sdxl_controlnet": "SDXL 1024 px: one ControlNet",
}
"""Rows of docs/performance.md, in its words."""

PLOTTED = ("sd15_ksampler_2cn (disable-dynamic-vram)", "sd15_step_2cn", "sd15_unet", "sd15_controlnet",
           "sdxl_step_2cn", "sdxl_unet", "sdxl_controlnet")
PLOT_WORDS = WORDS | {PLOTTED[0]: "SD1.5 512 px: a whole prompt, 20 steps, 2 ControlNets"}

MARKS = ("<!-- speed: made by benchmarks/table.py -->\n", "<!-- end of speed -->\n")


def _told(row: dict[str, Any], column: str) -> str:
    """Return how many times faster than a column the engine is."""
    return f"{row[column] / row['engine_ms']:.1f}x" if row.get(column) else ""


def for_page(data: dict[str, Any]) -> str:
    """Return the rows of docs/performance.md, and the machine that they were measured on."""
    meta, rows = data["meta"], {name(row): row for row in data["rows"]}
    said = (f"Milliseconds on an {meta['gpu']}, torch {meta['torch']}, ComfyUI {meta['comfyui']}. Half precision, one "
            "image with CFG (batch 2), random weights, medians. Normal model and engine were measured in one run. "
            "Networks and steps are measured with `--disable-dynamic-vram`, which is the normal model's faster way.")
    lines = [*textwrap.wrap(said, 118, break_on_hyphens=False), "",
             "| measured | normal | CUDA graph, no build | `torch` engine | faster than normal | than the graph | "
             "relative error |", "|---" * 7 + "|"]
    for case, words in WORDS.items():
        row = rows[case]
        times = [cell(row.get(column)) for column in ("native_ms", "graph_ms", "engine_ms")]
        cells = [*times, f"**{_told(row, 'native_ms')}**", _told(row, "graph_ms"), cell(row["rel_err"])]
        lines.append(f"| {words} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


PAGE = "docs/performance.md"
"""Has figures between the marks."""


def refit(page: Path, text: str) -> None:
    """Replace the text between the marks."""
    before, rest = page.read_text(encoding="utf-8").split(MARKS[0])
    page.write_text(before + MARKS[0] + text + MARKS[1] + rest.split(MARKS[1])[1], encoding="utf-8")


def regressions(new: list[dict[str, Any]], old: list[dict[str, Any]]) -> list[str]:
    """Return a sentence for each figure that got worse. Native's own times are not compared."""
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


def plot(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Draw bars: the part of native's time that the CUDA graph and the engine take."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = {name(row): row for row in rows}
    shown = [found[case] for case in PLOTTED]
    figure, axes = plt.subplots(figsize=(9, 0.62 * len(shown) + 1.3))
    columns = (("native_ms", "#a5a5a5", "ComfyUI alone (normal)"),
               ("graph_ms", "#5b9bd5", "torch at once: a CUDA graph, no build"),
               ("engine_ms", "#4caf6a", "torch after a build"))
    for column, colour, label in columns:
        axes.barh([-1], [0], color=colour, label=label)
        for y, row in enumerate(shown):
            if not row.get(column):
                continue
            there = [one for one, _, _ in columns if row.get(one)]
            at = y + (there.index(column) - (len(there) - 1) / 2) * 0.27
            part = row[column] / row["native_ms"]
            axes.barh(at, part, height=0.25, color=colour)
            words = f"{cell(row[column])} ms"
            if column == "engine_ms":
                words += f":  {row['native_ms'] / row[column]:.1f}x as fast"
            axes.text(part + 0.01, at, words, va="center", fontsize=8, weight="bold" if column == "engine_ms" else None)
    axes.set_yticks(range(len(shown)), [PLOT_WORDS[name(row)] for row in shown], fontsize=9)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(0, 1.12)
    axes.set_xticks([])
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.set_title(title, fontsize=10)
    figure.legend(fontsize=9, loc="lower center", ncols=3, frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--against", type=Path, help="an older file: exit with 1 when something got worse")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--page", action="store_true", help=f"put the table between the marks of {PAGE}")
    options = parser.parse_args()
    data = json.loads(options.results.read_text(encoding="utf-8"))
    sys.stdout.write(markdown(data["rows"]) + "\n")
    if options.plot:
        gpu, torch = data["meta"].get("gpu", ""), data["meta"].get("torch", "")
        plot(data["rows"], options.plot, f"Time on an {gpu} (torch {torch}); shorter is better")
    if options.page:
        refit(Path(__file__).resolve().parent.parent / PAGE, for_page(data))
    if options.against:
        found = regressions(data["rows"], json.loads(options.against.read_text(encoding="utf-8"))["rows"])
        sys.stdout.write("\n".join(found) + "\n" if found else "nothing got worse\n")
        return int(bool(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
