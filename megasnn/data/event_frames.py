"""From the event samples of a shard to frames [T, 2, H, W] as the model takes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megasnn.data.formats import FormatMismatch
from megasnn.events import resize_frames
from megasnn.preprocess.event_files import EVENTS, FRAMES, FrameSettings, decode_sample, make_frames


@dataclass(frozen=True)
class EventFormat:
    """What a model expects of an event sample.

    Kept events become frames here. Frames that preprocessing made are taken as they are, and scaled where they have
    another size.

    Attributes:
        settings: time steps, size and, for kept events, how frames are made of them.
    """

    settings: FrameSettings
    suffixes = (FRAMES, EVENTS)
    augmentations = ("none", "dvs", "nda", "roll")

    def decode(self, data: bytes) -> NDArray[Any]:
        """The content of a frames.npz or events.npz as `[T, 2, size, size]`, counts or float32.

        Raises:
            ValueError: damaged, or a recording too short for the frames.
            FormatMismatch: whole, but made for another number of time steps.
        """
        sample = decode_sample(data)
        if not isinstance(sample, np.ndarray):
            return make_frames(sample, self.settings)
        if len(sample) != self.settings.time_steps:
            raise FormatMismatch(
                f"has {len(sample)} frames, and the model takes --time-steps {self.settings.time_steps}; set "
                f"--time-steps {len(sample)}, or run tools/preprocess_data.py again (with --keep-events, any "
                f"number goes)"
            )
        size = self.settings.size
        return sample if size is None or sample.shape[2:] == (size, size) else resize_frames(sample, size)

    def to_tensor(self, batch: list[NDArray[Any]]) -> torch.Tensor:
        """Frames of n samples as float32 `[n, T, 2, H, W]`."""
        values = np.empty((len(batch), *batch[0].shape), np.float32)
        for target, frames in zip(values, batch, strict=True):
            target[...] = frames
        return torch.from_numpy(values)
