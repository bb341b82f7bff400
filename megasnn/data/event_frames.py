"""Event frames: from the event samples of a shard to frames [T, 2, H, W] as the model takes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasnn import augment
from megasnn.data.event_files import EVENTS, FRAMES, decode_sample
from megasnn.data.formats import FormatMismatch, SampleFormat
from megasnn.events import FrameOptions, make_frames, resize_frames
from megasnn.files import SAMPLE_BYTES


@dataclass(frozen=True)
class EventFormat(SampleFormat):
    """Event samples as a model takes them.

    Kept events become frames here. Frames that preprocessing made are taken as they are, and scaled where they have
    another size.

    Attributes:
        settings: time steps, size and, for kept events, how frames are made of them.
        limit: bytes that a sample may take, packed or decoded.
    """

    settings: FrameOptions
    limit: int = SAMPLE_BYTES
    suffixes = (FRAMES, EVENTS)
    kind = augment.FRAMES
    axes = (0, 1, 2, 3, 4)

    def decode(self, data: bytes) -> NDArray[Any]:
        """The content of a frames.npz or events.npz as `[T, 2, size, size]`, counts or float32.

        Raises:
            ValueError: damaged, or a recording too short for the frames.
            FormatMismatch: whole, but made for another number of time steps.
        """
        sample = decode_sample(data, self.limit)
        if not isinstance(sample, np.ndarray):
            return make_frames(sample, self.settings, self.limit)
        if len(sample) != self.settings.time_steps:
            raise FormatMismatch(
                f"has {len(sample)} frames, and the model takes --time-steps {self.settings.time_steps}; set "
                f"--time-steps {len(sample)}, or run megasnn-preprocess-data again (with --keep-events, any "
                f"number goes)"
            )
        size = self.settings.size
        return sample if size is None or sample.shape[2:] == (size, size) else resize_frames(sample, size)

    def fill(self, values: NDArray[np.float32], sample: NDArray[Any]) -> None:
        """Frames `[T, 2, H, W]` as they are."""
        values[...] = sample
