"""Tables, a regression check and plots from result files.

    python benchmarks/table.py benchmarks/results/h200.json
    python benchmarks/table.py new.json --against old.json
    python benchmarks/table.py benchmarks/results/h200.json --plot docs/images/speed.png
"""

from __future__ import annotations

import argparse
import json
import sys
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


def regressions(new: list[dict[str, Any]], old: list[dict[str, Any]]) -> list[str]:
    """What got slower or less exact than before, a sentence each. Native times are not ours and are not compared."""
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
    """Bars of native, graph and engine times, each relative to native."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [row for row in rows if row.get("native_ms") and row.get("engine_ms")]
    figure, axes = plt.subplots(figsize=(9, 0.42 * len(shown) + 1.4))
    for i, (column, colour) in enumerate((("native_ms", "#999999"), ("graph_ms", "#5b9bd5"), ("engine_ms", "#70ad47"))):
        at = [y + (i - 1) * 0.27 for y in range(len(shown))]
        axes.barh(at, [row.get(column) or 0 for row in shown], height=0.25, color=colour, label=column[:-3])
    axes.set_yticks(range(len(shown)), [name(row) for row in shown], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("milliseconds (log scale)")
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--against", type=Path, help="an older file: exit with 1 when something got worse")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    data = json.loads(options.results.read_text(encoding="utf-8"))
    sys.stdout.write(markdown(data["rows"]) + "\n")
    if options.plot:
        plot(data["rows"], options.plot, f"{data['meta'].get('gpu', '')}, torch {data['meta'].get('torch', '')}")
    if options.against:
        found = regressions(data["rows"], json.loads(options.against.read_text(encoding="utf-8"))["rows"])
        sys.stdout.write("\n".join(found) + "\n" if found else "nothing got worse\n")
        return int(bool(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
