"""An event sample inside a shard: ``<key>.frames.npz`` or ``<key>.events.npz``.

frames.npz holds one array "frames" [T, 2, H, W]: counts as uint8 or uint16, or float32 where they were scaled or
normalised. events.npz holds t (µs from the first event), x, y, p, height and width, so that a program may choose the
number of frames later.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasnn.events import LARGEST_SIDE, Recording, recording_of_arrays
from megasnn.files import SAMPLE_BYTES, read_arrays

FRAMES, EVENTS = "frames.npz", "events.npz"
# Levels of zlib. Higher ones save a few per cent of space for several times the time.
_FRAMES_LEVEL, _EVENTS_LEVEL = 4, 1


def encode_frames(frames: NDArray[Any]) -> bytes:
    """frames.npz of [T, 2, H, W]; integer counts become the smallest type that holds them."""
    if frames.dtype.kind in "iu":
        frames = frames.astype(np.min_scalar_type(int(frames.max(initial=0))))
    return _npz({"frames": frames}, _FRAMES_LEVEL)


def encode_events(recording: Recording) -> bytes:
    """events.npz of a recording; equal recordings give equal bytes."""
    events, sensor = recording.events, recording.sensor
    t = events.t - events.t[0]
    place = np.uint8 if max(sensor) <= 256 else np.uint16
    return _npz(
        {
            "t": t.astype(np.uint32) if t[-1] < 2**32 else t,
            "x": events.x.astype(place),
            "y": events.y.astype(place),
            "p": events.p,
            "height": np.array(sensor.height),
            "width": np.array(sensor.width),
        },
        _EVENTS_LEVEL,
    )


def decode_sample(data: bytes, limit: int = SAMPLE_BYTES) -> Recording | NDArray[Any]:
    """The recording of an events.npz, or the array [T, 2, H, W] of a frames.npz, which cannot be written to.

    Raises:
        ValueError: damaged, neither, or of more bytes than `limit`; events out of order or outside their sensor; frames
            with values that are no finite numbers.
    """
    try:
        arrays = read_arrays(data, limit)
    except ValueError as error:
        raise ValueError(f"{error}") from error
    if "frames" not in arrays:
        return recording_of_arrays(arrays, "its events.npz", limit)
    frames = arrays["frames"]
    if frames.ndim != 4 or frames.shape[1] != 2 or frames.dtype.kind not in "iuf":
        raise ValueError(f"frames are numbers [T, 2, H, W], not {frames.dtype} {list(frames.shape)}")
    if not frames.size or max(frames.shape[2:]) > LARGEST_SIDE:
        raise ValueError(f"frames {list(frames.shape)} are empty or of no sensor")
    with np.errstate(over="ignore"):
        if frames.dtype.kind == "f" and not np.isfinite(frames.astype(np.float32, copy=False)).all():
            raise ValueError("frames hold values that are no finite numbers (NaN or infinite)")
    return frames


def _npz(arrays: Mapping[str, NDArray[Any]], level: int) -> bytes:
    """NumPy's .npz, always with the same bytes: no times of writing in it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, array in arrays.items():
            content = io.BytesIO()
            np.lib.format.write_array(content, np.asarray(array, order="C"), allow_pickle=False)
            info = zipfile.ZipInfo(f"{name}.npy")  # dated 1980
            archive.writestr(info, content.getvalue(), zipfile.ZIP_DEFLATED, level)
    return buffer.getvalue()
