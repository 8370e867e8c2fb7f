"""One full-size network on one backend, on this machine's GPU: its build, its proof, plain calls against its graph.

    HYBRID_TRT_COMFYUI=~/ComfyUI python benchmarks/one_engine.py --network controlnet --backend tensorrt --out mine.json

The weights are random. The build goes the way of the Build button, through children of their own.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "tools"), str(ROOT / "benchmarks")]

import networks
import torch
from hybrid_trt.architectures.samples import sample_inputs
from hybrid_trt.architectures.tensors import Profile, Range
from hybrid_trt.backends import backends
from hybrid_trt.engine_builder.build import build_engine
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Library, trust
from hybrid_trt.engine_sessions.file_session import FileSession
from timing import gpu_ms, host_us

GPU = torch.device("cuda", 0)
LATENT = {"sd15": 64, "sdxl": 128}


def profile(size: int, dynamic: bool) -> Profile:
    """Two images of one size, or one to four of half to one and a half of it."""
    if dynamic:
        side, batch = Range(size // 2, size, size * 3 // 2), Range(1, 2, 4)
    else:
        side, batch = Range(size, size, size), Range(2, 2, 2)
    return Profile({"B": batch, "H": side, "W": side, "T": Range(77, 77, 77), "HB": Range(1, 1, 1)})


def measure(family: str, kind: str, backend_name: str, dynamic: bool) -> dict[str, Any]:
    """Build, prove and time one engine."""
    network = networks.random_network(kind, networks.FULL[family], torch.float16, device=GPU)
    backend, sizes = backends()[backend_name], profile(LATENT[family], dynamic)
    with tempfile.TemporaryDirectory() as folder:
        order = BuildOrder(network, "float16", sizes, backend, GPU)
        engine = build_engine(order, Library([Path(folder)]), lambda *_: None)
        symbols = engine.manifest.identity.profile.sizes("opt")
        given = {n: t.to(GPU) for n, t in sample_inputs(engine.manifest.inputs, symbols, 7).items()}
        outputs = {
            s.name: torch.empty(s.shape(symbols), dtype=getattr(torch, s.dtype), device=GPU)
            for s in engine.manifest.outputs
        }
        with torch.inference_mode():
            runner, session = backend.load(engine, GPU), FileSession(engine, backend.load, GPU)
            found = {
                "plain_ms": gpu_ms(lambda: runner.run(given, outputs)),
                "plain_host_us": host_us(lambda: runner.run(given, outputs)),
                "session_ms": gpu_ms(lambda: session.run(given)),
                "session_host_us": host_us(lambda: session.run(given)),
            }
            again = session.run(given)
            runner.run(given, outputs)
            found["graph_equals_plain_to_the_bit"] = all(torch.equal(again[n], outputs[n]) for n in outputs)
        proof = trust.record_of(engine)
        return {
            "network": f"{family} {kind}, random weights, float16",
            "backend": f"{backend_name} {backend.version()}",
            "gpu": torch.cuda.get_device_name(GPU),
            "profile": engine.manifest.identity.profile.to_json(),
            "bytes": engine.manifest.bytes,
            "build_s": dict(engine.manifest.seconds),
            "proof": dict(proof.parity) if proof is not None else {},
            **found,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--family", choices=sorted(LATENT), default="sd15")
    parser.add_argument("--network", choices=["unet", "controlnet"], required=True)
    files = [name for name, backend in backends().items() if not backend.runs_live_weights]
    parser.add_argument("--backend", choices=files, required=True)
    parser.add_argument("--dynamic", action="store_true", help="several sizes and batches instead of one")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    result = measure(options.family, options.network, options.backend, options.dynamic)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
