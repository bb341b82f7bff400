"""Decoders that leave traces for the test that watches them. Workers import this file, thus no torch in it."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megasnn.data.images import ImageFormat


@dataclass(frozen=True)
class Watched(ImageFormat):
    """Leaves a file for each sample in `folder`: <process>-<number>, containing whether torch has been imported.

    Attributes:
        workers: a sample is given only when so many processes have begun with one.
    """

    folder: str = ""
    workers: int = 0

    def decode(self, data: bytes) -> np.ndarray:
        image = super().decode(data)
        (Path(self.folder) / f"{os.getpid()}-{image[0, 0, 0]}").write_text(str("torch" in sys.modules))
        wait_until(lambda: len(processes(self.folder)) >= self.workers)
        return image


class Unportable(Exception):
    """Cannot be unpickled."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other} do not go together")


@dataclass(frozen=True)
class Faulty(ImageFormat):
    """A decoder with a bug: it raises what no decoder should."""

    def decode(self, data: bytes) -> np.ndarray:
        raise Unportable(1, 2)


def processes(folder: str | Path) -> set[int]:
    """Those that have decoded something."""
    return {int(name.split("-")[0]) for name in os.listdir(folder)}


def wait_until(holds, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)
