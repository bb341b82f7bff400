"""Samples of a model with its own inputs or target: several files of a shard each, `.npy` arrays or `.png` of classes.

They lie side by side in the shard, and are read together: ``<key>.jpg`` and ``<key>.seg.png``, or ``<key>.npy`` alone.
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


class ArrayFile(NamedTuple):
    """Array of every sample, in a file of its own.

    Attributes:
        ending: of the file; "" for the image of the sample.
        shape, dtype, below, void: of one sample, as of `megasnn.ArraySpec`.
    """

    name: str
    ending: str
    shape: tuple[int, ...]
    dtype: str
    below: int | None = None
    void: int | None = None


@dataclass(frozen=True)
class ArrayFormat(SampleFormat):
    """Samples of several arrays by name. Nothing is changed at random: what belongs together would not be alike.

    Attributes:
        target: the array that is learned; "" where it is the class of the sample. inputs: those that layers take.
        image: format of the image, where one is among them.
    """

    arrays: tuple[ArrayFile, ...]
    inputs: tuple[str, ...]
    target: str = ""
    image: ImageFormat | None = None
    kind = "arrays"
    reads_all = True

    def decoded(self, data: bytes, key: SampleKey | None) -> Any:
        """Decodes the part of a shard with all files of a sample."""
        with tarfile.open(fileobj=io.BytesIO(data + bytes(2 * tarfile.BLOCKSIZE)), mode="r:") as archive:
            files = {
                split_name(member.name)[1]: content.read()
                for member in archive
                if member.isreg() and (content := archive.extractfile(member))
            }
        return {each.name: self._array(each, files) for each in self.arrays}

    def _array(self, array: ArrayFile, files: Mapping[str, bytes]) -> NDArray[Any]:
        if not array.ending:
            assert self.image is not None
            return self.image.decode(_image_of(files, array.name))
        if array.ending not in files:
            raise FormatMismatch(f"has no .{array.ending} for {array.name!r}, but {', '.join(files)}")
        content = files[array.ending]
        is_classes = array.ending.endswith("png")
        found = self._classes(content, array, files) if is_classes else read_array(content)
        is_whole = array.dtype == "int"
        if found.shape != array.shape or found.dtype.kind not in ("biu" if is_whole else "f"):
            raise FormatMismatch(
                f"has {found.dtype} {list(found.shape)} in .{array.ending}, and {array.name!r} is {array.dtype} "
                f"{list(array.shape)}"
            )
        classes = found if array.void is None else found[found != array.void]
        if array.below is not None and classes.size and not 0 <= classes.min() <= classes.max() < array.below:
            raise FormatMismatch(
                f"has {classes.min()} to {classes.max()} in .{array.ending}, and {array.name!r} is below {array.below}"
                f"{'' if array.void is None else f' or {array.void}'} (`below`, and `void` for pixels of no class)"
            )
        if not is_whole:
            return require_finite(found, f"{array.name!r}, in .{array.ending},").astype(np.float32)
        if found.dtype == np.uint64 and found.max(initial=0) > np.iinfo(np.int64).max:
            raise ValueError(f"{array.name!r} holds {found.max()} in .{array.ending}, and int64 ends at 2^63 - 1")
        return found.astype(np.int64)

    def _classes(self, content: bytes, array: ArrayFile, files: Mapping[str, bytes]) -> NDArray[Any]:
        """Classes of pixels, turned, cut and scaled as the image is, to the nearest pixel. Raises ValueError for
        another size than the image's."""
        file = open_image(content)
        if file.mode not in ("L", "P", "1"):
            raise FormatMismatch(
                f"has colours (mode {file.mode}) in .{array.ending}, which should hold a class a pixel"
            )
        if (turn := orientation(file)) is not None:
            file = file.transpose(turn)
        if self.image is not None:
            image = open_image(_image_of(files, array.name))
            size = upright_size(image, orientation(image))
            if file.size != size:
                raise ValueError(
                    f".{array.ending} has {file.width} x {file.height} pixels, and its image {size[0]} x {size[1]}"
                )
        side = (1.0 if self.image is None else self.image.center) * min(file.size)
        left, top = (file.width - side) / 2, (file.height - side) / 2
        box = left, top, left + side, top + side
        height, width = array.shape
        return np.asarray(file.resize((width, height), Image.Resampling.NEAREST, box=box))

    def batch(self, samples: Sequence[Any]) -> Any:
        """Joins samples to arrays by name."""
        joined: dict[str, NDArray[Any]] = {}
        for each in self.arrays:
            parts = [sample[each.name] for sample in samples]
            joined[each.name] = np.stack(parts) if each.ending or self.image is None else self.image.batch(parts)
        return joined


def _image_of(files: Mapping[str, bytes], name: str) -> bytes:
    """The only image of a sample, for the array `name`."""
    images = [content for ending, content in files.items() if ending in IMAGE_SUFFIXES]
    if len(images) != 1:
        raise FormatMismatch(f"has {len(images)} images, and the model takes one for {name!r}")
    return images[0]
