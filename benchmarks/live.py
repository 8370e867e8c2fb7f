"""A live stream under changes: frames that are lost to them, delays, and memory over minutes.

    python benchmarks/live.py --comfyui ~/ComfyUI --base /tmp/benchmark --out benchmarks/results/live.json

A client sends frames at a camera's rate over the WebSocket, 512 px as JPEG, and takes the pictures. Every two seconds
it changes the seed, a strength or the prompt in turn, right before a frame. ``lost`` has for each kind of change the
frames of the second behind it that got no picture, ``first`` those of its first changes, ``lost_between`` those of all
other frames, in percent. Delays are from the sending of a frame to its picture. ``--minutes 30`` is a soak. ``--tiny``
takes tiny models and no GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import struct
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import models
import psutil
import realtime

sys.path.insert(0, str(models.ROOT / "tests" / "support"))

import pack  # noqa: F401  (it makes the pack importable)
from comfy_process import ComfyProcess
from live_client import Client, image, joined, run_stream
from prompts import server
from scenarios import Prompt, node

CHANGES = ("seed", "strengths", "prompt")
EVERY, BEHIND = 2.0, 1.0
"""Seconds between two changes; and those behind each in which lost frames count as lost to it."""
LOOK_EVERY = 10.0
"""Seconds between two looks at the server's memory."""
WARM = 8.0
"""Seconds without changes before the clock starts."""


