"""One transformer on two GPUs, each with half of the tokens: what exchanging keys and values costs.

    python benchmarks/split_tokens.py --out benchmarks/results/split_tokens.json

Plain blocks with random weights, of the sizes of Flux.1 (4,608 tokens) and Wan 2.2 14B (32,760), compiled by
``torch.compile`` up to the attention and from there on. Three ways: one GPU; two GPUs by two threads of a process,
which copy from each other's memory; two GPUs by two processes with NCCL. It needs two NVIDIA GPUs with 40 GB each, and
three minutes. ``--tiny`` compares the ways by threads on a CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.multiprocessing.spawn import spawn

RUNS = 7


@dataclass(frozen=True)
class Shape:
    """A transformer: ``kept`` tokens are those of the prompt, which each GPU has."""

    width: int
    heads: int
    inner: int
    blocks: int
    tokens: int
    kept: int = 0


SHAPES = {"flux1_1024": Shape(3072, 24, 12288, 57, 4096, 512), "wan22_480_81": Shape(5120, 40, 13824, 40, 32760)}
TINY = Shape(64, 2, 128, 3, 24, 4)
Weights = list[torch.Tensor]
Gather = Callable[[torch.Tensor], torch.Tensor]
"""Keys and values of own tokens, (2, heads, tokens, features) -> those of all."""


def drawn(shape: Shape, device: torch.device, dtype: torch.dtype) -> list[Weights]:
    sizes = ((3 * shape.width, shape.width), (shape.width, shape.width), (shape.inner, shape.width),
             (shape.width, shape.inner))  # fmt: skip
    generator = torch.Generator(device).manual_seed(1)
    return [[torch.randn(size, device=device, dtype=dtype, generator=generator) / size[1] ** 0.5 for size in sizes]
            for _ in range(shape.blocks)]  # fmt: skip


def before(x: torch.Tensor, turns: torch.Tensor, qkv: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries, and keys with values, for tokens that are (tokens, width)."""
    q, k, v = F.linear(F.layer_norm(x, x.shape[-1:]), qkv).unflatten(-1, (3, heads, -1)).permute(1, 2, 0, 3)
    q, k = (F.rms_norm(t, t.shape[-1:]) * turns.cos() + t.roll(1, -1) * turns.sin() for t in (q, k))
    return q.contiguous(), torch.stack([k, v])


def behind(x: torch.Tensor, found: torch.Tensor, weights: Weights) -> torch.Tensor:
    x = x + F.linear(found.transpose(0, 1).flatten(1), weights[0])
    return x + F.linear(F.gelu(F.linear(F.layer_norm(x, x.shape[-1:]), weights[1]), approximate="tanh"), weights[2])


def step(
    code: tuple[Callable, Callable], layers: list[Weights], x: torch.Tensor, turns: torch.Tensor, heads: int,
    gather: Gather,
) -> torch.Tensor:  # fmt: skip
    first, last = code
    for qkv, *others in layers:
        q, own = first(x, turns, qkv, heads)
        k, v = gather(own)
        x = last(x, F.scaled_dot_product_attention(q[None], k[None], v[None])[0], others)
    return x


class Exchange:
    """Keys and values of two threads, each with a device of its own; a thread copies what the other has."""

    def __init__(self, devices: list[torch.device], kept: int):
        self.devices, self.kept, self.cuda = devices, kept, devices[0].type == "cuda"
        self.meet = threading.Barrier(len(devices))
        self.slots: list[list[Any]] = [[None, None], [None, None]]
        self.streams = [torch.cuda.Stream(device) if self.cuda else None for device in devices]

    def gather(self, rank: int) -> Gather:
        turn = 0

        def run(own: torch.Tensor) -> torch.Tensor:
            nonlocal turn
            turn = 1 - turn
            ready = torch.cuda.current_stream(self.devices[rank]).record_event() if self.cuda else None
            self.slots[turn][rank] = own, ready
            self.meet.wait()
            other, theirs = self.slots[turn][1 - rank]
            parts = [own[:, :, : self.kept], own[:, :, self.kept :]]
            parts.insert(1 + (1 - rank), self._copied(other[:, :, self.kept :], theirs, rank))
            return torch.cat(parts, 2)

        return run

    def _copied(self, other: torch.Tensor, ready: Any, rank: int) -> torch.Tensor:
        """Copy on a stream of the device that reads."""
        if not self.cuda:
            return other.clone()
        own, stream = torch.cuda.current_stream(self.devices[rank]), self.streams[rank]
        found = torch.empty(other.shape, dtype=other.dtype, device=self.devices[rank])
        stream.wait_event(ready)
        stream.wait_stream(own)
        with torch.cuda.stream(stream):
            found.copy_(other, non_blocking=True)
        other.record_stream(stream)
        own.wait_stream(stream)
        return found


def rows(shape: Shape, ranks: int, rank: int) -> slice:
    each = shape.tokens // ranks
    return slice(shape.kept + rank * each, shape.kept + (shape.tokens if rank == ranks - 1 else (rank + 1) * each))


def given(shape: Shape, device: torch.device, dtype: torch.dtype, ranks: int, rank: int) -> tuple[torch.Tensor, ...]:
    """Return tokens of a rank, those of the prompt in front, and the angles by which they are turned."""
    generator = torch.Generator().manual_seed(2)
    features = shape.width // shape.heads
    x, turns = (torch.randn(shape.kept + shape.tokens, n, generator=generator) for n in (shape.width, features))
    own = rows(shape, ranks, rank)
    return tuple(torch.cat([t[: shape.kept], t[own]]).to(device, dtype) for t in (x, turns))


