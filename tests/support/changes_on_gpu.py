"""Compares models that packs change while they are sampled with native on a GPU, where CUDA graphs serve the calls.

Prints a line for each change that has native's picture: family, change, place, and the calls on the engine.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tools")]
sys.path.append(os.environ["HYBRID_TRT_COMFYUI"])

import comfy.model_management  # before what puts ComfyUI on the CPU
import tiny_models
import torch
from pack import import_comfy

import_comfy()

from changed_families import FAMILIES, IMPOSSIBLE, STEPS, OnEngine
from foreign_changes import CALLS, changing

from sampling import error

LIMIT = 5e-3
"""Of float32 on a GPU, where native's products are rounded otherwise than a graph's."""
assert comfy.model_management.get_torch_device().type == "cuda"


def main() -> None:
    models = tiny_models.make(Path(sys.argv[1]), [family.file for family in FAMILIES.values()])
    number = 0
    for name, family in FAMILIES.items():
        model = family.load(models, torch.float32)
        engine, plain = OnEngine(model, Path(tempfile.mkdtemp())), family.sample(family.load(models, torch.float32))
        for change in (one for one in family.changes if (name, one) not in IMPOSSIBLE):
            number += 1
            place = list(CALLS)[number % (len(CALLS) - 1) + 1]  # within a run: its graphs are there
            native = family.sample(changing(family.load(models, torch.float32), place, family.changes[change]))
            assert error(family.sample(engine.model), plain) <= LIMIT, (name, change)
            assert engine.counts == (engine.counts[0], 0), (name, change)
            found = error(family.sample(changing(engine.model, place, family.changes[change])), native)
            by = error(native, plain)
            right = found <= LIMIT and (by <= LIMIT or engine.counts[0] == 0)
            words = f"{name}, {change}, {place}: {found:.1e}, native changed by {by:.1e}, {engine.counts}"
            sys.stdout.write(f"{'right' if right else 'WRONG'}: {words}\n")
    sys.stdout.write(f"{number} changes, {STEPS} steps each\n")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
