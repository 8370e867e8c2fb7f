"""Engines of a backend that builds files (TensorRT): built, held against native and timed, alone and in steps.

Writes rows of the same cases as ``networks.py`` with ``<backend>_ms`` (a plain call), ``<backend>_graph_ms`` (as a
prompt calls it), ``<backend>_native_ms`` (of the same run), ``<backend>_host_us``, ``<backend>_rel_err`` and
``<backend>_build_s``. Engines are for one size and one image, and stay below ``--base``: ``--build NAME`` builds one
and tells what that took, so that several can be built at once. With ``--replaceable`` they take any weights, the
fields begin with ``<backend>_any_lora``, and ``<backend>_any_lora_refit_s`` is how long new weights take. Engines of
TensorRT's optimization level ``--level`` have a library of their own.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import networks
import torch
from timing import gpu_ms, host_us

TOKENS = 77
RANK = 16
"""Of the LoRA whose coming and going is timed."""


def one_size(size: int) -> Any:
    """The profile of an engine for one image of one size, as latents."""
    from hybrid_trt.architectures.shapes import Profile, Range

    side, tokens = Range(size, size, size), Range(TOKENS, TOKENS, TOKENS)
    return Profile({"B": Range(1, 2, 2), "H": side, "W": side, "T": tokens, "HB": Range(1, 1, 2)})


class FileBench(networks.Bench):
    """The same models with engines of such a backend; there is one for the UNet and one for each ControlNet."""

    def __init__(
        self, family: str, base: Path, controls: int, backend: str, replaceable: bool = False, level: int = 0
    ):
        from hybrid_trt.backends import backends
        from hybrid_trt.comfy_model.network import NativeNetwork
        from hybrid_trt.engine_library import Library
        from hybrid_trt.engine_library.disk import Settings, write_settings
        from hybrid_trt.sampling.engine_handle import EngineChoice

        super().__init__(family, base, controls)
        self.backend = backends()[backend]
        self.replaceable = replaceable
        if level:
            folder = base / "models" / f"trt_engines_level_{level}"
            folder.mkdir(parents=True, exist_ok=True)
            write_settings(folder, Settings(tensorrt_level=level))
            self.library = Library([folder])
        self.choice = EngineChoice(one_size(self.size), "auto", backend, replaceable)
        for i, net in enumerate(self.nets):
            self.networks[f"controlnet_{i}"] = NativeNetwork.of_controlnet(net, f"net{i}")

    def engine(self, name: str) -> Any:
        """A network's engine, built unless the library has it; says how long that took."""
        from hybrid_trt.engine_builder.build import build_engine
        from hybrid_trt.engine_builder.order import BuildOrder

        network, last = self.networks[name], [""]

        def progress(phase: str, fraction: float) -> None:
            if phase != last[0]:
                last[0] = phase
                print(f"{time.perf_counter() - started:7.1f} s  {name}: {phase} ({fraction:.0%})", flush=True)

        started = time.perf_counter()
        order = BuildOrder(network, network.precision, self.choice.profile, self.backend, replaceable=self.replaceable)
        return build_engine(order, self.library, progress)

    def is_built(self, name: str) -> bool:
        """Return whether the library has an engine for such a network."""
        wanted = (self.networks[name].architecture().name, self.backend.name, self.replaceable)
        found = [engine.manifest.identity for engine in self.library.engines()]
        return any((one.architecture, one.backend, one.any_weights) == wanted for one in found)

    @property
    def field(self) -> str:
        """Beginning of the names of its fields."""
        return f"{self.backend.name}_any_lora" if self.replaceable else self.backend.name


def build_row(bench: FileBench, name: str) -> dict[str, Any]:
    """Build one network's engine; return its seconds, and the most main memory that any of its processes had."""
    started, engine = time.perf_counter(), bench.engine(name)
    row = {
        "case": f"{bench.family}_{name}_build", f"{bench.field}_wall_s": round(time.perf_counter() - started, 1),
        f"{bench.field}_build_s": dict(engine.manifest.seconds), f"{bench.field}_bytes": engine.manifest.bytes,
        f"{bench.field}_peak_host_gb": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6, 2),
        f"{bench.field}_proof": dict(trust_figures(engine)),
    }  # fmt: skip
    print(row, flush=True)
    return row


def trust_figures(engine: Any) -> Any:
    """Return the figures of the engine's proof on this GPU."""
    from hybrid_trt.engine_library import measurements

    return measurements.figures(engine)


