"""Spiking audio: SHD and SSC, HDF5 files of spikes from a model of the cochlea (Cramer et al., arXiv 1910.07407).

A file holds, for each sample, `spikes/times` in seconds and `spikes/units` (0 to 699), both ragged, and its class in
`labels`. `extra/keys` has the class names, and SHD's `extra/speaker` the sample's speaker.
Reading requires h5py (``pip install megasnn[audio]``).
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megasnn.common.files import MissingPackageError, in_message, require_regular, require_size
from megasnn.common.random import keyed_numbers
from megasnn.data.preprocess.sources import Item, Listing

UNITS = 700
"""Input channels of both data sets."""
FRAME_FILE = "npy"
"""Ending of a sample's frames in a shard."""
_LARGEST_LABEL = 1 << 16


@dataclass(frozen=True)
class HeldOut:
    """The part of SHD's training file that becomes the validation split.

    Attributes:
        share: of each class.
        speakers: all samples of these speakers, in place of a share.
    """

    share: float = 0.0
    speakers: tuple[int, ...] = ()


@dataclass(frozen=True)
class SpikeFrames:
    """Frames of counts: frame k holds the spikes with k * duration / T <= time < (k + 1) * duration / T.

    Attributes:
        time_steps: T.
        duration: in seconds.
        channels: a divisor of 700; each channel is the sum of neighbouring units.
    """

    time_steps: int = 100
    duration: float = 1.4
    channels: int = UNITS

    def __post_init__(self) -> None:
        if self.time_steps < 1:
            raise ValueError(f"--time-steps must be at least 1, got {self.time_steps}")
        if not 0 < self.duration < 1e6:
            raise ValueError(f"--duration must be a positive number of seconds, got {self.duration}")
        if self.channels < 1 or UNITS % self.channels:
            raise ValueError(f"--channels must divide {UNITS}, for example 700, 350, 140 or 70; got {self.channels}")


class _Labels(NamedTuple):
    """A file's labels `[n]`, speakers `[n]` (None without), and class names ([] without)."""

    labels: NDArray[np.int64]
    speakers: NDArray[np.int64] | None
    names: list[str]


def list_shd(folder: Path, held_out: HeldOut) -> Listing:
    """`shd_train.h5` and `shd_test.h5`, with a part of the first as split `val`.

    Raises:
        ValueError: a file is missing or damaged, a speaker unknown, or a split empty.
    """
    files = {split: folder / f"shd_{split}.h5" for split in ("train", "test")}
    found = {split: _read_labels(path) for split, path in files.items()}
    train = _items(files["train"], found["train"].labels)
    splits: dict[str, list[Item]] = {"train": train}
    if held_out.share or held_out.speakers:
        is_held = _held(files["train"], found["train"], held_out)
        splits["train"] = []
        splits["val"] = []
        for item, held in zip(train, is_held, strict=True):
            splits["val" if held else "train"].append(item)
    splits["test"] = _items(files["test"], found["test"].labels)
    return Listing(splits, _class_names(files, found))


def list_ssc(folder: Path) -> Listing:
    """`ssc_train.h5`, `ssc_valid.h5` (split `val`) and `ssc_test.h5`. Raises ValueError as `list_shd`."""
    files = {"train": folder / "ssc_train.h5", "val": folder / "ssc_valid.h5", "test": folder / "ssc_test.h5"}
    found = {split: _read_labels(path) for split, path in files.items()}
    splits = {split: _items(path, found[split].labels) for split, path in files.items()}
    return Listing(splits, _class_names(files, found))


def encode_spikes(item: Item, frames: SpikeFrames) -> Mapping[str, bytes]:
    """A sample's frames, counts `[T, channels]` of the smallest unsigned type."""
    (row,) = item.part
    require_size(f"{frames.time_steps} frames of {frames.channels} channels", 8 * frames.time_steps * frames.channels)
    with _naming(item.source):
        file = _opened(item.source)
        times = np.asarray(_dataset(file, "spikes/times")[row])
        units = np.asarray(_dataset(file, "spikes/units")[row])
    try:
        counts = count_spikes(times, units, frames)
    except ValueError as error:
        raise ValueError(f"{item.source}, sample {row}: {error}") from error
    buffer = io.BytesIO()
    np.save(buffer, counts.astype(np.min_scalar_type(int(counts.max(initial=0)))))
    return {FRAME_FILE: buffer.getvalue()}


def count_spikes(times: NDArray[Any], units: NDArray[Any], frames: SpikeFrames) -> NDArray[np.int64]:
    """Counts `[T, channels]`, whose sum is the number of spikes.

    Args:
        times: in seconds, in any order.
        units: from 0 to 699.
    Raises:
        ValueError: other types or lengths, a unit outside, or a time outside 0 <= time < duration.
    """
    if times.ndim != 1 or times.shape != units.shape or times.dtype.kind != "f" or units.dtype.kind not in "iu":
        raise ValueError(
            f"times must be seconds and units whole numbers, one of each for a spike; they are {times.dtype} "
            f"{list(times.shape)} and {units.dtype} {list(units.shape)}"
        )
    # The published float16 has steps of 0.5 to 1 ms there. Scaled or compared in its own type, spikes would be lost.
    seconds = times.astype(np.float64)
    inside = (seconds >= 0) & (seconds < frames.duration)
    if not inside.all():
        wrong = seconds[~inside][0]
        raise ValueError(f"a spike at {wrong:g} s is outside 0 to {frames.duration:g} s; --duration sets another end")
    unit = units.astype(np.int64)
    if unit.size and not 0 <= unit.min() <= unit.max() < UNITS:
        raise ValueError(f"units are {unit.min()} to {unit.max()}, and should be 0 to {UNITS - 1}")
    edges = np.arange(1, frames.time_steps) * (frames.duration / frames.time_steps)
    frame = np.searchsorted(edges, seconds, side="right")
    cell = frame * frames.channels + unit * frames.channels // UNITS
    counts = np.bincount(cell, minlength=frames.time_steps * frames.channels)
    return counts.reshape(frames.time_steps, frames.channels)


