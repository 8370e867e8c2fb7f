"""Sentences of the server on a Chinese page: none breaks when it is mended, and what stays English is written here."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path

import pytest
from hybrid_trt.engine_library import Reason

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("architectures", "backends", "comfy_model", "engine_builder", "engine_library", "nodes", "page_api",
         "sampling", "saved_workflows", "sessions", "streaming")  # fmt: skip
VALUES = ("12", "1.2 GB", "12 ms", "9 of 11", "64 to 512")
"""Values that a sentence is filled with."""
MOST_TEXTS = 64
"""An expression that can be more texts than these is a table and no sentence."""
SHOWN = {"BuildError", "ValidationFailed", "LibraryError", "Busy", "BadFrame", "progress", "tell"}
"""Calls whose texts a page shows in Chinese. English are: the detail of a ``Fallback``, between its reason and advice;
errors in requests (``Refused``, ``MalformedInput``), which only programs send; and errors of other libraries."""
SENTENCES = ("nodes/compare.py", "streaming/live.py", "streaming/pictures.py")
"""Modules of which a page shows every sentence."""
ELSEWHERE = ("engine_builder/command_line", "engine_library/inventory.py", "page_api/own_prompts.py")
"""Modules with texts for a terminal or for the API."""
ENGLISH = "The pictures cannot be compared"
"""Begins an error that ComfyUI itself shows."""
NAMES = set("""CFG ComfyUI ControlNet DeepCache GB GPU Hybrid Inductor JPEG LoRA MB MultiGPU NaN PNG PSNR Patch Python
    SSIM Sampler Split TRT TensorRT UNet dB extra_model_paths float32 install ms pip polygraphy torch torchmetrics
    trt_engines yaml""".split())  # fmt: skip

SCRIPT = """
import { readFileSync } from "node:fs";
import { PHRASES, said } from %s;
import { setLanguage } from %s;
setLanguage("zh");
const unused = new Set(PHRASES.map(([phrase]) => phrase)), texts = JSON.parse(readFileSync(0));
for (const text of texts)
    PHRASES.reduce((now, [phrase, words]) => {
        const next = now.replace(phrase, words);
        if (next !== now) unused.delete(phrase);
        return next;
    }, text);
console.log(JSON.stringify({ read: texts.map(said), unused: [...unused].map(String) }));
"""


def _texts(node: ast.AST, names: Mapping[str, list[str]]) -> list[str]:
    """Return the texts that an expression can be, with ``{}`` for values; none where it has no words of its own."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.Name):
        return names.get(node.id, [])
    if isinstance(node, ast.IfExp):
        return _texts(node.body, names) + _texts(node.orelse, names)
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "plural":
        return [f"{{}} {noun}{end}" for noun in _texts(node.args[1], names) for end in ("", "s")]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        nodes = [node.left, node.right]
    elif isinstance(node, ast.JoinedStr):
        nodes = [one.value if isinstance(one, ast.FormattedValue) else one for one in node.values]
    else:
        return []
    parts = [_texts(one, names) or ["{}"] for one in nodes]
    number = 1
    for part in parts:
        number *= len(part)
    return ["".join(found) for found in product(*parts)] if number <= MOST_TEXTS else []


def _modules() -> Iterator[tuple[str, list[ast.AST], dict[str, list[str]]]]:
    """Yield each module's path, its nodes without docstrings, and the texts that its names can be."""
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
            docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
            names: dict[str, list[str]] = {}
            for node in nodes:
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    names.setdefault(node.targets[0].id, []).extend(_texts(node.value, {}))
            yield path.relative_to(ROOT).as_posix(), [node for node in nodes if id(node) not in docstrings], names


def _written() -> set[str]:
    """Return all texts of the pack."""
    return {text for _, nodes, names in _modules() for node in nodes for text in _texts(node, names)}


def _shown() -> dict[str, str]:
    """Return sentence -> module, for what a page shows."""
    found = {text: "Reason" for reason in Reason for text in (reason.value, reason.meaning, reason.advice)}
    for module, nodes, names in _modules():
        for node in () if module.startswith(ELSEWHERE) else nodes:
            if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in SHOWN:
                texts = [text for one in node.args for text in _texts(one, names)]
            elif isinstance(node, ast.Assign) and getattr(node.targets[0], "attr", "") in ("note", "phase"):
                texts = _texts(node.value, names)
            elif isinstance(node, ast.JoinedStr | ast.Constant) and module in SENTENCES:
                texts = [text for text in _texts(node, names) if re.match(r"[A-Z].* .*\.$", text)]
            else:
                continue
            found.update((text, module) for text in texts if len(text) > 3 and not text.startswith(ENGLISH))
    return found


def _filled(text: str, value: str) -> str:
    return re.sub(r"(?<=[a-wyz])\{\}", f" {value}", text).replace("{}", value)


def _in_chinese(texts: list[str]) -> dict[str, list[str]]:
    """Return the texts as a Chinese page shows them, and the phrases that none of them has."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("Node is not installed, so the sentences were not read in Chinese.")
    files = [json.dumps((ROOT / "js" / "lib" / name).as_uri()) for name in ("server_zh.mjs", "texts.mjs")]
    command = [node, "--input-type=module", "-e", SCRIPT % tuple(files)]
    done = subprocess.run(command, input=json.dumps(texts), stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout)


@pytest.mark.fault("a sentence of the server is mended", see="a Chinese page shows it in English")
def test_each_chinese_phrase_is_one_that_the_server_can_say() -> None:
    assert _in_chinese([_filled(text, value) for text in _written() for value in VALUES])["unused"] == []


def test_what_a_page_shows_has_chinese_words() -> None:
    shown = _shown()
    assert len(shown) > 100
    for begin in (str, lambda text: text[:1].upper() + text[1:]):  # a message begins with a capital
        read = _in_chinese([begin(_filled(text, "12")) for text in shown])["read"]
        left = {text: set(re.findall(r"[A-Za-z]{2,}\w*", now)) - NAMES for text, now in zip(shown, read, strict=True)}
        assert not any(left.values()), {(shown[text], text): words for text, words in left.items() if words}
