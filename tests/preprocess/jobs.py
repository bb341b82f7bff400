"""Small jobs whose samples are texts; what workers import is little, so that they start quickly."""

from __future__ import annotations

import os
import time
from pathlib import Path

from megasnn.preprocess.items import Item, Listing
from megasnn.preprocess.run import Job


def number_as_text(item: Item) -> dict[str, bytes]:
    """Stands for the reading of a recording; the file's name says what is wrong with it."""
    if item.source.name.startswith("bad"):
        raise ValueError(f"{item.source} is broken")
    return {"txt": item.key.encode() * 300}


def sleepy(item: Item) -> dict[str, bytes]:
    time.sleep(0.03)
    return number_as_text(item)


def dying(item: Item) -> dict[str, bytes]:
    if item.key == "s7":
        os._exit(9)
    return number_as_text(item)


def job(output: Path, samples: int = 23, bad: tuple[int, ...] = (), encode=number_as_text, **changes) -> Job:
    items = [Item(f"s{n}", n % 3, Path(f"{'bad' if n in bad else 'good'}{n}")) for n in range(samples)]
    listing = Listing({"train": items, "test": items[:5]}, ["a", "b", "c"])
    return Job(output, listing, encode, {"option": 1}, samples_per_shard=4, **changes)
