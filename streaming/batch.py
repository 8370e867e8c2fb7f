"""A stream's frames from an IMAGE batch, and its pictures as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from .frames import Changes, Frame
from .transfers import copy


class BatchSource:
    """The images of a batch in order, each once.

    Attributes:
        pictures: the pictures so far, (frames, H, W, 3); None before the first.
    """

    def __init__(self, images: torch.Tensor, progress: Callable[[int], None] = lambda done: None):
        """
        Args:
            progress: called with the number of pictures so far.
        """
        self._images = images
        self._progress = progress
        self.pictures: torch.Tensor | None = None

    def frames(self) -> Iterator[Frame]:
        """Yield the images."""
        for number in range(self._images.shape[0]):
            yield Frame(number, self._images[number : number + 1])

    def ready(self) -> bool:
        """Tell that the next frame is there."""
        return True

    def give(self, number: int, picture: torch.Tensor) -> None:
        """Put a picture into the batch."""
        if self.pictures is None:
            self.pictures = torch.empty(self._images.shape[0], *picture.shape[1:], dtype=picture.dtype)
        copy(picture[0], self.pictures[number])
        self._progress(number + 1)

    def refuse(self, why: str, settings: Changes) -> None:
        """Do nothing: images of a batch bring no changes."""
