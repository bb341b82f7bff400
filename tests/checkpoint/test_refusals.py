"""What cannot be loaded or saved is refused with names and values, on every rank alike; nothing changes."""

from __future__ import annotations

import copy
import json
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megasnn.checkpoint import CheckpointError, NoCheckpointError, load_checkpoint, read_metadata, save_checkpoint
from megasnn.checkpoint.description import TensorFacts, to_text
from megasnn.checkpoint.folder import LATEST
from megasnn.grid import Grid, Place
from megasnn.sharded_tensors import ShardedTensor
from megasnn.sharding import Shard
from tests.checkpoint.fake_model import CONFIG, STATES, Layout, Rank


def save(folder: Path, rank: Rank, iteration: int = 100, **changed) -> None:
    arguments = {
        "iteration": iteration,
        "consumed_samples": 0,
        "tensors": rank.tensors,
        "optimizer": rank.optimizer,
        "extra": {},
        "config": CONFIG,
        "layout": None,
        "process_group": rank.group,
    }
    save_checkpoint(folder, **(arguments | changed))


def refusal(folder: Path, rank: Rank, **changed) -> CheckpointError:
    """The error of a load, after seeing that neither model nor optimizer has changed."""
    before = rank.snapshot()
    arguments = {"optimizer": rank.optimizer, "config": CONFIG, "process_group": rank.group}
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint(folder, tensors=rank.tensors, **(arguments | changed))
    after = rank.snapshot()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    return raised.value


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    rank = Rank(Layout())
    rank.step()
    save(tmp_path, rank, 50)
    save(tmp_path, rank, 100)
    return tmp_path


def test_nothing_there(tmp_path):
    for folder in (tmp_path / "absent", tmp_path):
        error = refusal(folder, Rank(Layout()))
        assert isinstance(error, NoCheckpointError)
        assert str(folder) in str(error) and "--load" in str(error)


def test_a_step_that_does_not_exist_names_those_that_do(checkpoint):
    error = refusal(checkpoint, Rank(Layout()), step=70)
    assert "70" in str(error) and "50, 100" in str(error)
    assert not isinstance(error, NoCheckpointError)


def test_another_configuration_lists_the_differing_fields(checkpoint):
    config = copy.deepcopy(CONFIG)
    config["neuron"]["tau"] = 1.5
    config["model"]["num_heads"] = 4
    text = str(refusal(checkpoint, Rank(Layout()), config=config))
    assert "neuron.tau: saved 2.0, now 1.5" in text
    assert "model.num_heads: saved absent, now 4" in text
    assert "embed_dim" not in text


def test_a_configuration_is_compared_as_json(checkpoint):
    rank = Rank(Layout())
    save(checkpoint, rank, 200, config={"layout": (1, 2)})
    assert load_checkpoint(checkpoint, tensors=rank.tensors, config={"layout": (1, 2)}).iteration == 200


def test_weights_from_elsewhere_need_finetune(checkpoint):
    save(checkpoint, Rank(Layout()), 200, config=None, optimizer=None)
    rank = Rank(Layout())
    text = str(refusal(checkpoint, rank))
    assert "--finetune" in text and "--no-load-optim" in text
    load_checkpoint(checkpoint, tensors=rank.tensors)


def rename(rank: Rank) -> str:
    old = rank.tensors[0]
    rank.tensors[0] = ShardedTensor("stem.kernel", old.tensor, old.shard, True)
    return "stem.kernel: not in the checkpoint"


def drop(rank: Rank) -> str:
    dropped = rank.tensors.pop(1)
    return f"{dropped.name}: saved, but nothing here takes it"


def reshape(rank: Rank) -> str:
    old = rank.tensors[-1]
    rank.tensors[-1] = ShardedTensor(old.name, torch.zeros(6), Shard((6,)), False)
    rank.optimizer = torch.optim.AdamW(rank.parameters())
    return "head.bias: saved with shape [5], now [6]"


def round_off(rank: Rank) -> str:
    old = rank.tensors[1]
    rank.tensors[1] = ShardedTensor(old.name, old.tensor.half(), old.shard, False)
    return "stem.running_mean: saved as float32, float16 cannot hold it"


def round_off_to_eight_bits(rank: Rank) -> str:
    old = rank.tensors[1]
    rank.tensors[1] = ShardedTensor(old.name, old.tensor.to(torch.float8_e4m3fn), old.shard, False)
    return "stem.running_mean: saved as float32, float8_e4m3fn cannot hold it"


