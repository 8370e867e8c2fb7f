"""Measured numbers on the pages are those of the result files, with the page's own rounding.

A number is a measurement where a unit follows it (ms, s, %, x, GB, a minute ...), or where it stands in a column of
COLUMNS. Sizes in pixels, versions, dates, counts and numbers in words are none.

* In a table, all numbers of a row come from one case of the result files that its section links. COLUMNS says which
  fields of the case a column shows.
* In a sentence, a line of figures.txt names the field of each number. UNHELD lists what no result file has.
"""

from __future__ import annotations

import fnmatch
import itertools
import json
import operator
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
HELD = ROOT / "tests" / "project" / "figures.txt"
PAGES = ["README.md", "farm/README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
NUMBER = re.compile(r"(?<![\w.-])\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?")
UNIT = r" ?(ms|s|%|GB|MB|times|(?:micro)?seconds?|minutes?|(?:pictures |frames )?a (?:second|minute))(?!\w)|x(?!\w)"
MEASURED = re.compile(rf"{NUMBER.pattern}(?:(?:, | to | and | or ){NUMBER.pattern})*(?:{UNIT}|(?<=e-\d))")
NAMES = ("case", "family", "network", "backend", "workers", "free_gb", "mode", "flags")
"""Keys that name an item of a list, apart from "blocks": what is compiled in blocks is a case of its own."""

Fields = dict[str, list[float]]
"""Path of a field, such as "zimage_1024 8/stock/warm" -> its number, or all numbers of its text."""

# ---------------------------------------------------------------------------------------------------- where numbers are
COLUMNS: dict[str, str] = {
    "normal": "{case}/native_ms | {case}/tensorrt_native_ms | {case}/stock/(.*warm|timed|last)",
    "`torch` engine": "{case}/engine_ms",
    "engine": "{case}/build first/(.*warm|last)",
    "with engines": "{case}/(default|build first)/(warm|last)",
    "faster": "{case}/native_ms : {case}/engine_ms",
    "kernels alone": "{case}/(native|engine)_kernels/all",
    "error": "{case}/rel_err",
    "error of the normal model": "{case}/error_native_fp32",
    "of the engine": "{case}/error_engine_fp32",
    "memory": "{case}/engine_peak_mb : {case}/native_peak_mb",
    "free": "{case}/build first/free_gb",
    "on the GPU": "{case}/build first/said",
    "normal, frames a second": "{case}/native_fps",
    "*TRT Stream*": "{case}/fps",
    "frame time: p50": "{case}/p50_ms",
    "p95": "{case}/p95_ms",
    "p99": "{case}/p99_ms",
    "TensorRT 8.6": "{case}/tensorrt_graph_ms",
    "relative error": "{case}/tensorrt_rel_err",
    "time to build": "(.*/)?{case}(_0)?_build/tensorrt_wall_s",
    "CUDA graph, no build": "{case}/graph_ms",
    "for one size": "one_size/{case}/engine_ms | {case}/engine_ms",
    "for every size": "{case}/engine_ms",
    "Z-Image: stock nodes": "zimage_1024/stock/.*",
    "Z-Image: *TRT Accelerate*": "zimage_1024/(default|build first)/.*",
    "Flux.1: stock nodes": "flux1_1024_fp8/stock/.*",
    "Flux.1: *TRT Accelerate*": "flux1_1024_fp8/(default|build first)/.*",
}
"""Title of a column -> paths of the fields that it shows, as a regular expression; "a : b" is the ratio of two."""

UNHELD = {
    "limits and needs, which the code or a card sets": (
        "1e-5", "8 to 24 GB", "with 16 GB and of Krea 2 with 12 GB are of", "card of 8 GB or more",
        "of which 8 GB were free", "took more than 150 seconds",
        "are 5 GB of free GPU memory, 10 GB of main memory and 9 GB of disk",
        "24 GB, 20 GB of disk and 10 minutes",
        "6 GB of downloads", "every 5 seconds", "40 seconds", "above 32 MB", "after 20 seconds", "within 0.1 s",
        "30 seconds",
        "`torch` 1 GB", "may be 1.2 times as far", "by more than 1 %", "about 1 GB",
        "takes 2 GB of main memory and 0.8 GB", "2.2 times the weights: 5 GB for SD1.5's UNet, 12 GB for SDXL's"),
    "ComfyUI's own estimate": ("frees 4.6 GB",),
    "others' own figures": ("is 8.7x as fast as 16 bits on a laptop's 16 GB",),
    "computed from sizes of layers": ("23 MB (SD 1.5, 512 px) or 210 MB",),
    "printed by a run whose result was not kept": (
        "takes 7 microseconds", "int8 checkpoints (1.5 %", "with a ControlNet (2.6 %", "by 5 to 18 %"),
}
"""Reason -> words with numbers that no result file has."""


# ---------------------------------------------------------------------------------------------------- the result files
def walk(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, float]]:
    """Return each number below a value with its path. Items of lists have their names in it, and "rows" is left out."""
    if isinstance(value, dict):
        name = " ".join(str(value[key]).removesuffix(".0") for key in NAMES if key in value)
        path += tuple(filter(None, (name + " blocks" * ("blocks" in value), value.get("way"))))
        for key, item in value.items():
            yield from walk(item, path + (key,) * (key != "rows"))
    elif isinstance(value, list):
        for item in value:
            kernel = isinstance(item, list) and item and isinstance(item[0], str)  # name, milliseconds, calls
            yield from walk(item[1], (*path, item[0])) if kernel else walk(item, path)
    elif isinstance(value, str):
        yield from (("/".join(path), float(number.replace(",", ""))) for number in NUMBER.findall(value))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield "/".join(path), float(value)


