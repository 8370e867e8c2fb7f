"""`make demo` as a stranger runs it: the program itself, with a base directory that has nothing in it yet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import slow
from demo import USUAL, WORKFLOWS
from PIL import Image, ImageChops

ROOT = Path(__file__).resolve().parents[2]


#: Calls in eight steps; a ControlNet acts in its range, and a VAE that decodes videos has no engine on a CPU. The usual
#: demo has twenty steps, and one ControlNet that acts twice.
SAMPLED, DECODED, NATIVE = (8, 0), (1, 0), (0, 1)
CALLS = {
    USUAL: [(40, 0), (20, 0), DECODED], "flux1_text_to_image": [SAMPLED, DECODED],
    "flux1_controlnet": [(7, 0), SAMPLED, DECODED], "zimage_text_to_image": [SAMPLED, DECODED],
    **dict.fromkeys(("krea2_text_to_image", "qwen_text_to_image", "qwen_edit"), [SAMPLED, NATIVE]),
}  # fmt: skip


def test_the_calls_of_each_demo_are_told() -> None:
    assert set(CALLS) == set(WORKFLOWS)


@slow.SLOW
@pytest.mark.parametrize("name", CALLS)
def test_the_demo_shows_the_same_picture_twice_and_says_what_ran_on_engines(
    environment: Any, tmp_path: Path, name: str
) -> None:
    base, out = tmp_path / "base", tmp_path / "demo"
    (base / "custom_nodes").mkdir(parents=True)
    (base / "custom_nodes" / "hybrid-trt").symlink_to(ROOT, target_is_directory=True)
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "demo.py"), name, "--out", str(out)], capture_output=True, text=True,
        timeout=600, check=False,
        env=os.environ | {"HYBRID_TRT_COMFYUI": str(environment.comfyui), "HYBRID_TRT_BASE": str(base)})
    assert done.returncode == 0, done.stderr
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert 0 < report["latent_rel_err"] <= 1e-5
    assert [(row["engine"], row["native"]) for row in report["networks"]] == CALLS[name]
    assert report["seconds"].keys() == {"build", "native", "engine"}
    native, engine, row = (Image.open(path).convert("RGB") for path in report["images"])
    assert row.width == 2 * native.width * (4 if name == USUAL else 3), "the usual demo shows the edges too"
    low, high = zip(*native.getextrema(), strict=True)
    assert max(high) - min(low) > 50, "an empty picture would be equal too"
    assert max(high for _, high in ImageChops.difference(native, engine).getextrema()) <= 1
    assert "difference of the latents" in done.stdout
