"""Files of torch.save, checked before anything is read from them; each tensor is read when it is asked for.

Torch's own reader unpickles nothing but tensors and plain containers, but believes what the file says of their sizes.
So the names that its pickles call are looked through first: only those that weights need are allowed. A load of fake
tensors then tells where in the file each value should lie; that is compared with the archive's members.
"""

from __future__ import annotations

import argparse
import io
import mmap
import os
import pickletools
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from megasnn.checkpoint.raw import member_begin, read_elements
from megasnn.files.described import DescriptionError, open_regular, printable, require_tensor_name
from megasnn.files.problems import CheckpointError

_CONTAINERS = {
    "argparse.Namespace",
    "collections.Counter",
    "collections.OrderedDict",
    "_codecs.encode",  # bytes, as protocol 2 writes them
    "builtins.complex",
    "builtins.set",
    "__builtin__.complex",
    "__builtin__.set",
}
_IMPORTS = ("STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4")
_OLD_PICKLES = 5  # magic number, version, system, content, names of the storages


class TorchArchive:
    """A file of torch.save that has been opened and checked; its tensors are still in the file.

    Args:
        path: a file that the user named, or one in a folder of the user's.
    Attributes:
        content: what was saved, with tensors that have no memory, for `read`. Files older than torch 1.6 are no zip
            archives and are read at once.
    Raises:
        CheckpointError: it cannot be read, holds more than tensors and plain containers, or was altered.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._sizes: dict[int, int] = {}
        try:
            with open_regular(path) as stream:
                if zipped := zipfile.is_zipfile(stream):
                    self._sizes = _checked_members(stream)
                else:
                    with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
                        for _ in range(_OLD_PICKLES):
                            _require_plain_names(content)
                stream.seek(0)
                with torch.serialization.safe_globals([argparse.Namespace]):
                    if zipped:
                        with FakeTensorMode():
                            self.content: Any = torch.load(stream, weights_only=True)
                    else:
                        self.content = torch.load(stream, map_location="cpu", weights_only=True)
        except Exception as error:  # which one depends on what is in the file
            # Torch says first how to let the file run what it likes.
            reason = str(error).rpartition("WeightsUnpickler error: ")[2].strip() or type(error).__name__
            raise CheckpointError(
                f"cannot read weights from {path}: {printable(reason.splitlines()[0][:300])}"
            ) from None

    def require_sound(self, name: object, value: object) -> Tensor:
        """The value itself, when it is a tensor that can be read. Raises CheckpointError when not."""
        try:
            require_tensor_name(name)
        except DescriptionError as error:
            raise CheckpointError(f"{self.path}: {error}") from None
        if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_quantized:
            raise CheckpointError(f"{self.path}: {name} is no plain tensor")
        start, span = self._place(value)
        needed = max(span, value.numel()) * value.dtype.itemsize
        if start is None and not isinstance(value, FakeTensor) and value.device.type == "cpu":
            return value
        room = self._sizes.get(start, -1) if start is not None else -1
        if value.storage_offset() * value.dtype.itemsize + needed > room:
            raise CheckpointError(
                f"{self.path}: {name} of shape {list(value.shape)[:16]}, strides {list(value.stride())[:16]} and type "
                f"{value.dtype} needs more bytes than the file has for it ({max(room, 0)})"
            )
        return value

    def read(self, name: str, value: Tensor) -> Tensor:
        """The values of a tensor of `content`, contiguous. Raises CheckpointError as `require_sound`."""
        start, span = self._place(self.require_sound(name, value))
        if start is None:
            return value.contiguous()
        shape = tuple(value.shape)
        flat = read_elements(self.path, start + int(value.storage_offset()) * value.dtype.itemsize, span, value.dtype)
        return flat.as_strided(shape, value.stride()).contiguous() if span else flat.view(shape)

    @staticmethod
    def _place(value: Tensor) -> tuple[int | None, int]:
        """Where in the file the storage begins, and how many elements there are from the first to the last."""
        start = getattr(value.untyped_storage(), "_checkpoint_offset", None)
        steps = ((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        return start, 1 + sum(steps) if value.numel() else 0


def _checked_members(stream: Any) -> dict[int, int]:
    """Reads every byte of the archive's members; the size of each by where it begins.

    Raises ValueError for members that torch.save would not write, and zipfile's errors for altered ones.
    """
    size = stream.seek(0, 2)
    with zipfile.ZipFile(stream) as archive:
        entries = archive.filelist
        for entry in entries:
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
                raise ValueError(f"its member {entry.filename[:100]!r} is compressed, which torch.save does not do")
        if (total := sum(entry.file_size for entry in entries)) > size:
            raise ValueError(f"its members claim {total} bytes, the file has {size}")
        if damaged := archive.testzip():
            raise ValueError(f"it was altered: the checksum of {damaged[:100]} differs")
        for entry in entries:
            if entry.filename.lower().endswith("data.pkl"):
                _require_plain_names(io.BytesIO(archive.read(entry)))
    members = {}
    for entry in entries:
        begin = member_begin(stream, entry)
        if begin + entry.file_size > size:
            raise ValueError(f"its member {entry.filename[:100]!r} goes beyond the end of the file")
        members[begin] = entry.file_size
    return members


def _require_plain_names(pickled: io.BytesIO | mmap.mmap) -> None:
    """Goes through one pickle, without running it, to its end.

    Raises ValueError for a name of another module than torch's and of no plain container: torch's reader calls
    `bytearray` of a number, which takes that much memory.
    """
    for instruction, value, _ in pickletools.genops(pickled):  # type: ignore[arg-type]
        if instruction.name in _IMPORTS:
            raise ValueError(f"the instruction {instruction.name} does not belong there")
        if instruction.name == "GLOBAL":
            name = str(value).replace(" ", ".")
            if name not in _CONTAINERS and not name.startswith("torch."):
                raise ValueError(f"{name} does not belong there")


_WRAPPERS = ("state_dict", "model_state_dict", "model")
_DATA_PARALLEL = "module."
_MOST_SHARED = 16  # names of one tensor: tied weights, or a layer that a model goes through so often


def read_state_dict(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Reads a state_dict from a file written by torch.save; see `state_dict_of`.

    Raises:
        CheckpointError: no such file, it cannot be read, or it holds something else.
    """
    if not Path(path).is_file():
        raise CheckpointError(f"there is no file {path} to read weights from; check --load-spikingjelly")
    archive = TorchArchive(Path(path))
    return {name: archive.read(name, value) for name, value in state_dict_of(archive).items()}


def state_dict_of(archive: TorchArchive) -> dict[str, Tensor]:
    """The state_dict in a file, every tensor of it sound.

    It may lie under "state_dict", "model_state_dict" or "model", and its names may all begin with "module.".

    Raises:
        CheckpointError: there is none, or a tensor is not sound.
    """
    content, path = archive.content, archive.path
    for wrapper in _WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(f"{path} holds no state_dict: expected names with tensors, found {_kind(content)}")
    found = {str(name): archive.require_sound(name, value) for name, value in content.items()}
    size, room = sum(value.nbytes for value in found.values()), path.stat().st_size
    if size > _MOST_SHARED * room:
        raise CheckpointError(
            f"{path}: its {len(found)} tensors take {size} bytes, and the file has {room}: more than {_MOST_SHARED} of "
            f"them share the same values"
        )
    if found and all(name.startswith(_DATA_PARALLEL) for name in found):
        return {name.removeprefix(_DATA_PARALLEL): value for name, value in found.items()}
    return found


def _kind(content: Any) -> str:
    if not isinstance(content, Mapping):
        return type(content).__name__
    others = sorted(str(name)[:80] for name, value in content.items() if not isinstance(value, Tensor))
    return f"other values under {', '.join(others[:5])}"