@cache
def fields(file: str) -> Fields:
    """Return the numbers of a result file by their paths."""
    found: Fields = {}
    for path, number in walk(json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))):
        found.setdefault(path, []).append(number)
    return found


def says(text: str, value: float) -> bool:
    """Return whether a number on a page is a rounding of a value, in its unit or in one of another scale."""
    mantissa, _, exponent = text.replace(",", "").partition("e")
    half = 0.5 * 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    scales = (value, value * 100, value * 100 - 100, value / 1e3, value / 1e9)  # %, % more, ms as s or MB as GB, bytes
    return any(abs(float(text.replace(",", "")) - scaled) <= half * 1.0001 for scaled in scales)


# ----------------------------------------------------------------------------------------------------------- the pages
class Section(NamedTuple):
    """A part of a page below a title: the result files that it links, its tables of figures, and all other words."""

    files: tuple[str, ...]
    tables: list[list[list[str]]]
    words: str


def sections(page: str) -> Iterator[Section]:
    """Return the sections of a page, without code and without what a tool makes: that tool's test compares it."""
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"```.*?```|<!-- (\w+): made by .*?<!-- end of \1 -->", "", text, flags=re.S)
    for section in re.split(r"^(?=## )", text, flags=re.M):
        linked = [path.stem for path in RESULTS.glob("*.json") if page == "README.md" or f"/{path.name}" in section]
        plain = re.sub(r"\]\([^)]*\)|\[|\*\*", "", section)
        tables: list[list[list[str]]] = []
        words: list[str] = []
        for is_table, lines in itertools.groupby(plain.splitlines(), lambda line: line.startswith("|")):
            if not is_table:
                words += lines
                continue
            titles, *rows = ([cell.strip() for cell in line.strip()[1:-1].split("|")] for line in lines)
            if held := {at for at, title in enumerate(titles) if at and title in COLUMNS}:
                tables.append([titles, *rows[1:]])
                held |= {0}  # says which case it is
            words += [cell for row in rows for at, cell in enumerate(row) if at not in held]
        yield Section(tuple(linked), tables, " ".join(" ".join(words).split()))


