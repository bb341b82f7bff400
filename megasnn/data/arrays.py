"""Samples with several files, for models with named inputs: images, `.npy` arrays, and `.png` class maps.

A sample's files are adjacent in the shard and read together.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from megasnn.augment import SampleKey
from megasnn.common.files import read_array
from megasnn.data.formats import FormatMismatch, SampleFormat, require_finite
from megasnn.data.images import IMAGE_SUFFIXES, ImageFormat, open_image, orientation, upright_size
from megasnn.data.shards import split_name

Arrays = Mapping[str, NDArray[Any]]
_COUNTS = (np.uint8, np.uint16)


class ArrayFile(NamedTuple):
    """A named array in every sample; shape, dtype, below and void as in `megasnn.ArraySpec`.

    Attributes:
        ending: of the file; "" for the sample's image.
    """

    name: str
    ending: str
    shape: tuple[int, ...]
    dtype: str
    below: int | None = None
    void: int | None = None


@dataclass(frozen=True)
class ArrayFormat(SampleFormat):
    """Samples with named arrays, without random changes.

    Attributes:
        image: format of the image, if any.
    """

    arrays: tuple[ArrayFile, ...]
    inputs: tuple[str, ...]
    target: str = ""
    image: ImageFormat | None = None
    kind = "arrays"
    reads_all = True

    def decoded(self, data: bytes, key: SampleKey | None) -> Any:
        """Arrays by name from a sample's part of a tar."""
        # Without it, tarfile reports a cut file.
        end_mark = bytes(2 * tarfile.BLOCKSIZE)
        files: dict[str, bytes] = {}
        with tarfile.open(fileobj=io.BytesIO(data + end_mark), mode="r:") as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isreg() else None
                if content is not None:
                    _, ending = split_name(member.name)
                    files[ending] = content.read()
        return {each.name: self._array(each, files) for each in self.arrays}

    def _array(self, array: ArrayFile, files: Mapping[str, bytes]) -> NDArray[Any]:
        if not array.ending:
            assert self.image is not None
            return self.image.decode(_image_of(files, array.name))
        if array.ending not in files:
            raise FormatMismatch(f"has no .{array.ending} for {array.name!r}, only {', '.join(files)}")
        if array.ending.endswith("png"):
            values = self._classes(array, files)
        else:
            values = read_array(files[array.ending])
        return fitted(values, array, f" in .{array.ending}")

    def _classes(self, array: ArrayFile, files: Mapping[str, bytes]) -> NDArray[Any]:
        """Pixel classes, turned, cropped and scaled like the image, by nearest neighbour."""
        file = open_image(files[array.ending])
        if file.mode not in ("L", "P", "1"):
            raise FormatMismatch(f"has colours (mode {file.mode}) in .{array.ending}, which should hold pixel classes")
        turn = orientation(file)
        if turn is not None:
            file = file.transpose(turn)
        center = 1.0
        if self.image is not None:
            center = self.image.center
            image = open_image(_image_of(files, array.name))
            size = upright_size(image, orientation(image))
            if file.size != size:
                raise ValueError(
                    f".{array.ending} has {file.width} x {file.height} pixels, and its image {size[0]} x {size[1]}"
                )
        # The crop of `ImageFormat`, so that classes stay on their pixels.
        side = center * min(file.size)
        left = (file.width - side) / 2
        top = (file.height - side) / 2
        height, width = array.shape
        box = (left, top, left + side, top + side)
        return np.asarray(file.resize((width, height), Image.Resampling.NEAREST, box=box))

    def batch(self, samples: Sequence[Any]) -> Any:
        """Joins samples into named arrays."""
        joined: dict[str, NDArray[Any]] = {}
        for each in self.arrays:
            parts = [sample[each.name] for sample in samples]
            if each.ending or self.image is None:
                joined[each.name] = np.stack(parts)
            else:
                joined[each.name] = self.image.batch(parts)
        return joined


def fitted(values: NDArray[Any], array: ArrayFile, where: str) -> NDArray[Any]:
    """Values as float32 or int64.

    Args:
        where: the file, for messages.
    Raises:
        FormatMismatch: another shape or type than the model's. That means another model, not a broken sample.
        ValueError: not finite, or beyond int64.
    """
    is_whole = array.dtype == "int"
    # float32 holds every count of one or two bytes exactly.
    fits = values.dtype.kind in "biu" if is_whole else values.dtype.kind == "f" or values.dtype in _COUNTS
    if values.shape != array.shape or not fits:
        raise FormatMismatch(
            f"has {values.dtype} {list(values.shape)}{where}, and {array.name!r} is {array.dtype} {list(array.shape)}"
        )
    _require_below(array, values, where)
    if not is_whole:
        return require_finite(values, f"{array.name!r}{where and f',{where},'}").astype(np.float32, copy=False)
    if values.dtype == np.uint64 and values.max(initial=0) > np.iinfo(np.int64).max:
        raise ValueError(f"{array.name!r} holds {values.max()}{where}, above int64's 2^63 - 1")
    return values.astype(np.int64)


def _require_below(array: ArrayFile, values: NDArray[Any], where: str) -> None:
    if array.below is None:
        return
    classes = values if array.void is None else values[values != array.void]
    if classes.size and not 0 <= classes.min() <= classes.max() < array.below:
        or_void = "" if array.void is None else f" or {array.void}"
        raise FormatMismatch(
            f"has {classes.min()} to {classes.max()}{where}, and {array.name!r} is below {array.below}{or_void}"
            " (`below`, and `void` for pixels of no class)"
        )


def _image_of(files: Mapping[str, bytes], name: str) -> bytes:
    images = [content for ending, content in files.items() if ending in IMAGE_SUFFIXES]
    if len(images) != 1:
        raise FormatMismatch(f"has {len(images)} images, and the model takes one for {name!r}")
    return images[0]
