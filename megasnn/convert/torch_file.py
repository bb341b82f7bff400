"""Files of torch.save, read and written tensor by tensor.

Torch saves them as a whole. Its `skip_data` writes a file without the tensors' values, and a load of fake tensors tells
where in the file each value lies; so values come one at a time.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megasnn.checkpoint.raw import bytes_of, member_begin, write_elements
from megasnn.checkpoint.torch_archive import TorchArchive, state_dict_of
from megasnn.convert.new_file import new_file
from megasnn.convert.source import Facts, StoredBox, TensorInfo, TensorSource


class TorchFileSource(TensorSource):
    """A state_dict in a file of torch.save.

    Raises:
        CheckpointError: the file cannot be read or was altered, or holds no state_dict.
    """

    kind = "torch state_dict"

    def __init__(self, path: Path) -> None:
        self.path, self.facts, self.files = path, Facts(), {path.name: path.stat().st_size}
        self._archive = TorchArchive(path)
        self._found = state_dict_of(self._archive)
        self.tensors = {name: info_of(value, path.name) for name, value in self._found.items()}

    def read(self, name: str) -> Tensor:
        return self._archive.read(name, self._found[name])


def info_of(value: Tensor, file: str) -> TensorInfo:
    shape = tuple(value.shape)
    return TensorInfo(shape, value.dtype, (StoredBox(file, (0,) * len(shape), shape),))


@contextmanager
def new_torch_file(path: Path, tensors: Mapping[str, TensorInfo]) -> Iterator[Callable[[str, Tensor], None]]:
    """A new file as torch.save would write a dictionary of these tensors; the function that it gives puts each into it.

    Raises:
        CheckpointError: there is such a file already.
    """
    with new_file(path) as aside:
        with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save({name: torch.empty(info.shape, dtype=info.dtype) for name, info in tensors.items()}, aside)
        with FakeTensorMode():
            places = torch.load(aside, weights_only=True)
        checksums: dict[int, int] = {}  # of the values that begin at each byte of the file
        with aside.open("r+b", buffering=0) as stream:

            def put(name: str, value: Tensor) -> None:
                fake = places[name]
                assert fake.shape == value.shape and fake.dtype == value.dtype, (name, fake, value.shape)
                offset = fake.untyped_storage()._checkpoint_offset
                write_elements(stream, offset, value)
                checksums[offset] = zlib.crc32(bytes_of(value))

            yield put
            _write_checksums(aside, stream, checksums)


def _write_checksums(path: Path, stream: BinaryIO, checksums: Mapping[int, int]) -> None:
    """Into the archive's records, which know only the file without values (APPNOTE.TXT, 4.3.7, 4.3.9 and 4.3.12)."""
    with zipfile.ZipFile(path) as archive:
        entries, record = archive.filelist, archive.start_dir
    for entry in entries:
        begin = member_begin(stream, entry)
        if begin in checksums:
            follows = entry.flag_bits & 8  # the checksum comes behind the values, after a signature
            for at in (record + 16, begin + entry.file_size + 4 if follows else entry.header_offset + 14):
                stream.seek(at)
                stream.write(struct.pack("<I", checksums[begin]))
        record += 46 + sum(_read(stream, record + 28, "<3H"))


def _read(stream: BinaryIO, at: int, format: str) -> tuple[int, ...]:
    stream.seek(at)
    return struct.unpack(format, stream.read(struct.calcsize(format)))