def timed(run: Callable[[], Any], device: torch.device) -> float:
    """Return the median milliseconds of a step."""
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    taken = []
    for number in range(RUNS + 2):
        wait()
        began = time.perf_counter()
        run()
        wait()
        if number >= 2:
            taken.append(1e3 * (time.perf_counter() - began))
    return round(statistics.median(taken), 2)


def by_threads(
    shape: Shape, devices: list[torch.device], dtype: torch.dtype, code: tuple
) -> tuple[float, torch.Tensor]:
    """Return milliseconds of a step, and the tokens that it gives."""
    exchange, results = Exchange(devices, shape.kept), [None] * len(devices)
    with torch.inference_mode():
        work = [(drawn(shape, device, dtype), *given(shape, device, dtype, len(devices), rank))
                for rank, device in enumerate(devices)]  # fmt: skip
        for layers, x, turns in work:  # torch compiles in one thread at a time
            step(code, layers[:1], x, turns, shape.heads, lambda own: own)

    def one(rank: int) -> None:
        with torch.inference_mode():
            if exchange.cuda:
                torch.cuda.set_device(devices[rank])
            results[rank] = step(code, *work[rank], shape.heads, exchange.gather(rank))

    def run() -> None:
        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(devices))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for device in devices[1:]:
            if exchange.cuda:
                torch.cuda.synchronize(device)

    taken = timed(run, devices[0])
    parts = [results[0], *(result[shape.kept :] for result in results[1:])]
    return taken, torch.cat([part.float().cpu() for part in parts])


def alone(shape: Shape, device: torch.device, dtype: torch.dtype, code: tuple) -> tuple[float, torch.Tensor]:
    with torch.inference_mode():
        layers, (x, turns) = drawn(shape, device, dtype), given(shape, device, dtype, 1, 0)
        taken = timed(lambda: step(code, layers, x, turns, shape.heads, lambda own: own), device)
        return taken, step(code, layers, x, turns, shape.heads, lambda own: own).float().cpu()


def by_processes(rank: int, name: str, out: str) -> None:
    """Measure with NCCL, as one of two processes."""
    shape, device, dtype = SHAPES[name], torch.device("cuda", rank), torch.bfloat16
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29511", rank=rank, world_size=2)
    layers, (x, turns) = drawn(shape, device, dtype), given(shape, device, dtype, 2, rank)

    def gather(own: torch.Tensor) -> torch.Tensor:
        mine = own[:, :, shape.kept :].contiguous()
        both = mine.new_empty(2, *mine.shape)
        dist.all_gather_into_tensor(both, mine)
        return torch.cat([own[:, :, : shape.kept], both[0], both[1]], 2)

    with torch.inference_mode():
        taken = timed(lambda: step(compiled(), layers, x, turns, shape.heads, gather), device)
    if rank == 0:
        Path(out).write_text(json.dumps(taken))
    dist.destroy_process_group()


def exchange_gb_s(devices: list[torch.device]) -> float:
    """Return the GB a second that two GPUs read from each other, both at once."""
    ours = [torch.empty(1 << 28, dtype=torch.uint8, device=device) for device in devices]
    streams = [torch.cuda.Stream(device) for device in devices]

    def both() -> None:
        for stream, here, there in zip(streams, ours, reversed(devices), strict=True):
            with torch.cuda.stream(stream):
                here.to(there, non_blocking=True)
        for device in devices:
            torch.cuda.synchronize(device)

    return round(ours[0].nbytes / 1e6 / timed(both, devices[0]), 1)


def compiled() -> tuple[Callable, Callable]:
    torch._dynamo.config.recompile_limit = 64  # each device, size and case has code of its own
    return torch.compile(before, dynamic=False), torch.compile(behind, dynamic=False)


def tiny() -> None:
    cpu = torch.device("cpu")
    (_, whole), (_, halves) = (alone(TINY, cpu, torch.float32, (before, behind)),
                               by_threads(TINY, [cpu, cpu], torch.float32, (before, behind)))  # fmt: skip
    print(f"two threads differ from one by {float((whole - halves).norm() / whole.norm()):.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.tiny:
        return tiny()
    torch.backends.cuda.enable_flash_sdp(False)  # so that cuDNN's kernel is taken
    devices = [torch.device("cuda", number) for number in range(2)]
    peer, found, gb_s = torch.cuda.can_device_access_peer(*devices), [], exchange_gb_s(devices)
    for name, shape in SHAPES.items():
        one, whole = alone(shape, devices[0], torch.bfloat16, compiled())
        torch.cuda.empty_cache()
        two, halves = by_threads(shape, devices, torch.bfloat16, compiled())
        error = float((whole - halves).norm() / whole.norm())
        row = {"case": name, "one_gpu_ms": one, "two_by_threads_ms": two, "rel_err": error}
        torch.cuda.empty_cache()
        kept = options.out.with_suffix(".nccl")
        spawn(by_processes, (name, str(kept)), nprocs=2)
        row["two_by_nccl_ms"] = json.loads(kept.read_text())
        kept.unlink()
        found.append(row)
        print(row, flush=True)
        meta = {"gpu": torch.cuda.get_device_name(0), "peer_access": peer, "exchange_gb_s": gb_s,
                "torch": torch.__version__}
        options.out.write_text(json.dumps({"command": "python benchmarks/split_tokens.py", "meta": meta, "rows": found},
                                          indent=1) + "\n", encoding="utf-8")  # fmt: skip
    return None


if __name__ == "__main__":
    main()
