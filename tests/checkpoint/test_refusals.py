"""What cannot be loaded or saved is refused with names and values, on every rank alike; nothing changes."""

from __future__ import annotations

import copy
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megasnn.checkpoint.fit import model_differences
from megasnn.checkpoint.folder import LATEST
from megasnn.checkpoint.format import Progress
from megasnn.checkpoint.load import load_checkpoint, load_globals_into
from megasnn.checkpoint.optimizer_state import LocalState
from megasnn.checkpoint.save import save_checkpoint
from megasnn.common.files import CheckpointError, NoCheckpointError
from megasnn.common.grid import Grid
from megasnn.parallel.sharding import Shard, ShardedTensor
from tests.checkpoint.fake_model import CONFIG, Rank, known


def save(folder: Path, rank: Rank, iteration: int = 100, **progress) -> None:
    save_checkpoint(folder, Progress(iteration, **({"config": CONFIG} | progress)), rank.state, rank.group)


def refusal(folder: Path, rank: Rank, model: str | None = None, config: dict | None = CONFIG, **how) -> CheckpointError:
    """The error of a load, after seeing that neither model nor optimizer has changed."""
    before = rank.snapshot()
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint(
            folder, rank.state, process_group=rank.group,
            check=lambda saved: model_differences(saved, model, config), **how,
        )  # fmt: skip
    after = rank.snapshot()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    return raised.value


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    rank = Rank()
    rank.step()
    save(tmp_path, rank, 50)
    save(tmp_path, rank, 100)
    return tmp_path


def test_one_that_is_not_there(checkpoint, tmp_path):
    error = refusal(tmp_path / "absent", Rank())
    assert isinstance(error, NoCheckpointError) and "absent" in str(error) and "--load" in str(error)
    error = refusal(checkpoint, Rank(), step=70)
    assert not isinstance(error, NoCheckpointError) and "70" in str(error) and "50, 100" in str(error)


def test_another_model_another_configuration_and_weights_alone(checkpoint):
    config = copy.deepcopy(CONFIG)
    config["neuron"]["tau"] = 1.5
    config["model"]["num_heads"] = 4
    config["model"]["embed_dim"] = 16.0  # of another type, and equal
    text = str(refusal(checkpoint, Rank(), config=config))
    assert "neuron.tau: saved 2.0, now 1.5" in text and "model.num_heads: saved absent, now 4" in text
    assert "embed_dim" not in text
    save(checkpoint, Rank(), 200, model="spikformer")
    text = str(refusal(checkpoint, Rank(), model="vgg_dvs"))
    assert "spikformer" in text and "vgg_dvs" in text
    rank = Rank()
    save_checkpoint(checkpoint, Progress(300), LocalState(rank.tensors))
    text = str(refusal(checkpoint, rank))
    assert "--finetune" in text
    load_checkpoint(checkpoint, LocalState(rank.tensors))


def change(rank: Rank, number: int, **fields: object) -> None:
    """Puts another tensor in the place of one of them, or none."""
    old = rank.tensors.pop(number)
    rank.tensors += [replace(old, **fields)] if fields else []
    rank.optimizer = torch.optim.AdamW(rank.parameters())


RESHAPED = {"tensor": torch.zeros(6), "shard": Shard((6,)), "is_parameter": False}


@pytest.mark.parametrize(("number", "fields", "told"), [
    (0, {"name": "stem.kernel"}, ("stem.kernel: missing", "stem.weight")),
    (1, {}, ("stem.running_mean",)),
    (1, {"tensor": torch.zeros(8).half()}, ("stem.running_mean", "float32, torch.float16")),
    (-1, RESHAPED, ("head.bias", "[5], now [6]")),
])  # fmt: skip
def test_tensors_that_do_not_fit(checkpoint, number, fields, told):
    rank = Rank()
    change(rank, number, **fields)
    text = str(refusal(checkpoint, rank))
    assert all(name in text for name in told)


def test_tensors_of_another_precision(tmp_path):
    double, single = Rank(Grid(), dtype=torch.float64), Rank()
    save(tmp_path / "double", double)
    assert "--precision fp64" in str(refusal(tmp_path / "double", Rank()))
    single.step()
    save(tmp_path / "single", single)
    load_checkpoint(tmp_path / "single", double.state)
    assert all(torch.equal(value, single.snapshot()[name].to(value.dtype)) for name, value in double.snapshot().items())