@dataclass
class Seen:
    """Observations of the client: times of frames and pictures by number, changes, and memory in MB over time."""

    sent: list[float] = field(default_factory=list)
    answered: dict[int, float] = field(default_factory=dict)
    changed: list[tuple[str, int]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    memory: list[dict[str, float]] = field(default_factory=list)


def prompt(case: realtime.Case, scale: realtime.Scale) -> Prompt:
    """A case of ``realtime.py`` with live frames, and a text encoder for new prompts."""
    built = realtime.stream(case, scale, realtime.DISTINCT)
    if scale.tiny:
        built["loader"] = node("CheckpointLoaderSimple", ckpt_name="tiny_sd15.safetensors")
    del built["frames"]
    del built["stream"]["inputs"]["frames"]
    built["stream"]["inputs"]["clip"] = ["loader", 1]
    for name in ("positive", "negative"):  # as users have them: a changed prompt then differs in its text alone
        built[name] = node("CLIPTextEncode", clip=["loader", 1], text=f"a {name} picture")
    return built


async def send(client: Client, seen: Seen, frames: list[bytes], rate: float, until: float) -> None:
    """Send frames at a rate, and changes between them."""
    begun, next_change, turn = time.perf_counter(), time.perf_counter() + WARM, 0
    while (now := time.perf_counter()) < until:
        if now >= next_change:
            kind = CHANGES[turn % len(CHANGES)]
            value = {"seed": turn, "strengths": [0.3 + turn % 5 / 10], "prompt": f"a picture of thing {turn}"}[kind]
            await client.socket.send_str(json.dumps({kind: value}))
            seen.changed.append((kind, len(seen.sent)))
            turn, next_change = turn + 1, next_change + EVERY
        seen.sent.append(time.perf_counter())
        await client.socket.send_bytes(frames[len(seen.sent) % len(frames)])
        await asyncio.sleep(max(0.0, begun + len(seen.sent) / rate - time.perf_counter()))


async def receive(client: Client, seen: Seen) -> None:
    """Take pictures and texts until there are no more."""
    async for message in client.socket:
        if isinstance(message.data, bytes):
            (number,) = struct.unpack_from("<I", message.data)
            seen.answered[number] = time.perf_counter()
        elif "error" in json.loads(message.data):
            seen.refused.append(message.data)


async def look(comfy: ComfyProcess, seen: Seen) -> None:
    """Look at the memory of the server now and then."""
    process = psutil.Process(comfy.pid)
    while True:
        (device, *_) = (await asyncio.to_thread(comfy.get, "/system_stats"))["devices"]
        used = (device["vram_total"] - device["vram_free"]) / 1e6
        seen.memory.append({"s": time.perf_counter(), "rss": process.memory_info().rss / 1e6, "vram": used})
        await asyncio.sleep(LOOK_EVERY)


async def act(comfy: ComfyProcess, seen: Seen, options: argparse.Namespace, side: int, token: str) -> None:
    """Be the client of a stream for some minutes."""
    from hybrid_trt.streaming import pictures

    frames = [pictures.write(image(n, side, side), "jpeg") for n in range(realtime.DISTINCT)]
    async with joined(comfy, token, format="jpeg") as client:
        tasks = [asyncio.create_task(receive(client, seen)), asyncio.create_task(look(comfy, seen))]
        await send(client, seen, frames, options.fps, time.perf_counter() + WARM + 60 * options.minutes)
        await asyncio.sleep(1)
        tasks[1].cancel()
        await client.socket.send_str(json.dumps({"stop": True}))
        await asyncio.wait(tasks[:1], timeout=20)


def row(case: str, seen: Seen, rate: float) -> dict[str, Any]:
    """The figures of a run."""
    window, lost = int(BEHIND * rate), {kind: [] for kind in CHANGES}
    near: set[int] = set()
    for kind, number in seen.changed:
        behind = range(number, min(number + window, len(seen.sent)))
        lost[kind].append(sum(one not in seen.answered for one in behind))
        near.update(behind)
    counted = [one for one in range(int(WARM * rate), len(seen.sent)) if one not in near]
    delays = sorted(1000 * (at - seen.sent[number]) for number, at in seen.answered.items() if number > WARM * rate)
    began = seen.memory[0]["s"]
    half = seen.memory[len(seen.memory) // 2 :]
    return {
        "case": case, "fps_sent": rate, "sent": len(seen.sent), "answered": len(seen.answered),
        "delay_p50_ms": round(statistics.median(delays), 2), "delay_p99_ms": round(delays[int(len(delays) * 0.99)], 2),
        "lost": {kind: {"changes": len(found), "median": statistics.median(found or [0]), "most": max(found, default=0),
                        "first": found[:10]}
                 for kind, found in lost.items()},
        "lost_between_percent": round(100 * sum(one not in seen.answered for one in counted) / len(counted), 2),
        "refused": seen.refused[:3],
        **{f"{name}_growth_of_last_half_percent": round(100 * (half[-1][name] / half[0][name] - 1), 3)
           for name in ("rss", "vram")},
        "memory_mb": [{name: round(value - (began if name == "s" else 0), 1) for name, value in one.items()}
                      for one in seen.memory[:: max(1, len(seen.memory) // 20)]],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", choices=realtime.CASES, default=["turbo_1step_1cn_taesd"])
    parser.add_argument("--fps", type=float, default=30.0)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--no-build", action="store_true", help="build nothing: live weights as graphs, the VAE native")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    options.comfyui, options.base = options.comfyui.resolve(), options.base.resolve()
    options.mode, scale = "disable-dynamic-vram", realtime.Scale(options.tiny, 0, build=not options.no_build)
    cases = [realtime.CASES[name] for name in options.cases]
    if scale.tiny:
        models.tiny_models.make_images(options.base / "input")
    else:
        models.make(options.comfyui, options.base, scale.files(cases))
    rows = []
    arguments = ["--cpu"] if scale.tiny else ["--disable-dynamic-vram"]
    with server(options.comfyui, options.base, options.out.with_suffix(".log"), *arguments) as comfy:
        for case in cases:
            realtime.done(comfy.queue(realtime.stream(case, scale, realtime.DISTINCT), 580))  # builds what is missing
            seen = Seen()
            client = partial(act, comfy, seen, options, scale.side)
            realtime.done(run_stream(comfy, prompt(case, scale), client, 120))
            rows.append(row(case.name, seen, options.fps))
            print(json.dumps({name: value for name, value in rows[-1].items() if name != "memory_mb"}), flush=True)
            command = " ".join(["python benchmarks/live.py", *sys.argv[1:]])
            found = {"meta": realtime.meta(options) | {"command": command}, "rows": rows}
            options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
