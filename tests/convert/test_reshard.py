"""A checkpoint laid out for other ranks: each opens one file, holds what it held, and goes on as before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megasnn.checkpoint import CheckpointError, load_checkpoint, load_global_tensors, read_metadata
from megasnn.checkpoint.job import LOCK
from megasnn.checkpoint.optimizer_state import allocate, describe
from megasnn.checkpoint.pieces import read_pieces
from megasnn.checkpoint.planner import plan_reading
from megasnn.commands.convert_checkpoint import main
from megasnn.convert.opening import open_source
from megasnn.convert.rank_files import reshard
from megasnn.convert.target import Target, saved_model
from megasnn.schedule.partition import layout_to_bounds, parse_layout
from tests.convert.saved import EXTRA, MODELS, build, identity, save_whole

TARGETS = {
    "one": Target(1, 1),
    "tensor": Target(2, 1, layout=None),
    "pipeline": Target(1, 2, layout="2|2"),
    "both": Target(2, 2, layout="2|2"),
    "virtual": Target(2, 2, 2, layout="1|1|1|1"),
    "v": Target(1, 2, 2, layout="1|1|1|1", shape="v"),
}


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request, tmp_path_factory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    save_whole(folder, MODELS[request.param])
    return request.param, folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_global_tensors(folder, with_optimizer=True)


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype and torch.equal(value, other[name]), name


@pytest.mark.parametrize("name", TARGETS)
def test_each_rank_opens_its_own_file_only(checkpoint, tmp_path, name):
    kind, folder = checkpoint
    target = TARGETS[name]
    path, laid_out = reshard(open_source(folder), tmp_path / "new", target)
    assert_same(tensors_of(tmp_path / "new"), tensors_of(folder))
    metadata = read_metadata(path)
    saved = read_pieces(path, metadata)
    model = saved_model(open_source(path))
    bounds = layout_to_bounds(parse_layout(laid_out.layout["bounds"]), [str(n) for n in range(layers_of(model))])
    files = set()
    for number, place in enumerate(laid_out.ranks):
        held = [
            index
            for span, home in zip(bounds, target.placement, strict=True)
            if home == place.pipeline
            for index in span
        ]
        rank = build(model, 1, place.tensor, target.tensor, held)
        states = allocate(rank.tensors, rank.optimizer, metadata.tensors)
        wanted = plan_reading([*rank.tensors, *describe(rank.tensors, states)], saved)
        opened = {part.piece.file for part in wanted}
        assert opened == {f"__{number}_0.distcp"}
        files |= opened
    assert files == {file.name for file in path.glob("*.distcp")}


def layers_of(model) -> int:
    return len(model.description.layers)


def test_it_says_what_it_said_before(checkpoint, tmp_path):
    kind, folder = checkpoint
    path, _ = reshard(open_source(folder), tmp_path, Target(2, 2, layout="2|2"))
    before, after = (json.loads((at / "metadata.json").read_text()) for at in (folder / "iter_0000100", path))
    for field in ("iteration", "consumed_samples", "config", "extra", "optimizer", "tensors"):
        assert before[field] == after[field], field
    assert after["extra"] == EXTRA
    assert (after["layout"]["tensor"], after["layout"]["pipeline"]) == (2, 2)


def test_a_run_of_any_layout_loads_it(checkpoint, tmp_path):
    """Copies for two tensor-parallel ranks serve nobody else, and disturb nobody."""
    kind, folder = checkpoint
    reshard(open_source(folder), tmp_path, Target(2, 2, layout="2|2"))
    ranks = [build(saved_model(open_source(folder)), seed=7) for _ in range(2)]
    for rank, source in zip(ranks, (folder, tmp_path), strict=True):
        state = load_checkpoint(source, tensors=rank.tensors, optimizer=rank.optimizer, config=identity(MODELS[kind]))
        assert (state.iteration, state.extra) == (100, EXTRA)
    for one, other in zip(*(rank.tensors for rank in ranks), strict=True):
        assert torch.equal(one.tensor, other.tensor)
        for state, value in ranks[0].optimizer.state.get(one.tensor, {}).items():
            assert torch.equal(value, ranks[1].optimizer.state[other.tensor][state]), (one.name, state)


@pytest.mark.parametrize(
    "flags, reason",
    [
        (["--target-tensor-parallel-size", "3"], "must be a multiple of --target-tensor-parallel-size 3"),
        (["--target-pipeline-parallel-size", "50"], "--target-pipeline-parallel-size 50 x --target-virtual-stages 1"),
        (["--target-pipeline-parallel-size", "0"], "--target-pipeline-parallel-size must be at least 1, got 0"),
        (["--target-placement", "v"], "--target-virtual-stages is 1"),
        (["--pipeline-model-parallel-layout", "1|1"], "has 2 entries for 1 chunks"),
        (["--ckpt-step", "7"], "no checkpoint of iteration 7"),
    ],
)
def test_impossible_targets_are_refused(checkpoint, tmp_path, capsys, flags, reason):
    kind, folder = checkpoint
    assert main(["reshard", "--load", str(folder), "--save", str(tmp_path / "new"), *flags]) == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_nothing_is_overwritten(checkpoint, tmp_path, capsys):
    kind, folder = checkpoint
    arguments = ["reshard", "--load", str(folder), "--save", str(tmp_path / "new")]
    assert main(arguments) == 0
    assert main(arguments) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["reshard", "--load", str(folder), "--save", str(folder)]) == 2
    assert "give another folder" in capsys.readouterr().err


def test_a_damaged_source_leaves_nothing_behind(checkpoint, tmp_path, capsys):
    kind, folder = checkpoint
    path, _ = reshard(open_source(folder), tmp_path / "damaged", Target(1, 1))
    file = path / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert main(["reshard", "--load", str(path), "--save", str(tmp_path / "new")]) == 2
    assert "was altered" in capsys.readouterr().err
    assert [file.name for file in (tmp_path / "new").iterdir()] == [LOCK]
    assert main(["verify", str(path)]) == 1
    assert "was altered" in capsys.readouterr().out


def test_tensors_that_are_not_the_models_are_listed(checkpoint, tmp_path):
    kind, folder = checkpoint
    source = open_source(folder)
    name = next(name for name in source.tensors if name.endswith("conv.weight") and not name.startswith("optimizer"))
    del source.tensors[name]
    source.tensors["stray"] = source.tensors[next(iter(source.tensors))]
    with pytest.raises(CheckpointError) as raised:
        reshard(source, tmp_path, Target(1, 1))
    assert f"{name}: missing" in str(raised.value) and "stray: saved, but its model has no such" in str(raised.value)
    assert not list(tmp_path.iterdir())
