"""Small shards for tests: grey 8 × 8 images whose pixels all equal the sample's number, and recordings."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image
from webdataset import TarWriter

from megasnn import data
from megasnn.augment import AUGMENTATIONS
from megasnn.config import DataConfig
from megasnn.data.datasets import ShardDataset
from megasnn.data.events import Events, FrameOptions, Recording, SensorSize, make_frames
from megasnn.data.formats import encode_events, encode_frames
from megasnn.data.images import ImageFormat
from megasnn.data.loader import BatchLoader, BatchShare
from megasnn.data.preprocess.sample import shards_of_sample
from megasnn.data.shards import open_shard

CLASSES = 3
Samples = dict[str, dict[str, bytes]]
open_datasets = partial(data.open_datasets, sample_shards=shards_of_sample)  # as training does


def image_file(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def write_shard(path: Path, samples: Samples) -> Path:
    """A tar of `{key: {suffix: bytes}}`."""
    with TarWriter(str(path), encoder=False, mtime=0, compress=False) as writer:
        for key, files in samples.items():
            writer.write({"__key__": key, **files})
    return path


def after(path: Path, action: Callable[[], object]) -> None:
    """Acts when the file system's clock has gone on since `path` was changed: it ticks every few milliseconds."""
    clock = path.with_name("clock")
    while True:
        clock.touch()
        if clock.stat().st_ctime_ns > path.stat().st_ctime_ns:
            break
        time.sleep(0.001)
    action()


def numbered(numbers: range) -> Samples:
    return {
        f"s{n:03d}": {"png": image_file(np.full((8, 8), n, np.uint8)), "cls": str(n % CLASSES).encode()}
        for n in numbers
    }


def write_shards(folder: Path, samples: int, per_shard: int, broken: tuple[int, ...] = ()) -> list[Path]:
    """Shards of samples 0, 1, ...; the images of those in `broken` are no images."""
    paths = []
    for index, start in enumerate(range(0, samples, per_shard)):
        contents = numbered(range(start, min(start + per_shard, samples)))
        for number in broken:
            if f"s{number:03d}" in contents:
                contents[f"s{number:03d}"]["png"] = b"not an image"
        paths.append(write_shard(folder / f"train-{index:05d}.tar", contents))
    return paths


def recording(seed: int, events: int = 500, sensor: tuple[int, int] = (12, 16), duration: int = 10_000) -> Recording:
    random = np.random.default_rng(seed)
    t = np.sort(random.integers(0, duration, events)) + 77
    places = [random.integers(0, side, events) for side in (sensor[1], sensor[0], 2)]
    return Recording(Events.make(t, *places), SensorSize(*sensor))


def as_events(numbers: range, **changes) -> Samples:
    return {
        f"r{number}": {"events.npz": encode_events(recording(number, **changes)), "cls": str(number % 3).encode()}
        for number in numbers
    }


def as_frames(numbers: range, settings: FrameOptions, **changes) -> Samples:
    found = as_events(numbers, **changes)
    for number, files in zip(numbers, found.values(), strict=True):
        del files["events.npz"]
        files["frames.npz"] = encode_frames(make_frames(recording(number, **changes), settings))
    return found


def open_all(paths: list[Path], channels: int = 1, size: int = 8, augment: str = "none") -> ShardDataset:
    format = ImageFormat(size, channels, augment=AUGMENTATIONS[augment])
    return ShardDataset([open_shard(path) for path in paths], format, CLASSES)


def loader(dataset: ShardDataset, training: bool = True, seed: int = 7, timeout: float = 60, **changes) -> BatchLoader:
    """Batches of 10 samples in micro-batches of 3, with changes to `BatchShare` and `DataConfig`."""
    share, config = {"global_batch_size": 10, "micro_batch_size": 3}, {"num_workers": 0}
    for name, value in changes.items():
        (share if name in BatchShare.__dataclass_fields__ else config)[name] = value
    return BatchLoader(dataset, BatchShare(**share), DataConfig(**config), seed, training, timeout=timeout)
