"""Whatever happens to any file of a checkpoint, it is found and named; the newest intact checkpoint takes its place."""

from __future__ import annotations

import io
import math
import random
import shutil
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from megasnn.checkpoint import (
    DamagedError,
    description,
    find_checkpoint,
    load_checkpoint,
    load_global_tensors,
    read_metadata,
    save_checkpoint,
    save_global_tensors,
    verify_checkpoint,
)
from megasnn.checkpoint.checksum import BLOCK
from megasnn.checkpoint.description import FileFacts
from megasnn.checkpoint.folder import LATEST
from megasnn.checkpoint.torch_frame import values_at
from megasnn.grid import Coordinates, Grid, Place
from megasnn.sharded_tensors import ShardedTensor
from megasnn.sharding import Cut, Shard
from tests.checkpoint.fake_model import CONFIG, Layout, Rank, known, wrong


def cut(file: Path, seed: int) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty(file: Path, seed: int) -> None:
    file.write_bytes(b"")


def flip_a_bit(file: Path, seed: int) -> None:
    content = bytearray(file.read_bytes())
    bit = random.Random(f"{file.name} {seed}").randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def remove(file: Path, seed: int) -> None:
    file.unlink()


DAMAGES = [cut, empty, flip_a_bit, remove]
FILES = [".metadata", "pieces.json", "__0_0.distcp", "__1_0.distcp", "metadata.json"]


