"""``python -m farm render``: one workflow, many seeds, a folder of pictures. An interrupted batch goes on."""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import json
import logging
import os
import re
import time
from pathlib import Path
from typing import Any

import aiohttp
from tqdm import tqdm

from .pictures import Pictures, for_request, of_folder
from .prompts import Prompt, is_prompt, with_seed

log = logging.getLogger("farm")

WAIT = 3.0
"""Seconds between two tries while the farm does not answer or is busy."""
_MOST_SEEDS = 100_000


class NotRendered(Exception):
    """A seed without pictures; the text says why."""


def render_batch(arguments: argparse.Namespace, token: str) -> int:
    """Render all seeds that the folder lacks; return 0 when it has them all.

    Raises:
        ValueError: the workflow, the seeds or the folder do not fit.
    """
    try:
        prompt = json.loads(arguments.workflow.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"The workflow cannot be read: {error}") from None
    if not is_prompt(prompt):
        raise ValueError(f"{arguments.workflow} is no workflow in API format: save it with Export (API) in ComfyUI.")
    batch = Batch(prompt, arguments.out, of_folder(prompt, arguments.inputs) if arguments.inputs else {})
    missing = [seed for seed in seeds(arguments.seeds) if not batch.has(seed)]
    failures = asyncio.run(_render(batch, missing, arguments, token))
    for seed, why in sorted(failures.items()):
        log.error("Seed %d was not rendered: %s", seed, why)
    return 1 if failures else 0


def seeds(text: str) -> list[int]:
    """Return the seeds of a text such as ``1-100`` or ``7,9,20-30``, in order and each once.

    Raises:
        ValueError: the text is something else, or there are too many.
    """
    found: dict[int, None] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None:
            raise ValueError(f"Seeds are written as 1-100 or 7,9,20-30, not as {text!r}.")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first + len(found) >= _MOST_SEEDS:
            raise ValueError(f"Seeds {part.strip()} run backwards, or are more than {_MOST_SEEDS}.")
        found |= dict.fromkeys(range(first, last + 1))
    return list(found)


class Batch:
    """A folder of pictures of one workflow. A seed's report is written last: where it is, the seed is done."""

    def __init__(self, prompt: Prompt, folder: Path, pictures: Pictures) -> None:
        """Open a folder, or make it.

        Args:
            pictures: pictures that go with each request.

        Raises:
            ValueError: the folder has pictures of another workflow.
        """
        self.prompt, self.folder, self.inputs = prompt, folder, for_request(pictures)
        made_of = json.dumps(with_seed(prompt, 0), sort_keys=True)
        mark = hashlib.sha256((made_of + json.dumps(self.inputs, sort_keys=True) * bool(pictures)).encode()).hexdigest()
        folder.mkdir(parents=True, exist_ok=True)
        note = folder / "workflow.sha256"
        if not note.exists():
            _write(note, mark.encode())
        elif note.read_text(encoding="utf-8") != mark:
            raise ValueError(f"{folder} has pictures of another workflow: name another folder.")

    def has(self, seed: int) -> bool:
        """Tell whether a seed is done."""
        return (self.folder / f"{seed}.json").exists()

    def keep(self, seed: int, done: dict[str, Any]) -> None:
        """Write a seed's pictures, then its report."""
        names = []
        for number, picture in enumerate(done["pictures"]):
            names.append(f"{seed}_{number}{Path(picture['name']).suffix}")
            _write(self.folder / names[-1], base64.b64decode(picture["data"]))
        rest = {key: value for key, value in done.items() if key not in ("event", "pictures")}
        _write(self.folder / f"{seed}.json", json.dumps({"pictures": names, **rest}, indent=1).encode())


async def _render(batch: Batch, missing: list[int], arguments: argparse.Namespace, token: str) -> dict[int, str]:
    """Render seeds, some at once; return failed seed -> reason."""
    failures: dict[int, str] = {}
    headers = {"Authorization": f"Bearer {token}"}
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(arguments.url, headers=headers, timeout=timeout) as farm:
        turns = asyncio.Semaphore(arguments.at_once or await _workers(farm) + 1)
        with tqdm(total=len(missing), unit="prompt") as bar:

            async def one(seed: int) -> None:
                async with turns:
                    try:
                        body = {"workflow": with_seed(batch.prompt, seed), "inputs": batch.inputs}
                        batch.keep(seed, await _done(farm, body, arguments.patience))
                    except NotRendered as error:
                        failures[seed] = str(error)
                    bar.update()

            await asyncio.gather(*map(one, missing))
    return failures


async def _workers(farm: aiohttp.ClientSession) -> int:
    try:
        async with farm.get("/ready") as answer:
            return (await answer.json())["workers"]
    except (aiohttp.ClientError, ValueError, KeyError):
        return 0


async def _done(farm: aiohttp.ClientSession, body: dict[str, Any], patience: float) -> dict[str, Any]:
    """Return the ``done`` event of a request, tried again while the farm is away or busy, or if its answer stops.

    Args:
        patience: seconds to try without an answer.

    Raises:
        NotRendered: the farm refused it, it failed, or the farm stayed away.
    """
    away = None  # since when there is no answer
    while True:
        asked = time.monotonic()
        try:
            async with farm.post("/render", json=body) as answer:
                if answer.status == 200:
                    last = _last(await answer.read())
                    if last["event"] != "done":
                        raise NotRendered(f"{last.get('error')} (node {last.get('node')})")
                    return last
                why = await answer.text()
                if answer.status < 500:
                    raise NotRendered(why)
        except aiohttp.ClientError as error:
            why = f"The farm does not answer: {error!r}"
            reached = not isinstance(error, aiohttp.ClientConnectorError | aiohttp.ServerTimeoutError)
            if reached and time.monotonic() - asked > WAIT:  # it worked until now
                away = None
        away = away or time.monotonic()
        if time.monotonic() - away >= patience:
            raise NotRendered(why)
        await asyncio.sleep(WAIT)


def _last(body: bytes) -> dict[str, Any]:
    """Return the last event of an answer.

    Raises:
        ClientError: the answer broke off.
    """
    try:
        event = json.loads(body.rstrip().rsplit(b"\n", 1)[-1])
    except ValueError:
        event = {}
    if event.get("event") not in ("done", "failed"):
        raise aiohttp.ClientPayloadError("the answer broke off")
    return event


def _write(path: Path, data: bytes) -> None:
    fresh = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        fresh.write_bytes(data)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
