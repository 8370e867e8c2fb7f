"""Print the table of faults, made of the tests' marks: ``python tools/faults.py [WORD]`` prints the rows with a word.

A test that makes something go wrong has the mark ``@pytest.mark.fault("what happens", see="what the user sees")``.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parent.parent / "tests"


class Fault(NamedTuple):
    """A fault, what the user sees of it, and the test that makes it happen."""

    what: str
    see: str
    test: str


def faults(folder: Path = TESTS) -> Iterator[Fault]:
    """Yield the fault of each mark, in the order of the modules."""
    for path in sorted(folder.rglob("test_*.py")):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for mark in getattr(function, "decorator_list", ()):
                if ast.unparse(mark).startswith("pytest.mark.fault"):
                    yield Fault(*_fields(mark, f"{path.name}::{function.name}"))


def _fields(mark: ast.expr, test: str) -> tuple[str, str, str]:
    """Return what a mark says, with its test; refuse a mark that lacks a field or has another one."""
    arguments, named = getattr(mark, "args", []), getattr(mark, "keywords", [])
    if len(arguments) != 1 or [field.arg for field in named] != ["see"]:
        raise ValueError(f'{test}: write @pytest.mark.fault("what happens", see="what the user sees")')
    return ast.literal_eval(arguments[0]), ast.literal_eval(named[0].value), test


def main(word: str = "") -> None:
    rows = [" | ".join(fault) for fault in faults()]
    print("| what happens | what you see | test |", "|---|---|---|", sep="\n")
    print(*(f"| {row} |" for row in rows if word.lower() in row.lower()), sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:2])