@pytest.mark.parametrize("change", [rename, drop, reshape, round_off, round_off_to_eight_bits])
def test_tensors_that_do_not_fit(checkpoint, change: Callable[[Rank], str]):
    rank = Rank(Layout())
    expected = change(rank)
    assert expected in str(refusal(checkpoint, rank))


def refused_in_single_precision(folder: Path) -> str:
    save(folder, Rank(Layout(pipeline=2), dtype=torch.float64))
    return str(refusal(folder, Rank(Layout(pipeline=2)), optimizer=None))


def test_tensors_of_a_wider_type_are_one_line_on_all_ranks(ranks, tmp_path):
    text, other = ranks(2, refused_in_single_precision, tmp_path)
    assert text == other
    (line,) = text.splitlines()[1:]
    described = read_metadata(tmp_path / "iter_0000100").tensors
    count = sum(told.dtype == "float64" and not name.startswith("optimizer.") for name, told in described.items())
    assert line == (
        f"  blocks.0.projection and {count - 1} other tensors: saved as float64, float32 cannot hold them; load it "
        "with --precision fp64"
    )


def test_tensors_of_a_narrower_type_are_loaded_exactly(tmp_path):
    saved, rank = Rank(Layout()), Rank(Layout(), dtype=torch.float64)
    saved.step()
    save(tmp_path, saved)
    load_checkpoint(tmp_path, tensors=rank.tensors, optimizer=rank.optimizer)
    assert all(torch.equal(mine, saved.snapshot()[name].to(mine.dtype)) for name, mine in rank.snapshot().items())


def test_a_head_of_another_shape_may_be_left_as_it_is(checkpoint):
    rank = Rank(Layout())
    reshape(rank)
    before = {entry.name: entry.tensor.clone() for entry in rank.tensors}
    load_checkpoint(checkpoint, tensors=rank.tensors, leave="head")
    after = {entry.name: entry.tensor for entry in rank.tensors}
    assert {name for name in before if torch.equal(before[name], after[name])} >= {"head.weight", "head.bias"}
    assert not torch.equal(before["stem.weight"], after["stem.weight"])


def test_another_optimizer(checkpoint):
    rank = Rank(Layout())
    rank.optimizer = torch.optim.SGD(rank.parameters(), lr=0.1)
    text = str(refusal(checkpoint, rank))
    assert "AdamW" in text and "SGD" in text and "--no-load-optim" in text


def test_an_optimizer_of_fewer_parameters(checkpoint):
    rank = Rank(Layout())
    rank.optimizer = torch.optim.AdamW(rank.parameters()[1:])
    assert "optimizer.exp_avg.stem.weight: saved, but nothing here takes it" in str(refusal(checkpoint, rank))


@pytest.mark.parametrize("format", [1, 99])
def test_another_format(checkpoint, format):
    file = checkpoint / "iter_0000100" / "metadata.json"
    description = replace(read_metadata(file.parent), format=format)
    text = to_text(description)
    if format == 1:  # it had no checksums
        text = json.dumps({name: value for name, value in json.loads(text).items() if name != "crc32"})
    file.write_text(text)
    assert f"is of format {format}, this megasnn reads formats 2 and 3" in str(refusal(checkpoint, Rank(Layout())))


def test_a_description_that_promises_more_than_the_files_hold(checkpoint):
    file = checkpoint / "iter_0000100" / "metadata.json"
    told = read_metadata(file.parent)
    file.write_text(to_text(replace(told, tensors=told.tensors | {"head.extra": TensorFacts((2,), "float32")})))
    rank = Rank(Layout())
    rank.tensors.append(ShardedTensor("head.extra", torch.zeros(2), Shard((2,)), False))
    text = str(refusal(checkpoint, rank, step=100))
    assert "head.extra: the files do not hold what metadata.json says: nothing and float32 [2]" in text


def refused_on_ranks(folder: Path) -> list[str]:
    """Only one of two pipeline ranks has a reason to refuse; both must, with the same words."""
    rank = Rank(Layout(pipeline=2))
    if dist.get_rank() == 1:
        reshape(rank)
    texts = [str(refusal(folder, rank)), str(refusal(folder, Rank(Layout(pipeline=2)), step=70))]
    config = CONFIG | {"neuron": {"tau": 1.0 + dist.get_rank(), "v_reset": None}}
    return [*texts, str(refusal(folder, Rank(Layout(pipeline=2)), config=config))]


