"""Samples of shards as they are stored, to be looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasnn.data.dataset import ShardDataset
from megasnn.data.event_files import EVENTS, FRAMES, FrameSettings, decode_sample, make_frames
from megasnn.data.images import IMAGE_SUFFIXES, open_image
from megasnn.data.order import SampleOrder
from megasnn.data.paths import expand_shards
from megasnn.data.remote.shard import FetchOptions
from megasnn.data.shard_list import index_of, open_shards
from megasnn.files.sample_size import SAMPLE_BYTES, SAMPLE_MB

_ANY_CLASS = 2**31
_ZIP = b"PK"  # an .npz is one


@dataclass(frozen=True)
class AsStored:
    """Images in their own size, frames as they are; of events, `time_steps` frames of equal numbers of events."""

    time_steps: int
    limit: int
    suffixes = (*IMAGE_SUFFIXES, FRAMES, EVENTS)

    def decode(self, data: bytes) -> NDArray[Any]:
        """uint8 `[H, W, C]` or frames `[T, 2, H, W]`. Raises ValueError for damaged bytes."""
        if not data.startswith(_ZIP):
            try:
                image = open_image(data, self.limit)
                return np.asarray(image.convert("L" if image.mode == "L" else "RGB"))
            except Exception as error:  # Pillow has no common class for what damaged bytes make it raise
                raise ValueError(f"cannot be decoded: {error}") from error
        sample = decode_sample(data, self.limit)
        if isinstance(sample, np.ndarray):
            return sample
        return make_frames(sample, FrameSettings(self.time_steps), self.limit)


def read_samples(
    data_path: str, count: int, seed: int | None = None, time_steps: int = 10, max_sample_mb: int = SAMPLE_MB
) -> tuple[list[NDArray[Any]], list[str]]:
    """Samples of shards, and a caption for each: its key and class.

    Args:
        data_path: as for training.
        count: at most so many.
        seed: takes them at random; None takes the first ones.
        time_steps: frames of a recording where the shards hold events.
        max_sample_mb: a sample that takes more, in its file or decoded, is refused.

    Raises:
        ValueError: a shard is missing, cut or empty, a sample cannot be decoded, or a number is below 1.
    """
    if count < 1:
        raise ValueError(f"--samples must be at least 1, got {count}")
    if max_sample_mb < 1:
        raise ValueError(f"--max-sample-mb must be at least 1, got {max_sample_mb}")
    addresses = expand_shards(data_path, "SHARDS")
    format = AsStored(time_steps, max_sample_mb << 20)
    FrameSettings(time_steps)
    dataset = ShardDataset(open_shards(addresses, format.suffixes, SAMPLE_BYTES, FetchOptions()), format, _ANY_CLASS)
    index = index_of(addresses[0])
    classes = index.classes if index else []
    order = SampleOrder(len(dataset), seed or 0, shuffle=seed is not None)
    chosen = [slot.sample for slot in order.slots(0, min(count, len(dataset)))]
    captions = [f"{dataset.key(sample)}   class {_named(int(dataset.labels[sample]), classes)}" for sample in chosen]
    return [dataset.sample(sample) for sample in chosen], captions


def _named(label: int, classes: list[str]) -> str:
    """The class by number and, where it is known and says more, by name."""
    return f"{label} ({classes[label]})" if label < len(classes) and classes[label] != str(label) else str(label)
