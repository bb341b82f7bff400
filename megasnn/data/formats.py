"""Formats of samples: from the bytes of a sample's file to the model's input; event samples.

``<key>.frames.npz`` holds one array "frames" `[T, 2, H, W]`: counts as uint8 or uint16, or float32 where they were
scaled or normalised. ``<key>.events.npz`` holds t (µs from the first event), x, y, p, height and width, so that a
program may choose the number of frames later.
"""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from megasnn.augment import AUGMENTATIONS, Augmentation, SampleKey
from megasnn.augment import FRAMES as EVENT_FRAMES
from megasnn.common.files import read_arrays
from megasnn.data.events import (
    FrameOptions,
    Recording,
    check_recording,
    make_frames,
    recording_of_arrays,
    resize_frames,
)

FRAMES, EVENTS = "frames.npz", "events.npz"


class FormatMismatch(ValueError):
    """A sample that is sound, but not of the shape that the model takes: the flags are wrong, it is not skipped."""


class SampleFormat(ABC):
    """A kind of samples.

    Attributes:
        kind: of the samples, as augmentations name it.
        suffixes: endings of the files it decodes.
        reads_all: True where it decodes all files of a sample.
    """

    kind: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]] = ()
    reads_all: ClassVar[bool] = False

    def decode(self, data: bytes, key: SampleKey | None = None) -> Any:
        """Decodes a sample, changed at random where a key is given.

        Raises:
            ValueError: damaged bytes, or values that are not finite. FormatMismatch: sound ones that do not fit the
                model.
        """
        try:
            return self.decoded(data, key)
        except (ValueError, MemoryError):
            raise
        except Exception as error:  # decoders have no common class for what damaged bytes make them raise
            raise ValueError(f"{type(error).__name__}: {error}") from error

    @abstractmethod
    def decoded(self, data: bytes, key: SampleKey | None) -> Any:
        """The sample of `decode`, where errors of damaged bytes may be of any class."""

    def batch(self, samples: Sequence[Any]) -> Any:
        """Joins decoded samples to the model's input, float32, the samples first."""
        return np.stack(samples, out=np.empty((len(samples), *samples[0].shape), np.float32))


@dataclass(frozen=True)
class EventFormat(SampleFormat):
    """Event samples as a model takes them.

    Kept events become frames here. Frames that preprocessing made are scaled where they have another size.
    """

    settings: FrameOptions
    augment: Augmentation = AUGMENTATIONS["none"]
    suffixes = (FRAMES, EVENTS)
    kind = EVENT_FRAMES

    def decoded(self, data: bytes, key: SampleKey | None) -> NDArray[Any]:
        """Content of a frames.npz or events.npz as `[T, 2, size, size]`, counts or float32; changed with a key.

        Raises:
            ValueError: damaged, or a recording too short for the frames.
            FormatMismatch: made for another number of time steps.
        """
        sample, size = decode_events(data), self.settings.size
        if isinstance(sample, Recording):
            sample = make_frames(sample, self.settings)
        elif len(sample) != self.settings.time_steps:
            raise FormatMismatch(
                f"has {len(sample)} frames, and the model takes --time-steps {self.settings.time_steps}; set "
                f"--time-steps {len(sample)}, or preprocess again (with --keep-events, any number goes)"
            )
        elif size is not None and sample.shape[2:] != (size, size):
            sample = resize_frames(sample, size)
        return self.augment.change(sample, *key) if key else sample


def require_finite(values: NDArray[Any], name: str) -> NDArray[Any]:
    """Returns the values. Raises ValueError where one is not finite as float32: a neuron would hide it."""
    with np.errstate(over="ignore"):
        if values.dtype.kind == "f" and not np.isfinite(values.astype(np.float32, copy=False)).all():
            raise ValueError(f"{name} hold values that are nan or infinite, or too large for float32")
    return values


def decode_events(data: bytes) -> Recording | NDArray[Any]:
    """The recording of an events.npz, or the array `[T, 2, H, W]` of a frames.npz, which is read-only.

    Raises:
        ValueError: damaged, neither, too large, or not finite; events out of order or outside their sensor.
    """
    arrays = read_arrays(data)
    if "frames" not in arrays:
        return check_recording(recording_of_arrays(arrays))
    frames = arrays["frames"]
    if frames.ndim != 4 or frames.shape[1] != 2 or not frames.size or frames.dtype.kind not in "iuf":
        raise ValueError(f"frames are numbers [T, 2, H, W], not {frames.dtype} {list(frames.shape)}")
    return require_finite(frames, "frames")


def encode_frames(frames: NDArray[Any]) -> bytes:
    """Makes a frames.npz of `[T, 2, H, W]`; integer counts become the smallest type that holds them."""
    if frames.dtype.kind in "iu":
        frames = frames.astype(np.min_scalar_type(int(frames.max(initial=0))))
    return _npz(frames=frames)


def encode_events(recording: Recording) -> bytes:
    """Makes an events.npz of a recording; equal recordings give equal bytes."""
    events, sensor = recording.events, recording.sensor
    t = events.t - events.t[0]
    place = np.uint8 if max(sensor) <= 256 else np.uint16
    return _npz(
        t=t.astype(np.uint32) if t[-1] < 2**32 else t,
        x=events.x.astype(place),
        y=events.y.astype(place),
        p=events.p,
        height=np.array(sensor.height),
        width=np.array(sensor.width),
    )


def _npz(**arrays: NDArray[Any]) -> bytes:
    """NumPy's .npz, always with the same bytes: NumPy dates its parts 1980."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()
