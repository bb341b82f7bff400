"""Sample formats: from a file's bytes to the model's input; and files with event samples."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from megasnn.augment import AUGMENTATIONS, EVENT_FRAMES, Augmentation, SampleKey
from megasnn.common.files import quantity, read_arrays
from megasnn.data.events import (
    FrameOptions,
    Recording,
    check_recording,
    make_frames,
    recording_of_arrays,
    resize_frames,
)

FRAMES = "frames.npz"
"""One array "frames" `[T, 2, H, W]`: counts as uint8 or uint16, or float32 once scaled or normalised."""
EVENTS = "events.npz"
"""Arrays t (µs from the first event), x, y, p, height and width."""


class FormatMismatch(ValueError):
    """A sound sample that does not fit the model: flags are wrong, and it is never skipped."""


class BatchFormat:
    """Joins samples into batches.

    Attributes:
        inputs: names for the layers, in samples with named arrays.
        target: name for the loss, in samples with named arrays; "" for the class.
    """

    inputs: tuple[str, ...] = ()
    target: str = ""

    def batch(self, samples: Sequence[Any]) -> Any:
        """Joins samples into float32 `[N, ...]`."""
        joined = np.empty((len(samples), *samples[0].shape), np.float32)
        return np.stack(samples, out=joined)


class SampleFormat(BatchFormat, ABC):
    """Decoder for a kind of sample.

    Attributes:
        kind: as in `Augmentation.samples`.
        reads_all: decodes all files in a sample, not one.
    """

    kind: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]] = ()
    reads_all: ClassVar[bool] = False

    def decode(self, data: bytes, key: SampleKey | None = None) -> Any:
        """Decodes a sample; a key augments it.

        Raises:
            ValueError: damaged, or not finite.
            FormatMismatch: it does not fit the model.
        """
        try:
            return self.decoded(data, key)
        except (ValueError, MemoryError):
            # Too little memory is no damage.
            raise
        except Exception as error:
            # Decoders have no common error class.
            raise ValueError(f"{type(error).__name__}: {error}") from error

    @abstractmethod
    def decoded(self, data: bytes, key: SampleKey | None) -> Any:
        """As `decode`; damaged bytes may raise any error."""


@dataclass(frozen=True)
class EventFormat(SampleFormat):
    """Event frames, made from recordings, or prepared and scaled to the model's size."""

    settings: FrameOptions
    augment: Augmentation = AUGMENTATIONS["none"]
    suffixes = (FRAMES, EVENTS)
    kind = EVENT_FRAMES

    def decoded(self, data: bytes, key: SampleKey | None) -> NDArray[Any]:
        """Frames `[T, 2, size, size]`, counts or float32. Raises FormatMismatch for another T."""
        sample = decode_events(data)
        size = self.settings.size
        if isinstance(sample, Recording):
            sample = make_frames(sample, self.settings)
        elif len(sample) != self.settings.time_steps:
            raise FormatMismatch(
                f"has {quantity(len(sample), 'frame')}, and the model takes --time-steps {self.settings.time_steps}; "
                f"set --time-steps {len(sample)}, or preprocess again (--keep-events allows any number)"
            )
        elif size is not None and sample.shape[2:] != (size, size):
            sample = resize_frames(sample, size)
        return self.augment.change(sample, *key) if key else sample


def require_finite(values: NDArray[Any], name: str) -> NDArray[Any]:
    """Returns the values. Raises ValueError for one that is not finite as float32."""
    # A neuron would hide it: nan >= threshold is False.
    with np.errstate(over="ignore"):
        if values.dtype.kind == "f" and not np.isfinite(values.astype(np.float32, copy=False)).all():
            raise ValueError(f"{name} hold values that are nan or infinite, or too large for float32")
    return values


def decode_events(data: bytes) -> Recording | NDArray[Any]:
    """Recording in an events.npz, or read-only array `[T, 2, H, W]` in a frames.npz. Raises ValueError."""
    if data.startswith(npy.MAGIC_PREFIX):
        raise ValueError(
            f"it holds an .npy array under the name of an .npz file (.{FRAMES} or .{EVENTS}); write it with "
            "numpy.savez, frames=ARRAY, or name it .npy"
        )
    arrays = read_arrays(data)
    if "frames" not in arrays:
        return check_recording(recording_of_arrays(arrays))
    frames = arrays["frames"]
    if frames.ndim != 4 or frames.shape[1] != 2 or not frames.size or frames.dtype.kind not in "iuf":
        raise ValueError(f"frames must be numbers [T, 2, H, W], not {frames.dtype} {list(frames.shape)}")
    return require_finite(frames, "frames")


def encode_frames(frames: NDArray[Any]) -> bytes:
    """A frames.npz for `[T, 2, H, W]`; counts get the smallest type."""
    if frames.dtype.kind in "iu":
        frames = frames.astype(np.min_scalar_type(int(frames.max(initial=0))))
    return _npz(frames=frames)


def encode_events(recording: Recording) -> bytes:
    """An events.npz; equal recordings have equal bytes."""
    events = recording.events
    sensor = recording.sensor
    t: NDArray[Any] = events.t - events.t[0]
    if t[-1] < 2**32:
        t = t.astype(np.uint32)
    coordinate = np.uint8 if max(sensor) <= 256 else np.uint16
    return _npz(
        t=t,
        x=events.x.astype(coordinate),
        y=events.y.astype(coordinate),
        p=events.p,
        height=np.array(sensor.height),
        width=np.array(sensor.width),
    )


def _npz(**arrays: Any) -> bytes:
    # Arrays are Any: numpy's types would take one for the argument `allow_pickle`.
    buffer = io.BytesIO()
    # NumPy dates the members 1980, so equal arrays have equal bytes.
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()