def test_all_ranks_refuse_with_the_same_words(ranks, checkpoint):
    first, second = ranks(2, refused_on_ranks, checkpoint)
    assert first == second
    assert "head.bias: saved with shape [5], now [6]" in first[0]
    assert "neuron.tau: saved 2.0, now 1.0" in first[2]


def test_what_cannot_be_saved(tmp_path):
    rank = Rank(Layout())
    with pytest.raises(CheckpointError, match="extra cannot be written as JSON"):
        save(tmp_path, rank, extra={"schedule": object()})
    with pytest.raises(CheckpointError, match=r"two tensors of one rank are called stem\.weight"):
        save(tmp_path, rank, tensors=[*rank.tensors, rank.tensors[0]])
    with pytest.raises(CheckpointError, match=r"optimizer\.x: names that start"):
        save(tmp_path, rank, tensors=[ShardedTensor("optimizer.x", torch.zeros(2), Shard((2,)), False)])
    rank.step()
    with pytest.raises(CheckpointError, match=r"a parameter of shape \[8, 3, 3, 3\] without a name"):
        save(tmp_path, rank, tensors=rank.tensors[1:])
    rank.optimizer.state[rank.parameters()[0]]["history"] = torch.zeros(7)
    with pytest.raises(CheckpointError, match=r"optimizer\.history\.stem\.weight: .* found \[7\]"):
        save(tmp_path, rank)
    assert not list(tmp_path.iterdir())


def save_shards_that_do_not_add_up(folder: Path) -> list[str]:
    texts = []
    first = dist.get_rank() == 0
    for layout, answers in ((Layout(data=2), True), (Layout(tensor=2), first), (Layout(pipeline=2), first)):
        rank = Rank(layout)
        for index, entry in enumerate(rank.tensors):
            at = entry.shard.place.coordinates
            place = Place(Grid(layout.pipeline, 2, layout.tensor), replace(at, data=0 if answers else 1))
            rank.tensors[index] = replace(entry, shard=replace(entry.shard, place=place))
        with pytest.raises(CheckpointError) as raised:
            save(folder, rank)
        texts.append(str(raised.value))
    return texts


def test_every_element_is_written_exactly_once_or_not_at_all(ranks, checkpoint):
    first, second = ranks(2, save_shards_that_do_not_add_up, checkpoint)
    assert first == second
    twice, halved, forgotten = first
    assert "stem.weight: the ranks would write 432 elements of 216" in twice
    assert "stem.weight: the ranks would write 108 elements of 216" in halved
    assert "head.bias" in twice and "head.bias" not in halved
    assert "head.bias: no rank writes it" in forgotten and "stem.weight" not in forgotten
    assert (checkpoint / LATEST).read_text() == "100\n"
    assert sorted(path.name for path in checkpoint.iterdir()) == ["iter_0000050", "iter_0000100", LATEST]


def save_where_one_rank_cannot_write(folder: Path) -> str:
    rank = Rank(Layout(tensor=2))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        with pytest.raises(CheckpointError) as raised:
            save(folder, rank, 200)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return str(raised.value)


def test_a_rank_that_cannot_write_fails_the_save_on_all(ranks, checkpoint):
    first, second = ranks(2, save_where_one_rank_cannot_write, checkpoint)
    assert first == second
    assert "rank 1: OSError" in first and "iter_0000200" in first
    assert sorted(path.name for path in checkpoint.iterdir()) == ["iter_0000050", "iter_0000100", LATEST]


def with_state(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """A checkpoint whose optimizer state was changed after it was described, under checksums of its own."""
    rank = Rank(Layout())
    rank.fill()
    for state in rank.optimizer.state.values():
        change(state)
    save(folder, rank)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda state: state["step"].fill_(-1), r"optimizer\.step\.stem\.weight: -1\.0 is no number of steps"),
        (lambda state: state["step"].fill_(float("nan")), r"optimizer\.step\.stem\.weight: nan is no number of steps"),
        (lambda state: state.pop("exp_avg"), r"optimizer\.exp_avg\.stem\.weight: not in the checkpoint"),
        (
            lambda state: state.update(exp_avg=state["exp_avg"].int()),
            r"optimizer\.exp_avg\.stem\.weight: saved as int32, which no optimizer's state is of",
        ),
    ],
)
def test_optimizer_state_that_cannot_be_is_refused(tmp_path, change, text):
    with_state(tmp_path, change)
    rank = Rank(Layout())
    with pytest.raises(CheckpointError, match=text):
        load_checkpoint(tmp_path, tensors=rank.tensors, optimizer=rank.optimizer, optimizer_state=STATES, config=CONFIG)
    assert not rank.optimizer.state
