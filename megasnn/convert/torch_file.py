"""Files of torch.save, read and written tensor by tensor.

Torch saves and loads them as a whole. Its `skip_data` writes a file without the tensors' values, and a load of fake
tensors tells where in the file each value lies; between the two, values come and go one at a time.
"""

from __future__ import annotations

import argparse
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megasnn.checkpoint.errors import CheckpointError
from megasnn.checkpoint.interchange.state_dict import find_state_dict, load_file
from megasnn.convert.new_file import new_file
from megasnn.convert.raw import bytes_of, read_elements, write_elements
from megasnn.convert.source import Facts, StoredBox, TensorInfo, TensorSource


class TorchFileSource(TensorSource):
    """A state_dict in a file of torch.save. Files older than torch 1.6 are not zip archives and are read at once.

    Raises:
        CheckpointError: the file cannot be read or was altered, or holds no state_dict.
    """

    kind = "torch state_dict"

    def __init__(self, path: Path) -> None:
        self.path, self.facts, self.files = path, Facts(), {path.name: path.stat().st_size}
        if zipped := zipfile.is_zipfile(path):
            require_checksums(path)
        self._found = find_state_dict(load_lazily(path) if zipped else load_file(path), path)
        self.tensors = {name: info_of(value, path.name) for name, value in self._found.items()}

    def read(self, name: str) -> Tensor:
        return read_lazy(self.path, self._found[name])


def require_checksums(path: Path) -> None:
    """Reads every byte of a zip archive. Raises CheckpointError when one is not what was written."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, OSError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None
    if damaged is not None:
        raise CheckpointError(f"{path} was altered: the checksum of {damaged} differs")


def load_lazily(path: Path) -> Any:
    """What a file holds, with tensors that know their place in it but have no memory, for `read_lazy`.

    Raises CheckpointError when it cannot be read.
    """
    try:
        with FakeTensorMode(), torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None


def info_of(value: Tensor, file: str) -> TensorInfo:
    shape = tuple(value.shape)
    return TensorInfo(shape, value.dtype, (StoredBox(file, (0,) * len(shape), shape),))


def read_lazy(path: Path, value: Tensor) -> Tensor:
    """The values of a tensor of `load_lazily`; one that has memory already is returned as it is."""
    start = getattr(value.untyped_storage(), "_checkpoint_offset", None)
    if start is None:
        return value.contiguous()
    shape, strides = tuple(value.shape), value.stride()
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if value.numel() else 0
    flat = read_elements(path, start + value.storage_offset() * value.dtype.itemsize, span, value.dtype)
    return flat.as_strided(shape, strides).contiguous() if span else flat.view(shape)


class TorchFileFiller:
    """Puts the values into a file that `torch.save` wrote without them. A place is the keys that lead to a tensor.

    Attributes:
        checksums: CRC-32 of the values that begin at each byte of the file.
    """

    def __init__(self, stream: BinaryIO, places: Mapping[tuple[str, ...], Tensor]) -> None:
        self._stream, self._places = stream, places
        self.checksums: dict[int, int] = {}

    def put(self, place: tuple[str, ...], value: Tensor) -> None:
        fake = self._places[place]
        assert fake.shape == value.shape and fake.dtype == value.dtype, (place, fake, value.shape)
        offset = fake.untyped_storage()._checkpoint_offset
        assert offset is not None
        write_elements(self._stream, offset, value)
        self.checksums[offset] = zlib.crc32(bytes_of(value))


@contextmanager
def new_torch_file(path: Path, content: Mapping[str, Any]) -> Iterator[TorchFileFiller]:
    """A file as torch.save would write `content`: nested dictionaries with TensorInfo where a tensor will be put."""
    with new_file(path) as aside:
        with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(_fakes(content), aside)
        places = dict(_places(load_lazily(aside)))
        with aside.open("r+b", buffering=0) as stream:
            filler = TorchFileFiller(stream, places)
            yield filler
            _write_checksums(aside, stream, filler.checksums)


def _write_checksums(path: Path, stream: BinaryIO, checksums: Mapping[int, int]) -> None:
    """Into the archive's records, which know only the file without values (APPNOTE.TXT, 4.3.7, 4.3.9 and 4.3.12)."""
    with zipfile.ZipFile(path) as archive:
        entries, record = archive.filelist, archive.start_dir
    for entry in entries:
        begin = entry.header_offset + 30 + sum(_read(stream, entry.header_offset + 26, "<2H"))
        if begin in checksums:
            follows = entry.flag_bits & 8  # the checksum comes behind the values, after a signature
            for at in (record + 16, begin + entry.file_size + 4 if follows else entry.header_offset + 14):
                stream.seek(at)
                stream.write(struct.pack("<I", checksums[begin]))
        record += 46 + sum(_read(stream, record + 28, "<3H"))


def _read(stream: BinaryIO, at: int, format: str) -> tuple[int, ...]:
    stream.seek(at)
    return struct.unpack(format, stream.read(struct.calcsize(format)))


def _fakes(content: Any) -> Any:
    if isinstance(content, TensorInfo):
        return torch.empty(content.shape, dtype=content.dtype)
    return {key: _fakes(value) for key, value in content.items()} if isinstance(content, Mapping) else content


def _places(content: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    if isinstance(content, Tensor):
        yield keys, content
    elif isinstance(content, Mapping):
        for key, value in content.items():
            yield from _places(value, (*keys, key))
