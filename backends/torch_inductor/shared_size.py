"""One size that several processes compile together, each a part of the network: files in their folder tie them."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...comfy_model.torch_kernels import best_attention
from . import parts
from .compiled import Compiled, by_inductor, keep_parts, let_kernels_be_recorded, open_file, traced

log = logging.getLogger(__name__)

POLL = 0.02
"""Seconds between two looks for a file. Nobody waits in vain: who started the processes ends all when one fails."""


@dataclass(frozen=True)
class SharedSize:
    """A size as the process sees it that compiles part ``part`` of ``count``; the first one has part 0.

    Attributes:
        path: the file for all parts together; what it is made of lies beside it meanwhile.
    """

    path: Path
    part: int
    count: int

    def agreed(self, choice: Any = None) -> Any:
        """Return what the first process chose, in all of them: it gives its ``choice``, the others wait for it."""
        file = self._beside("choice")
        if self.part == 0:
            _write(file, json.dumps(choice).encode())
            return choice
        return json.loads(_awaited(file))

    def compile(
        self,
        function: torch.nn.Module,
        weights: Sequence[torch.Tensor],
        names: Sequence[str],
        inputs: Sequence[torch.Tensor],
        attention: str | None = None,
        late: Collection[int] = (),
    ) -> Compiled | None:
        """Do this process's part of what ``compile_to_file`` does, whose arguments these are.

        Returns:
            What was compiled, all parts put together; None in all processes but the first.
        """
        let_kernels_be_recorded()
        with torch.inference_mode(False), torch.no_grad(), best_attention(inputs[0].device, attention):
            graph, _ = traced(function, weights, names, inputs, late, functional=True)
            cut, outputs = parts.in_parts(graph, self.count)
            key = hashlib.sha256("\n".join(part.graph.code for part in cut).encode()).hexdigest()
            own = self._compiled(cut[self.part], self.part)
        if self.part:
            _write(self._beside(f"part{self.part}"), pickle.dumps((key, own)))
            return None
        each = [own, *(self._from_another(number, cut[number], key) for number in range(1, self.count))]
        keep_parts(self.path, each, [(part.takes, part.gives) for part in cut], outputs)
        self._beside("choice").unlink(missing_ok=True)
        return open_file(self.path)

    def _from_another(self, number: int, part: parts.Part, key: str) -> bytes:
        file = self._beside(f"part{number}")
        its_key, contents = pickle.loads(_awaited(file))
        file.unlink()
        if its_key == key:
            return contents
        log.warning("part %d is of a network that was traced otherwise: it is compiled again", number + 1)
        with torch.inference_mode(False), torch.no_grad():
            return self._compiled(part, number)

    def _compiled(self, part: parts.Part, number: int) -> bytes:
        file = self._beside(f"inductor{number}")
        by_inductor(part.graph, part.examples()).save(path=str(file))
        contents = file.read_bytes()
        file.unlink()
        return contents

    def _beside(self, what: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{what}")


def _write(file: Path, contents: bytes) -> None:
    """Whoever sees the file sees all of it."""
    new = file.with_name(f"{file.name}.new")
    new.write_bytes(contents)
    os.replace(new, file)


def _awaited(file: Path) -> bytes:
    while not file.exists():
        time.sleep(POLL)
    return file.read_bytes()