def scale(iteration: int) -> int:
    """Powers of two: exact in every type."""
    return 2 ** (iteration // 100)


def save_three(folder: Path) -> None:
    rank = Rank(Layout(tensor=2))
    for iteration in (100, 200, 300):
        rank.fill()
        for entry in rank.everything():
            if entry.tensor.is_floating_point():
                entry.tensor.detach().mul_(scale(iteration))
        save_checkpoint(
            folder,
            iteration=iteration,
            consumed_samples=0,
            tensors=rank.tensors,
            optimizer=rank.optimizer,
            extra={},
            config=CONFIG,
            layout=None,
            process_group=rank.group,
        )


@pytest.fixture(scope="module")
def three(ranks, tmp_path_factory) -> Path:
    """Iterations 100, 200, 300 of two tensor-parallel ranks; every value is the known one times `scale`."""
    folder = tmp_path_factory.mktemp("three")
    ranks(2, save_three, folder)
    return folder


@pytest.fixture
def folder(three, tmp_path) -> Path:
    return shutil.copytree(three, tmp_path / "run")


def factor(tensors: dict[str, torch.Tensor]) -> float:
    """The iteration that all of these values are of."""
    iterations = set()
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            ratio = (tensor.double() / known(name, tuple(tensor.shape))).nanmedian()
            assert torch.equal(tensor.double(), known(name, tuple(tensor.shape)) * ratio), name
            iterations.add(100 * math.log2(ratio))
    (iteration,) = iterations
    return iteration


def everything(folder: Path, step: int | None = None) -> tuple[float, str]:
    """The iteration that was loaded, and what was said about it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = factor(load_global_tensors(folder, step, with_optimizer=True))
    return loaded, "\n".join(str(warning.message) for warning in caught)


def test_without_damage_nothing_is_said(folder):
    loaded, said = everything(folder)
    assert loaded == 300 and "iter_" not in said
    checked = list(verify_checkpoint(path := find_checkpoint(folder, None)))
    assert {problem for _, problem in checked} == {None}
    assert sum(count for count, _ in checked) == sum(file.stat().st_size for file in path.glob("*.distcp"))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_never_loaded(folder, name, damage: Callable[[Path, int], None]):
    for seed in range(10 if damage is flip_a_bit else 1):
        file = folder / "iter_0000300" / name
        whole = file.read_bytes()
        damage(file, seed)
        loaded, said = everything(folder)
        assert loaded == 200 and (name in said or (name, damage) == ("metadata.json", remove))
        assert f"{folder}" in said and "300" in said
        with pytest.raises((DamagedError, ValueError), match="300"):
            everything(folder, 300)
        file.write_bytes(whole)
    assert everything(folder)[0] == 300


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_latest_is_told(folder, damage: Callable[[Path, int], None]):
    """It may come to name another checkpoint that is there: that is told as well."""
    latest = folder / LATEST
    for seed in range(32 if damage is flip_a_bit else 1):
        latest.write_text("300\n")
        damage(latest, seed)
        now = latest.read_text(errors="replace").strip() if latest.exists() else ""
        loaded, said = everything(folder)
        assert loaded == (int(now) if now in ("100", "200") else 300)
        assert LATEST in said or now == "300"
    latest.write_text("100")
    loaded, said = everything(folder)
    assert loaded == 100 and "names iteration 100, though iteration 300 was saved later" in said


@pytest.mark.parametrize("content", ["250", "", "release", None])
def test_a_latest_that_points_nowhere(folder, content):
    if content is None:
        (folder / LATEST).unlink()
    else:
        (folder / LATEST).write_text(content)
    loaded, said = everything(folder)
    assert loaded == 300 and LATEST in said and "taking the newest that is intact" in said


def test_every_bit_of_a_description_and_a_small_file_counts(folder):
    for name in ("metadata.json", "__0_0.distcp"):
        file = folder / "iter_0000300" / name
        whole = file.read_bytes()
        for position in random.Random(name).sample(range(8 * len(whole)), 150):
            flipped = bytearray(whole)
            flipped[position // 8] ^= 1 << position % 8
            file.write_bytes(flipped)
            with pytest.raises(DamagedError, match="300"):
                load_global_tensors(folder, 300, with_optimizer=True)
        file.write_bytes(whole)


def test_when_none_is_intact_all_are_named(folder):
    for step in (100, 200, 300):
        flip_a_bit(folder / f"iter_0000{step}" / "__1_0.distcp", 0)
    with pytest.raises(DamagedError) as raised:
        everything(folder)
    text = str(raised.value)
    assert "no checkpoint that is intact" in text and all(
        f"iter_0000{step}/__1_0.distcp" in text for step in (100, 200)
    )
    found = [problem for _, problem in verify_checkpoint(folder / "iter_0000200") if problem]
    assert len(found) == 1 and "__1_0.distcp was altered" in found[0]


def load_on_two(folder: Path, step: int | None) -> tuple[list[str], tuple[str, ...]]:
    rank = Rank(Layout(pipeline=2), seed=1)
    try:
        state = load_checkpoint(
            folder, tensors=rank.tensors, optimizer=rank.optimizer, config=CONFIG, step=step, process_group=rank.group
        )
    except DamagedError as error:
        return [str(error)], ()
    for entry in rank.everything():
        if entry.tensor.is_floating_point():
            entry.tensor.detach().div_(scale(state.iteration))
    return wrong(rank), state.remarks


def test_ranks_agree_though_only_one_sees_the_damage(ranks, folder):
    """The last tensor of a file is in the head, which only the last stage reads."""
    file = folder / "iter_0000300" / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[-100] ^= 4
    file.write_bytes(content)
    (wrong_0, remarks_0), (wrong_1, remarks_1) = ranks(2, load_on_two, folder, None)
    assert wrong_0 == wrong_1 == [] and remarks_0 == remarks_1
    assert len(remarks_0) == 1 and "head." in remarks_0[0] and "__1_0.distcp was altered" in remarks_0[0]
    (said_0, _), (said_1, _) = ranks(2, load_on_two, folder, 300)
    assert said_0 == said_1 and "__1_0.distcp was altered" in said_0[0]


def looked_at(folder: Path) -> list[str]:
    """The files that this rank looks at when two load, but for the choice of a checkpoint by the first one."""
    chosen = folder / "iter_0000300"
    names: list[str] = []
    real = description._damage

    def damage(path: Path, name: str, size: int) -> str | None:
        names.append(name)
        return real(path, name, size)

    with (
        mock.patch("megasnn.checkpoint.loading.first_intact", lambda folder, step, group, load: (load(chosen), ())),
        mock.patch.object(description, "_damage", damage),
    ):
        assert load_on_two(folder, 300) == ([], ())
    return names


def test_ranks_share_out_looking_for_files(ranks, folder):
    first, second = ranks(2, looked_at, folder)
    there = list(description.read_metadata(folder / "iter_0000300").files)
    assert sorted(first + second) == sorted(there) and abs(len(first) - len(second)) <= 1


def test_every_rank_is_told_of_a_file_that_one_rank_misses(ranks, folder):
    for number, name in enumerate(("__0_0.distcp", "__1_0.distcp")):
        (folder / f"iter_0000{300 - 100 * number}" / name).unlink()
        (said, _), (again, _) = ranks(2, load_on_two, folder, 300 - 100 * number)
        assert said == again and len(said) == 1 and f"{name} is missing" in said[0]


def test_a_course_that_was_given_up_is_not_taken_up_again(tmp_path):
    for iteration in (100, 200, 300, 150):  # back to 100, and on from there
        save_global_tensors(tmp_path, {"w": torch.tensor(float(iteration))}, iteration=iteration)
    flip_a_bit(tmp_path / "iter_0000150" / "__0_0.distcp", 0)
    with pytest.warns(UserWarning, match="iter_0000150"):
        assert load_global_tensors(tmp_path)["w"] == 100


def large(rank: int = 0, size: int = 1, dim: int = 0) -> ShardedTensor:
    shard = Shard((1000, 700), (("tensor", Cut(dim)),), Place(Grid(tensor=size), Coordinates(tensor=rank)))
    return ShardedTensor("large", torch.zeros(shard.local_shape), shard, False)


@pytest.mark.parametrize("dim", [0, 1])
def test_slices_of_a_large_tensor(tmp_path, monkeypatch, dim):
    values = known("large", (1000, 700)).float()
    path = save_global_tensors(tmp_path, {"small": torch.zeros(3), "large": values})
    read: list[int] = []
    checksum = zlib.crc32
    monkeypatch.setattr(zlib, "crc32", lambda data, start=0: (read.append(len(data)), checksum(data, start))[1])
    small = ShardedTensor("small", torch.zeros(3), Shard((3,)), False)
    for rank in range(4):
        read.clear()
        part = large(rank, 4, dim)
        load_checkpoint(tmp_path, tensors=[small, part])
        assert torch.equal(part.tensor, part.shard.cut(values))
        if dim == 0:  # rows lie together: no more than the blocks that hold them
            assert sum(read) < values.nbytes / 4 + 2 * BLOCK + 30_000
    assert len([problem for _, problem in verify_checkpoint(path)]) == 2


@pytest.mark.parametrize("block", [0, 1, 2])
def test_a_flipped_bit_in_any_block_of_a_large_tensor(tmp_path, block):
    """Whoever needs that block refuses it; a rank whose rows lie elsewhere does not read it."""
    path = save_global_tensors(tmp_path, {"large": known("large", (1000, 700)).float()})
    file = path / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[block * BLOCK + BLOCK // 2] ^= 1
    file.write_bytes(content)
    assert [problem for _, problem in verify_checkpoint(path) if problem]
    refused = []
    for rank in range(4):
        try:
            load_checkpoint(tmp_path, tensors=[large(rank, 4)])
        except DamagedError as error:
            assert f"large in {file} was altered" in str(error)
            refused.append(rank)
    assert refused == {0: [0, 1], 1: [1, 2], 2: [2, 3]}[block]
    with pytest.raises(DamagedError):
        load_checkpoint(tmp_path, tensors=[large()])


def test_torch_reads_the_files_and_other_tools_compute_the_same_checksums(folder, tmp_path):
    path = find_checkpoint(folder, None)
    dcp_to_torch_save(path, tmp_path / "whole.pt")
    theirs, ours = torch.load(tmp_path / "whole.pt"), load_global_tensors(folder, with_optimizer=True)
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in ours)
    for name, told in read_metadata(path).files.items():
        content = (path / name).read_bytes()
        assert told == FileFacts(len(content), f"{zlib.crc32(content):08x}")


def test_values_that_are_not_aligned_are_damage():
    with zipfile.ZipFile(stream := io.BytesIO(), "w") as made:
        made.writestr("archive/data/0", bytes(8))  # its name has 14 letters, its header 30 bytes
    assert values_at(stream.getvalue(), 8, 4) == 44
    with pytest.raises(DamagedError, match="at 44, which is not aligned for 8 bytes each"):
        values_at(stream.getvalue(), 8, 8)
