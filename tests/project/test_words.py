"""Words of the code: docstrings say what a thing is or does, and never begin with a question."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOT_OURS = {"build"}
QUESTION = re.compile(r"(What|Whether|Who|How|Why|Where|When|Which|Whose)\b")


def our_files() -> list[Path]:
    found = [path for path in ROOT.rglob("*.py") if not path.relative_to(ROOT).parts[0].startswith(".")]
    return sorted(path for path in found if path.relative_to(ROOT).parts[0] not in NOT_OURS)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Each docstring with its line: of modules, classes and functions, and those below attributes."""
    opening = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):  # an expression's
            continue
        for before, statement in zip([None, *body], body, strict=False):
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                there = isinstance(node, opening) if before is None else isinstance(before, ast.Assign | ast.AnnAssign)
                if there and isinstance(statement.value.value, str):
                    yield statement.lineno, statement.value.value.strip()


def test_every_kind_of_docstring_is_found() -> None:
    code = '"""What a"""\nX = 1\n"""Why b"""\nclass C:\n    """How c"""\n    y: int = 1\n    """Who d"""\n' \
           '    def f(self):\n        """Whether e"""\n        async def g():\n            """When f"""\n'  # fmt: skip
    found = [text for _, text in docstrings(ast.parse(code)) if QUESTION.match(text)]
    assert sorted(found) == ["How c", "What a", "When f", "Whether e", "Who d", "Why b"]


def test_no_docstring_begins_with_a_question_word() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in our_files()
        for line, text in docstrings(ast.parse(path.read_text(encoding="utf-8")))
        if QUESTION.match(text)
    ]
    assert not found, f"{len(found)} docstrings ask:\n" + "\n".join(found)


def test_benchmarks_readme_has_a_line_for_each_script() -> None:
    named = set(re.findall(r"`(\w+\.py)`", (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")))
    assert named == {path.name for path in (ROOT / "benchmarks").rglob("*.py")}