def test_what_is_left_stays_as_it_is(checkpoint):
    rank = Rank()
    change(rank, -1, **RESHAPED)
    rank.tensors.append(ShardedTensor("stem.w", torch.full((), 3.0), Shard(()), False))
    before = {entry.name: entry.tensor.clone() for entry in rank.tensors}
    left = {"stem.w", "head.weight", "head.bias"}
    load_checkpoint(checkpoint, LocalState(rank.tensors), untouched=lambda saved: left)
    after = {entry.name: entry.tensor for entry in rank.tensors}
    unchanged = {name for name in before if torch.equal(before[name], after[name])}
    assert unchanged >= left and not unchanged & {"stem.weight", "blocks.0.w"}


def test_another_optimizer(checkpoint):
    rank = Rank()
    rank.optimizer = torch.optim.SGD(rank.parameters(), lr=0.1)
    text = str(refusal(checkpoint, rank))
    assert "AdamW" in text and "SGD" in text and "--finetune" in text
    rank.optimizer = torch.optim.AdamW(rank.parameters()[1:])
    assert "optimizer.exp_avg.stem.weight" in str(refusal(checkpoint, rank))


def refused_on_ranks(folder: Path) -> list[str]:
    """Only one of two pipeline ranks has a reason to refuse; both must, with the same words."""
    rank = Rank(Grid(pp=2))
    if dist.get_rank() == 1:
        change(rank, -1, **RESHAPED)
    texts = [str(refusal(folder, rank)), str(refusal(folder, Rank(Grid(pp=2)), step=70))]
    config = CONFIG | {"neuron": {"tau": 1.0 + dist.get_rank(), "v_reset": None}}
    texts.append(str(refusal(folder, Rank(Grid(pp=2)), config=config)))
    rank = Rank(Grid(pp=2))
    values = {entry.name: known(entry.name, entry.shard.global_shape) for entry in Rank().tensors}
    for other in ({"head.bias": None}, {"extra": torch.zeros(2)}, {"blocks.1.qkv": torch.zeros(24, 16, 1)}):
        before = rank.snapshot()
        with pytest.raises(CheckpointError) as raised:
            load_globals_into(rank.tensors, values | other, rank.group)
        assert next(iter(other)) in str(raised.value)
        assert all(torch.equal(value, before[name]) for name, value in rank.snapshot().items())
        texts.append(str(raised.value))
    return texts


def test_all_ranks_refuse_with_the_same_words(ranks, checkpoint):
    first, second = ranks(2, refused_on_ranks, checkpoint)
    assert first == second
    assert "head.bias" in first[0] and "70" in first[1] and "neuron.tau: saved 2.0, now 1.0" in first[2]


def test_what_cannot_be_saved(tmp_path):
    rank = Rank()
    for value in (object(), float("nan")):
        with pytest.raises(CheckpointError, match="JSON"):
            save(tmp_path, rank, extra={"schedule": value})
    rank.step()
    state, tensors = rank.optimizer.state[rank.parameters()[0]], rank.tensors
    rank.tensors = [*tensors, ShardedTensor("odd", torch.zeros(2, dtype=torch.complex128), Shard((2,)), False)]
    with pytest.raises(CheckpointError, match="odd: torch.complex128"):
        save(tmp_path, rank)
    rank.tensors, state["history"] = tensors, torch.zeros(7)
    with pytest.raises(CheckpointError, match=r"optimizer\.history\.stem\.weight: .*\[7\]"):
        save(tmp_path, rank)
    assert not list(tmp_path.iterdir())


def save_on_ranks_that_cannot(folder: Path) -> list[str]:
    """Shards that are missing, and a disk that one rank cannot write."""
    rank = Rank(Grid(tp=2))
    for index, entry in enumerate(rank.tensors):
        coordinates = replace(entry.shard.coordinates, grid=Grid(dp_replicate=2, tp=2), dp_replicate=dist.get_rank())
        rank.tensors[index] = replace(entry, shard=replace(entry.shard, coordinates=coordinates))
    with pytest.raises(CheckpointError) as missing:
        save(folder, rank)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        with pytest.raises(CheckpointError) as raised:
            save(folder, Rank(Grid(tp=2)), 200)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return [str(missing.value), str(raised.value)]


def test_every_element_is_written_or_nothing_is(ranks, checkpoint):
    first, second = ranks(2, save_on_ranks_that_cannot, checkpoint)
    assert first == second
    halved, full = first
    assert "stem.weight: its boxes hold 108 elements of 216" in halved and "head.bias" not in halved
    assert "rank 1: OSError" in full and "iter_0000200" in full
    assert (checkpoint / LATEST).read_text() == "100\n"
    assert sorted(path.name for path in checkpoint.iterdir()) == ["iter_0000050", "iter_0000100", LATEST]
