"""Files of other programs, read and written tensor by tensor, hold what those programs say they hold."""

from __future__ import annotations

import argparse
import zipfile
from pathlib import Path

import pytest
import safetensors.torch
import torch

from megasnn.checkpoint import CheckpointError
from megasnn.convert.opening import open_source
from megasnn.convert.safetensors_file import new_safetensors_file
from megasnn.convert.source import TensorInfo, TensorSource
from megasnn.convert.torch_file import new_torch_file

VALUES = {
    "weight": torch.arange(24.0).reshape(2, 3, 4),
    "half": torch.randn(5, 3).bfloat16(),
    "count": torch.tensor(7),
    "double": torch.randn(3, dtype=torch.float64),
    "flags": torch.tensor([True, False, True]),
    "nothing": torch.zeros(0, 4),
}


def assert_holds(source: TensorSource, values: dict[str, torch.Tensor]) -> None:
    assert source.tensors.keys() == values.keys()
    for name, value in values.items():
        info, read = source.tensors[name], source.read(name)
        assert (info.shape, info.dtype, info.bytes) == (tuple(value.shape), value.dtype, value.nbytes)
        assert read.is_contiguous() and torch.equal(read, value), name


def write(path: Path, values: dict[str, torch.Tensor]) -> None:
    if path.suffix == ".safetensors":
        with new_safetensors_file(path, described(values), {"format": "pt"}) as put:
            for name in reversed(values):
                put(name, values[name])
    else:
        with new_torch_file(path, described(values)) as put:
            for name in reversed(values):
                put(name, values[name])


def described(values: dict[str, torch.Tensor]) -> dict[str, TensorInfo]:
    return {name: TensorInfo(tuple(value.shape), value.dtype) for name, value in values.items()}


def test_torch_reads_what_we_write_and_the_other_way_round(tmp_path):
    write(tmp_path / "ours.pt", VALUES)
    loaded = torch.load(tmp_path / "ours.pt", weights_only=True)
    assert list(loaded) == list(VALUES)
    assert all(torch.equal(loaded[name], value) for name, value in VALUES.items())
    torch.save(VALUES, tmp_path / "theirs.pt")
    for name in ("ours", "theirs"):
        assert_holds(open_source(tmp_path / f"{name}.pt"), VALUES)


def test_safetensors_reads_what_we_write_and_the_other_way_round(tmp_path):
    write(tmp_path / "ours.safetensors", VALUES)
    loaded = safetensors.torch.load_file(tmp_path / "ours.safetensors")
    assert loaded.keys() == VALUES.keys()
    assert all(torch.equal(loaded[name], value) for name, value in VALUES.items())
    safetensors.torch.save_file(VALUES, tmp_path / "theirs.safetensors")
    for name in ("ours", "theirs"):
        assert_holds(open_source(tmp_path / f"{name}.safetensors"), VALUES)


def test_views_old_files_and_wrappers(tmp_path):
    base = torch.randn(6, 4)
    views = {"turned": base.t(), "part": base[1:3, 1:], "whole": base}
    torch.save(views, tmp_path / "views.pt")
    assert_holds(open_source(tmp_path / "views.pt"), views)
    torch.save(VALUES, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert_holds(open_source(tmp_path / "old.pt"), VALUES)
    wrapped = {"state_dict": {f"module.{name}": value for name, value in VALUES.items()}, "epoch": 3}
    torch.save(wrapped | {"args": argparse.Namespace(lr=0.1)}, tmp_path / "timm.pt")
    assert_holds(open_source(tmp_path / "timm.pt"), VALUES)


@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors"])
def test_cut_files_and_other_files_are_refused(tmp_path, name):
    path = tmp_path / name
    write(path, VALUES)
    content = path.read_bytes()
    for length in (0, 5, 200, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=name):
            source = open_source(path)
            for tensor in source.tensors:
                source.read(tensor)
    path.write_bytes(b"\x20" + bytes(7) + b"not what it should be, at all   ")
    with pytest.raises(CheckpointError, match=name):
        open_source(path)


def test_the_archives_checksums_are_those_of_the_values(tmp_path):
    """Other programs, like unzip -t, find the file in order; and an altered value is found here."""
    write(tmp_path / "ours.pt", VALUES)
    torch.save(VALUES, tmp_path / "theirs.pt")
    whole = (tmp_path / "ours.pt").read_bytes()
    ours, theirs = (zipfile.ZipFile(tmp_path / f"{name}.pt") for name in ("ours", "theirs"))
    data = [name.partition("/")[2] for name in theirs.namelist() if "/data/" in name]
    assert len(data) == len(VALUES)
    assert all(ours.getinfo(f"ours.pt/{name}").CRC == theirs.getinfo(f"theirs/{name}").CRC for name in data)
    assert ours.testzip() is None
    begin = whole.index(VALUES["weight"].numpy().tobytes())
    for bit in range(8):
        (tmp_path / "ours.pt").write_bytes(
            whole[: begin + 9] + bytes([whole[begin + 9] ^ 1 << bit]) + whole[begin + 10 :]
        )
        with pytest.raises(CheckpointError, match=r"ours.pt: it was altered: the checksum of ours.pt/data/0 differs"):
            open_source(tmp_path / "ours.pt")


def test_an_error_leaves_no_file(tmp_path):
    with pytest.raises(RuntimeError), new_torch_file(tmp_path / "a.pt", described(VALUES)):
        raise RuntimeError
    assert not list(tmp_path.iterdir())
    write(tmp_path / "a.pt", VALUES)
    with pytest.raises(CheckpointError, match="exists already"):
        write(tmp_path / "a.pt", VALUES)