@cache
def shown(column: str, files: tuple[str, ...]) -> dict[str, list[float]]:
    """Return the values that a column may show, of each case. Those of "" are of a column with a case of its own."""
    found: dict[str, list[float]] = {}
    for way in column.split(" | "):
        sides: list[dict[str, list[float]]] = []
        for pattern in way.split(" : "):
            sides.append({})
            match = re.compile(pattern.replace("{case}", "(?P<case>[^/]+?)")).fullmatch
            for path, numbers in itertools.chain.from_iterable(fields(file).items() for file in files):
                if hit := match(path):
                    sides[-1].setdefault(hit.groupdict().get("case", ""), []).extend(numbers)
        for case, values in sides[0].items():
            ratios = [a / b for a, b in itertools.product(values, sides[-1].get(case, ()))]
            found.setdefault(case, []).extend(ratios if len(sides) > 1 else values)
    return found


def wrong_rows(files: tuple[str, ...], titles: list[str], rows: list[list[str]]) -> Iterator[str]:
    """Return the rows of a table whose numbers no case has."""
    columns = {at: shown(COLUMNS[title], files) for at, title in enumerate(titles) if title in COLUMNS}
    for row in rows:
        said = [(number, column) for at, column in columns.items() for number in NUMBER.findall(row[at])]
        if not any(all(any(says(number, value) for value in column.get(case, column.get("", ())))
                       for number, column in said) for case in set().union(*columns.values())):
            yield " | ".join(row)


def source(file: str, words: str) -> list[float]:
    """Return the values that a line of figures.txt names."""
    for sign, joined in ((" : ", operator.truediv), (" - ", operator.sub)):
        if sign in words:
            return [joined(a, b) for a, b in itertools.product(*(source(file, side) for side in words.split(sign)))]
    end, _, pattern = words.rpartition("=")
    found = [number for path, numbers in fields(file).items() if fnmatch.fnmatch(path, pattern) for number in numbers]
    assert found, f"{file}.json has no {pattern}"
    return {"": found, "low": [min(found)], "high": [max(found)]}[end]


def wrong_sentences(page: str, words: str) -> Iterator[str]:
    """Return what is wrong in a page's lines of figures.txt, and each measured number that none of them holds."""
    lines = HELD.read_text(encoding="utf-8").partition(f"[{page}]\n")[2].split("\n\n")[0].splitlines()
    for sentence, file, *names in (line.split(" | ") for line in lines):
        if sentence not in words:
            yield f"not on the page any more: {sentence}"
        for number, name in zip(NUMBER.findall(sentence), names, strict=True):
            if name != "_" and not any(says(number, value) for value in source(file, name)):
                yield f"{number} is none of {source(file, name)}: {sentence}"
        words = words.replace(sentence, " ... ")
    for known in itertools.chain(*UNHELD.values()):
        words = words.replace(known, " ... ")
    for found in MEASURED.finditer(words):
        yield f"no line of figures.txt holds this number: {words[max(0, found.start() - 60):found.end() + 20]}"


def wrong(page: str) -> list[str]:
    """Return the rows and sentences of a page with a number that the result files do not have."""
    parts = list(sections(page))
    rows = [row for part in parts for titles, *rows in part.tables for row in wrong_rows(part.files, titles, rows)]
    rows = [f"no case of the linked result files has these numbers: {row}" for row in rows]
    return rows + list(wrong_sentences(page, " ".join(part.words for part in parts)))


@pytest.mark.parametrize("page", PAGES)
def test_measured_numbers_are_those_of_the_result_files(page: str) -> None:
    assert not wrong(page), "\n".join(wrong(page))


def test_nearly_all_changed_numbers_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = "docs/performance.md"
    text = (ROOT / page).read_text(encoding="utf-8").split("<!-- end of speed -->")[1]
    before = len(wrong(page))
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    found = []
    for hit in [*re.finditer(r"(?<=\| |\*\*)[\d.]+\d(?=[x ])", text), *MEASURED.finditer(text)][::5]:
        at = hit.start() + len(NUMBER.match(hit[0])[0].partition("e")[0]) - 1
        (tmp_path / page).write_text(text[:at] + str((int(text[at]) + 3) % 10) + text[at + 1:], encoding="utf-8")
        found.append(len(wrong(page)) > before)
    assert len(found) > 40
    assert sum(found) >= 0.9 * len(found)
