"""Files of a sample in a shard, made of an item of a data set: a row of CIFAR, an image, a recording."""

from __future__ import annotations

import io
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from PIL import Image

from megasnn.data.formats import EVENTS, FRAMES, encode_events, encode_frames
from megasnn.data.images import open_image
from megasnn.events import FrameOptions, Recording, make_frames, read_recording
from megasnn.files import read_file
from megasnn.preprocess.sources import Item, cifar_rows


def encode_image(image: Image.Image, kind: str, **options: int) -> bytes:
    """File of an image, in a format of Pillow's."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def encode_cifar(item: Item) -> Mapping[str, bytes]:
    """Writes a row of a file of CIFAR as PNG."""
    row, labels = item.part
    pixels = cifar_rows(item.source, labels)[row, labels:].reshape(3, 32, 32).transpose(1, 2, 0)
    return {"png": encode_image(Image.fromarray(pixels), "PNG", compress_level=1)}


def copy_image(item: Item) -> Mapping[str, bytes]:
    """Takes an image file over as it is; it is decoded, so that a damaged one is found now."""
    try:
        data = read_file(item.source)
        open_image(data).load()
    except (ValueError, OSError, SyntaxError) as error:  # what damaged bytes make Pillow raise
        raise ValueError(f"{item.source} cannot be decoded: {error}") from error
    return {item.source.suffix.lower().removeprefix("."): data}


def encode_recording(
    item: Item, frames: FrameOptions | None, sensor: tuple[int, int] | None, sort: bool
) -> Mapping[str, bytes]:
    """Reads an item's recording, cuts out its clip, if it is one, and makes the files of a sample.

    Without options of `frames` the events are kept.
    """
    recording = _read(item.source, sensor, sort)
    if item.part:
        recording = Recording(recording.events.between(*item.part), recording.sensor)
        if not len(recording.events):
            raise ValueError(f"{item.source}: no event in the clip from {item.part[0]} to {item.part[1]} us")
    if frames is None:
        return {EVENTS: encode_events(recording)}
    try:
        return {FRAMES: encode_frames(make_frames(recording, frames))}
    except ValueError as error:
        raise ValueError(f"{item.source}: {error}") from error


@lru_cache(maxsize=1)  # the clips of a recording come one after another
def _read(path: Path, sensor: tuple[int, int] | None, sort: bool) -> Recording:
    return read_recording(path, sensor_size=sensor, sort=sort)