def network_row(bench: FileBench, name: str, title: str) -> dict[str, Any]:
    """Native and the engine of one network at batch 2."""
    from comfy import model_management

    backend, network, engine = bench.backend, bench.networks[name], bench.engine(name)
    with torch.inference_mode():
        model_management.load_models_gpu([network.patcher])
        given = bench.given(name.split("_")[0], 2)
        reference = bench.native_call(name.split("_")[0], given)
        native = gpu_ms(lambda: bench.native_call(name.split("_")[0], given))
        session = backend.session(network, [engine], network.precision, None)
        session.sync_from(network, network.patcher)
        results = list(session.run(given).values())
        graph, host = gpu_ms(lambda: session.run(given)), host_us(lambda: session.run(given))
        runner, inputs = backend.load(engine, session.device), taken(bench, session, name, given)
        outputs = {n: torch.empty_like(t) for n, t in session.run(given).items()}
        plain = gpu_ms(lambda: runner.run(inputs, outputs))
        same = all(torch.equal(outputs[n], t) for n, t in session.run(given).items())
    b = bench.field
    row = {
        "case": f"{bench.family}_{title}", "batch": 2, "native_ms": native["median"],
        f"{b}_native_ms": native["median"], f"{b}_ms": plain["median"], f"{b}_graph_ms": graph["median"],
        f"{b}_host_us": host, f"{b}_plain": plain, f"{b}_graph": graph,
        f"{b}_rel_err": networks.worst_error(results, reference), f"{b}_graph_is_plain_to_the_bit": same,
        f"{b}_build_s": dict(engine.manifest.seconds), f"{b}_bytes": engine.manifest.bytes,
        f"{b}_loaded_bytes": runner.bytes, f"{b}_proof": dict(trust_figures(engine)), f"{b}_version": backend.version(),
    }  # fmt: skip
    if bench.replaceable:
        row[f"{b}_refit_s"] = refit_seconds(session, network, given)
    print({k: v for k, v in row.items() if not isinstance(v, dict)}, row.get(f"{b}_refit_s", ""), flush=True)
    return row


def refit_seconds(session: Any, network: Any, given: dict[str, torch.Tensor]) -> dict[str, float]:
    """Seconds of the first call after a LoRA on all transformers came, changed its strength and went."""
    lora = lora_on_transformers(network.patcher)
    found = {"weights": float(len(lora))}
    for what, strength in (("lora_s", 1.0), ("other_strength_s", 0.5), ("without_s", None)):
        patcher = network.patcher.clone()
        if strength is not None:
            patcher.add_patches(lora, strength)
        with torch.inference_mode():
            session.sync_from(network, patcher)
            torch.cuda.synchronize()
            started = time.perf_counter()
            session.run(given)
            torch.cuda.synchronize()
        found[what] = round(time.perf_counter() - started, 3)
    return found


def lora_on_transformers(patcher: Any) -> dict[str, Any]:
    """A LoRA of random values for all linear layers of a model's transformers."""
    from comfy.weight_adapter.lora import LoRAAdapter

    shapes = {key: value.shape for key, value in patcher.model_state_dict().items()
              if "transformer_blocks" in key and value.ndim == 2}
    return {key: LoRAAdapter(set(), (0.03 * torch.randn(rows, RANK), 0.03 * torch.randn(RANK, columns), float(RANK),
                                     None, None, None)) for key, (rows, columns) in shapes.items()}


def taken(bench: FileBench, session: Any, name: str, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A call's inputs as the engine itself takes them: hints encoded, all in its dtypes."""
    per_image_pass = session._current
    inputs = given if per_image_pass is None else per_image_pass.run(given, {})
    dtypes = {spec.name: getattr(torch, spec.dtype) for spec in session.engine.manifest.inputs}
    sizes = {"B": 2, "H": bench.size, "W": bench.size, "T": TOKENS, "HB": 1}
    absent = {s.name: torch.zeros(s.shape(sizes)) for s in session.engine.manifest.inputs if s.name not in inputs}
    return {n: t.to(session.device, dtypes[n]).contiguous() for n, t in (inputs | absent).items()}


def step_row(bench: FileBench, count: int) -> dict[str, Any]:
    """A step of a real sampling, as ``networks.step_rows`` measures it, with the backend's name in its fields."""
    (row,) = networks.step_rows(bench, [count])
    b = bench.field
    return {"case": row["case"], "batch": 2, "native_ms": row["native_ms"], f"{b}_native_ms": row["native_ms"],
            f"{b}_graph_ms": row["engine_ms"], f"{b}_rel_err": row["rel_err"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--family", choices=networks.SIZES, required=True)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--controls", type=int, default=2)
    parser.add_argument("--replaceable", action="store_true", help="engines that take any weights")
    parser.add_argument("--level", type=int, default=0, help="TensorRT's optimization level; 0: its own")
    parser.add_argument("--build", metavar="NAME", help="unet, controlnet_0, controlnet_1: build its engine alone")
    parser.add_argument("--built", action="store_true", help="measure alone what is built, and no steps without all")
    options = parser.parse_args()
    networks.import_pack(options.comfyui)
    with torch.inference_mode():
        bench = FileBench(
            options.family, options.base, options.controls, options.backend, options.replaceable, options.level
        )
    if options.build:
        options.out.write_text(json.dumps([build_row(bench, options.build)], indent=1))
        return
    titles = {"unet": "unet"} | ({"controlnet_0": "controlnet"} if options.controls else {})
    names = [name for name in titles if not options.built or bench.is_built(name)]
    rows = []
    for name in names:
        rows.append(network_row(bench, name, titles[name]))
        options.out.write_text(json.dumps(rows, indent=1))
    if len(names) < len(titles):
        return
    for i in range(1, options.controls):
        bench.engine(f"controlnet_{i}")
    rows += [step_row(bench, count) for count in range(options.controls + 1)]
    options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    sys.exit(main())
