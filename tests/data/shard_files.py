"""Small shards for tests: grey 8 × 8 images whose pixels all equal the sample's number."""

from __future__ import annotations

import gzip
import io
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image
from webdataset import TarWriter

from megasnn import data
from megasnn.data.dataset import ShardDataset
from megasnn.data.images import ImageFormat
from megasnn.data.loader import BatchLoader, LoaderOptions, Share
from megasnn.data.shards import open_shard
from megasnn.preprocess.sample import shards_of_sample

CLASSES = 3
open_datasets = partial(data.open_datasets, sample_shards=shards_of_sample)  # as training does


def image_file(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def sample_files(number: int) -> dict[str, bytes]:
    return {
        "png": image_file(np.full((8, 8), number, dtype=np.uint8)),
        "cls": str(number % CLASSES).encode(),
    }


def write_shard(path: Path, samples: dict[str, dict[str, bytes]]) -> Path:
    """A `.tar`, or a `.tar.gz` by its name, of `{key: {suffix: bytes}}`."""
    buffer = io.BytesIO()
    with TarWriter(buffer, encoder=False, mtime=0, compress=False) as writer:
        for key, files in samples.items():
            writer.write({"__key__": key, **files})
    data = buffer.getvalue()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def numbered(numbers: range) -> dict[str, dict[str, bytes]]:
    return {f"s{number:03d}": sample_files(number) for number in numbers}


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


def open_all(paths: list[Path], channels: int = 1, size: int = 8) -> ShardDataset:
    return ShardDataset([open_shard(path) for path in paths], ImageFormat(size, channels), CLASSES)


def loader(dataset: ShardDataset, training: bool = True, **changes) -> BatchLoader:
    """Batches of 10 samples in micro-batches of 3, with changes to `Share` and `LoaderOptions`."""
    share = {"global_batch_size": 10, "micro_batch_size": 3}
    options = {"seed": 7}
    for name, value in changes.items():
        (share if name in Share.__dataclass_fields__ else options)[name] = value
    return BatchLoader(dataset, Share(**share), LoaderOptions(**options), training)
