"""The table of faults is the tests that have the mark: what happens in the words of the one is what the other shows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROW = re.compile(r"^\| (?P<what>[^|]+) \| (?P<see>[^|]+) \| `(?P<module>\w+)`: (?P<name>[^|]+) \|$", re.M)


def marked() -> Iterator[tuple[str, str, str]]:
    """Each test with the mark: its words, its module and its name, as the table has them."""
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        for function in ast.parse(path.read_text(encoding="utf-8")).body:
            for mark in getattr(function, "decorator_list", ()):
                if ast.unparse(mark).startswith("pytest.mark.fault("):
                    assert isinstance(function, ast.FunctionDef)
                    (what,) = mark.args
                    name = function.name.removeprefix("test_").replace("_", " ")
                    yield ast.literal_eval(what), path.stem.removeprefix("test_"), name


def test_each_fault_of_the_table_has_its_test_and_each_marked_test_its_row() -> None:
    rows = [row.group("what", "module", "name") for row in ROW.finditer((ROOT / "docs/faults.md").read_text("utf-8"))]
    assert sorted(rows) == sorted(marked())
    assert len({what for what, *_ in rows}) == len(rows) >= 50


def test_each_row_says_what_is_seen() -> None:
    text = (ROOT / "docs/faults.md").read_text("utf-8")
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| what happens")]
    assert len(lines) == len(ROW.findall(text)), "a row of another form"
