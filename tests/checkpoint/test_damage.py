"""Whatever happens to any file of a checkpoint, it is found and named; the newest intact checkpoint takes its place."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megasnn.checkpoint.folder import checkpoints_to_try
from megasnn.checkpoint.format import Progress, read_metadata
from megasnn.checkpoint.load import load_checkpoint, load_global_tensors
from megasnn.checkpoint.save import save_checkpoint, save_global_tensors
from megasnn.checkpoint.tensor_io import damaged_files, file_checksum
from megasnn.common.files import DamagedError
from megasnn.common.grid import Grid
from tests.checkpoint.fake_model import CONFIG, Rank, known


def cut(file: Path, seed: int) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip_a_bit(file: Path, seed: int) -> None:
    content = bytearray(file.read_bytes())
    bit = random.Random(f"{file.name} {seed}").randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def remove(file: Path, seed: int) -> None:
    file.unlink()


DAMAGES = [cut, flip_a_bit, remove]
FILES = ["rank_00000.safetensors", "rank_00001.safetensors", "metadata.json"]


def scale(iteration: int) -> int:
    """Powers of two: exact in every type."""
    return 2 ** (iteration // 100)


def save_three(folder: Path) -> None:
    rank = Rank(Grid(tp=2))
    for iteration in (100, 200, 300):
        rank.fill()
        for entry in rank.everything():
            if entry.tensor.is_floating_point():
                entry.tensor.detach().mul_(scale(iteration))
        save_checkpoint(folder, Progress(iteration, config=CONFIG), rank.state, rank.group)


@pytest.fixture(scope="module")
def three(ranks, tmp_path_factory) -> Path:
    """Iterations 100, 200, 300 of two tensor-parallel ranks; every value is the known one times `scale`."""
    folder = tmp_path_factory.mktemp("three")
    ranks(2, save_three, folder)
    return folder


@pytest.fixture
def folder(three, tmp_path) -> Path:
    return shutil.copytree(three, tmp_path / "run")


def everything(folder: Path, step: int | None = None) -> tuple[float, str]:
    """The iteration that all values are of, and the warnings."""
    iterations = set()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tensors = load_global_tensors(folder, step, with_optimizer=True)
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            ratio = (tensor.double() / known(name, tuple(tensor.shape))).nanmedian()
            assert torch.equal(tensor.double(), known(name, tuple(tensor.shape)) * ratio), name
            iterations.add(100 * math.log2(ratio))
    (iteration,) = iterations
    return iteration, "\n".join(str(warning.message) for warning in caught)


def test_without_damage_nothing_is_said(folder):
    loaded, said = everything(folder)
    assert loaded == 300 and "iter_" not in said
    (path, *_), metadata = checkpoints_to_try(folder, None), read_metadata(folder / "iter_0000300")
    assert damaged_files(path, metadata) == []
    for name, told in metadata.files.items():  # checksums are those that other tools compute
        content = (path / name).read_bytes()
        assert (told.bytes, told.crc32) == (len(content), f"{zlib.crc32(content):08x}")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_never_loaded(folder, name, damage: Callable[[Path, int], None]):
    for seed in range(20 if damage is flip_a_bit else 1):
        file = folder / "iter_0000300" / name
        intact = file.read_bytes()
        damage(file, seed)
        loaded, said = everything(folder)
        assert loaded == 200 and name in said and f"{folder}" in said and "300" in said
        with pytest.raises((DamagedError, ValueError), match="300"):
            everything(folder, 300)
        file.write_bytes(intact)
    assert everything(folder)[0] == 300


def refused_on_two(folder: Path) -> str:
    rank = Rank(Grid(pp=2), seed=1)
    before = rank.snapshot()
    with pytest.raises(DamagedError) as raised:
        load_checkpoint(folder, rank.state, step=300, process_group=rank.group)
    assert all(torch.equal(value, before[name]) for name, value in rank.snapshot().items())
    return str(raised.value)


def test_ranks_refuse_a_damaged_one_together_before_anything_has_changed(ranks, folder):
    flip_a_bit(folder / "iter_0000300" / FILES[1], 0)
    first, second = ranks(2, refused_on_two, folder)
    assert first == second and FILES[1] in first


def reseal(path: Path, change: Callable[[dict], object]) -> None:
    """Changes metadata.json and gives it the checksum that belongs to it."""
    lines = (path / "metadata.json").read_bytes().rpartition(b",\n")[0]
    values = json.loads(lines + b"}")
    change(values)
    text = json.dumps(values, indent=2).encode().removesuffix(b"\n}")
    (path / "metadata.json").write_bytes(text + b',\n  "crc32": "%08x"\n}\n' % zlib.crc32(text))


@pytest.mark.parametrize(("change", "named"), [
    (lambda told: told["tensors"]["head.bias"]["boxes"][0].update(file="../decoy.safetensors"), "head.bias"),
    (lambda told: told.update(unknown=1), "unknown"),
    (lambda told: told.update(format=99), "5, found 99"),
    (lambda told: told["tensors"]["head.bias"]["boxes"][0].update(name="stem.weight"), "rank_0000"),
    (lambda told: told["tensors"]["head.bias"]["boxes"][0].update(name="absent"), "rank_0000"),
])  # fmt: skip
def test_a_description_of_what_cannot_be_is_refused(folder, change, named):
    reseal(folder / "iter_0000300", change)
    with pytest.raises(DamagedError, match=named):
        load_global_tensors(folder / "iter_0000300", with_optimizer=True)


def boxes(told: dict, name: str = "head.weight") -> list[dict]:
    return told["tensors"][name]["boxes"]


def smaller(told: dict) -> None:
    box = boxes(told)[-1]
    box["sizes"] = [box["sizes"][0] - 1, *box["sizes"][1:]]


def of_another_shape(told: dict) -> None:
    """As many elements as before, so that the boxes cover the tensor, and the files hold others."""
    tensor = told["tensors"]["head.bias"]
    count = math.prod(tensor["shape"])
    tensor["shape"] = [1, count]
    for box in tensor["boxes"]:
        box.update(offsets=[0, *box["offsets"]], sizes=[1, *box["sizes"]])


def enormous(told: dict) -> None:
    box = boxes(told)[0]
    told["tensors"]["head.weight"].update(shape=[1 << 50], boxes=[{**box, "offsets": [0], "sizes": [1 << 50]}])


@pytest.mark.parametrize(("change", "named"), [
    (lambda told: boxes(told).clear(), "head.weight: its boxes hold 0 elements of"),
    (smaller, "head.weight: its boxes hold .* elements of"),
    (lambda told: boxes(told)[1].update(offsets=[0, 0]), "head.weight: its boxes hold .* or some twice"),
    (lambda told: told.update(files={}), "rank_00000.safetensors: not among the files"),
    (lambda told: told["files"].pop("rank_00001.safetensors"), "rank_00001.safetensors: not among the files"),
    (enormous, "rank_0000[01].safetensors: its tensors take .* bytes, and it has"),
    (of_another_shape, "head.bias .* is F32 .* in the file"),
    (lambda told: told["tensors"]["head.bias"].update(dtype="int32"), "head.bias .* is F32 .* in the file"),
])  # fmt: skip
def test_nothing_is_loaded_that_the_files_do_not_hold(folder, change, named):
    """Memory that no file fills would become weights."""
    reseal(folder / "iter_0000300", change)
    with pytest.raises(DamagedError, match=named):
        load_global_tensors(folder / "iter_0000300", with_optimizer=True)


def test_when_none_is_intact_all_are_named(folder):
    for step in (100, 200, 300):
        flip_a_bit(folder / f"iter_0000{step}" / "rank_00001.safetensors", 0)
    with pytest.raises(DamagedError) as raised:
        everything(folder)
    assert all(f"iter_0000{step}/rank_00001.safetensors" in str(raised.value) for step in (100, 200, 300))


def test_a_course_that_was_given_up_is_not_taken_up_again(tmp_path):
    for iteration in (100, 200, 300, 150):  # back to 100, and on from there
        save_global_tensors(tmp_path, {"w": torch.tensor(float(iteration))}, iteration=iteration)
    flip_a_bit(tmp_path / "iter_0000150" / FILES[0], 0)
    with pytest.warns(UserWarning, match="iter_0000150"):
        assert load_global_tensors(tmp_path)["w"] == 100


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("replace", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_file_is_neither_waited_for_nor_read_without_end(folder, name, replace: Callable[[Path], None]):
    file = folder / "iter_0000300" / name
    file.unlink()
    replace(file)
    assert everything(folder)[0] == 200
    with pytest.raises(OSError, match="it is a folder, a pipe or a device"):
        file_checksum(file)
