"""Samples of shards as they are stored, to be looked at."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from megasnn.data.dataset import ShardDataset
from megasnn.data.images import IMAGE_SUFFIXES
from megasnn.data.order import SampleOrder
from megasnn.data.paths import expand_shards
from megasnn.data.shards import open_shard
from megasnn.preprocess.event_files import EVENTS, FRAMES, FrameSettings, decode_sample, make_frames
from megasnn.preprocess.index import read_index

_ANY_CLASS = 2**31
_ZIP = b"PK"  # an .npz is one


@dataclass(frozen=True)
class AsStored:
    """Images in their own size, frames as they are; of events, `time_steps` frames of equal numbers of events."""

    time_steps: int
    suffixes = (*IMAGE_SUFFIXES, FRAMES, EVENTS)

    def decode(self, data: bytes) -> NDArray[Any]:
        """uint8 `[H, W, C]` or frames `[T, 2, H, W]`. Raises ValueError for damaged bytes."""
        if not data.startswith(_ZIP):
            try:
                image = Image.open(io.BytesIO(data))
                return np.asarray(image.convert("L" if image.mode == "L" else "RGB"))
            except Exception as error:  # Pillow has no common class for what damaged bytes make it raise
                raise ValueError(f"cannot be decoded: {error}") from error
        sample = decode_sample(data)
        return sample if isinstance(sample, np.ndarray) else make_frames(sample, FrameSettings(self.time_steps))


def read_samples(
    data_path: str, count: int, seed: int | None = None, time_steps: int = 10
) -> tuple[list[NDArray[Any]], list[str]]:
    """Samples of shards, and a caption for each: its key and class.

    Args:
        data_path: as for training.
        count: at most so many.
        seed: takes them at random; None takes the first ones.
        time_steps: frames of a recording where the shards hold events.

    Raises:
        ValueError: a shard is missing, cut or empty, a sample cannot be decoded, or `count` is below 1.
    """
    if count < 1:
        raise ValueError(f"--samples must be at least 1, got {count}")
    paths = expand_shards(data_path, "SHARDS")
    format = AsStored(time_steps)
    FrameSettings(time_steps)
    dataset = ShardDataset([open_shard(path, format.suffixes) for path in paths], format, _ANY_CLASS)
    index = read_index(paths[0].parent)
    classes = index.classes if index else []
    order = SampleOrder(len(dataset), seed or 0, shuffle=seed is not None)
    chosen = [slot.sample for slot in order.slots(0, min(count, len(dataset)))]
    captions = [f"{dataset.key(sample)}   class {_named(int(dataset.labels[sample]), classes)}" for sample in chosen]
    return [dataset.sample(sample) for sample in chosen], captions


def _named(label: int, classes: list[str]) -> str:
    """The class by number and, where it is known and says more, by name."""
    return f"{label} ({classes[label]})" if label < len(classes) and classes[label] != str(label) else str(label)
