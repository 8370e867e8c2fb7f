"""Steps of a UNet that starts beside its ControlNets and of one that waits for them first, turn by turn.

    python benchmarks/beside_controlnets.py --comfyui ~/ComfyUI --base /tmp/benchmark --out beside.json

SD1.5 at 512x512, 20 steps, 1, 2 and 4 ControlNets; the engines are those that ``run.py`` built. Says too whether the
latents are equal to the bit, also with 10 ms of nothing in front of each step's residuals.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import networks
import torch

TURNS = 4
CYCLES = 20_000_000
"""About 10 ms of a GPU."""


def measure(bench: networks.Bench, count: int) -> dict[str, Any]:
    """The milliseconds of a step with ``count`` ControlNets both ways."""
    from hybrid_trt.backends.torch_inductor.session import LiveSession
    from hybrid_trt.sampling import control_stack

    ways = {"late": LiveSession.takes_late, "waits": property(lambda _session: False)}
    setup, times, equal = bench.conditioning(count, True), {way: [] for way in ways}, []
    bench.sample(setup, 1)
    for turn in range(TURNS):
        latents = {}
        for way, takes_late in ways.items():
            LiveSession.takes_late = takes_late
            latents[way], steps = bench.sample(setup, 5 + turn)
            times[way] += steps[2:]
        equal.append(torch.equal(*latents.values()))
    LiveSession.takes_late, merged = ways["late"], control_stack._merged
    control_stack._merged = lambda *given: (torch.cuda._sleep(CYCLES), merged(*given))[1]
    slow, steps = bench.sample(setup, 5 + TURNS - 1)
    control_stack._merged = merged
    return {"count": count, "equal": equal, "slow_equal": torch.equal(slow, latents["waits"]),
            "slow_step": round(statistics.median(steps), 2),
            **{way: round(statistics.median(found), 3) for way, found in times.items()}}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    networks.import_pack(options.comfyui)
    rows = []
    with torch.inference_mode():
        bench = networks.Bench("sd15", options.base, 4)
        for count in (1, 2, 4):
            rows.append(measure(bench, count))
            print(rows[-1], flush=True)
    options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