def _items(path: Path, labels: NDArray[np.int64]) -> list[Item]:
    return [Item(f"{path.stem}_{row:05d}", int(label), path, (row,)) for row, label in enumerate(labels)]


def _held(path: Path, found: _Labels, held_out: HeldOut) -> NDArray[np.bool_]:
    """Mask of the samples for validation."""
    if not held_out.speakers:
        return _held_share(found.labels, held_out.share)
    if found.speakers is None:
        raise ValueError(f"{path} has no extra/speaker; give --valid-share in place of --valid-speakers")
    known = np.unique(found.speakers).tolist()
    unknown = [speaker for speaker in held_out.speakers if speaker not in known]
    if unknown:
        raise ValueError(f"--valid-speakers {unknown[0]}: the speakers of {path} are {', '.join(map(str, known))}")
    return np.isin(found.speakers, held_out.speakers)


def _held_share(labels: NDArray[np.int64], share: float) -> NDArray[np.bool_]:
    held = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        # Drawn, because a file is in the order of its speakers.
        drawn = keyed_numbers("spiking audio, validation", int(label)).permutation(rows)
        held[drawn[: round(share * len(rows))]] = True
    return held


def _class_names(files: Mapping[str, Path], found: Mapping[str, _Labels]) -> list[str]:
    """Names by label; the labels themselves without names. Raises ValueError for names that differ or are too few."""
    first = next(iter(found))
    names = found[first].names
    for split, each in found.items():
        if each.names != names:
            raise ValueError(f"{files[split]} has other class names (extra/keys) than {files[first]}")
    classes = 1 + max(int(each.labels.max(initial=-1)) for each in found.values())
    if not names:
        return [str(label) for label in range(classes)]
    if len(names) < classes:
        raise ValueError(f"{files[first]} has {len(names)} class names (extra/keys) and a label {classes - 1}")
    return names


def _read_labels(path: Path) -> _Labels:
    """A file's labels, checked against its numbers of samples."""
    if not path.is_file():
        packed = path.with_name(f"{path.name}.gz")
        advice = f"unpack {packed.name} (gunzip)" if packed.exists() else "give the folder that contains it"
        raise ValueError(f"{path} is missing, or no file; {advice}")
    with _naming(path):
        file = _opened(path)
        labels = _whole_numbers(file, "labels")
        for name in ("spikes/times", "spikes/units"):
            samples = len(_dataset(file, name))
            if samples != len(labels):
                raise ValueError(f"{name} has {samples} samples, and labels {len(labels)}")
        if len(labels) and not 0 <= labels.min() <= labels.max() < _LARGEST_LABEL:
            raise ValueError(f"labels are {labels.min()} to {labels.max()}, and should be 0 to {_LARGEST_LABEL - 1}")
        speakers = None
        if _find(file, "extra/speaker") is not None:
            speakers = _whole_numbers(file, "extra/speaker")
            if len(speakers) != len(labels):
                raise ValueError(f"extra/speaker has {len(speakers)} samples, and labels {len(labels)}")
        names = list[str]()
        keys = _find(file, "extra/keys")
        if keys is not None:
            names = _names(keys[:])
        return _Labels(labels, speakers, names)


def _names(keys: Sequence[Any]) -> list[str]:
    names = [key.decode() if isinstance(key, bytes) else str(key) for key in keys]
    for name in names:
        if not name or not name.isprintable():
            raise ValueError(f"the class name {in_message(name)!r} in extra/keys is empty, or has control characters")
    return names


def _whole_numbers(file: Any, name: str) -> NDArray[np.int64]:
    dataset = _dataset(file, name)
    if dataset.ndim != 1 or dataset.dtype.kind not in "iu":
        raise ValueError(f"{name} must be whole numbers [n], not {dataset.dtype} {list(dataset.shape)}")
    require_size(name, 8 * len(dataset))
    return dataset[:].astype(np.int64)


# Consecutive items are samples of one file.
@lru_cache(maxsize=1)
def _opened(path: Path) -> Any:
    try:
        import h5py
    except ModuleNotFoundError as error:
        raise MissingPackageError(f"{path}: HDF5 requires h5py: pip install megasnn[audio]") from error
    require_regular(path)
    return h5py.File(path, "r")


def _dataset(file: Any, name: str) -> Any:
    """Raises ValueError as `_find`, or if it is missing."""
    found = _find(file, name)
    if found is None:
        raise ValueError(f"it has no data set {name}: it is no file of SHD or SSC")
    return found


def _find(file: Any, name: str) -> Any:
    """A data set of one dimension or more; None if it is missing. Raises ValueError for data in another file."""
    import h5py

    path = ""
    for part in name.split("/"):
        path = f"{path}/{part}"
        link = file.get(path, getlink=True)
        if link is None:
            return None
        # A link may name any file of this machine, whose content would then be in the shards.
        if not isinstance(link, h5py.HardLink):
            raise ValueError(f"{path} is a link, which is not followed")
    found = file[path]
    if not isinstance(found, h5py.Dataset) or not found.ndim:
        return None
    if found.external or found.is_virtual:
        raise ValueError(f"{name} lies in another file, which is not read")
    return found


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Names the file in errors."""
    try:
        yield
    except (ImportError, MemoryError):
        raise
    except Exception as error:
        # h5py raises OSError, RuntimeError, KeyError and others for damaged files.
        raise ValueError(f"{path} cannot be read: {error}") from error
