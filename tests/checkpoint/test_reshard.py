"""A checkpoint laid out for other ranks: each opens one file, holds what it held, and goes on as before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megasnn.checkpoint import tensor_io
from megasnn.checkpoint.format import read_metadata
from megasnn.checkpoint.load import load_checkpoint, load_global_tensors
from megasnn.checkpoint.optimizer_state import LocalState, allocate, describe_states
from megasnn.checkpoint.reshard import Target, model_of_checkpoint, reshard
from megasnn.checkpoint.source import open_source
from megasnn.checkpoint.tensor_io import damaged_files
from megasnn.commands.convert_checkpoint import main
from megasnn.common.files import CheckpointError
from megasnn.schedule.partition import layout_to_bounds, parse_layout
from tests.checkpoint.saved import EXTRA, MODELS, build, save_whole

TARGETS = {
    "tensor": Target(2, 1),
    "pipeline": Target(1, 2, layout="2|2"),
    "virtual": Target(2, 2, 2),
    "v": Target(1, 2, 2, layout="1|1|1|1", shape="v"),
}


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request, tmp_path_factory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    save_whole(folder, MODELS[request.param])
    return request.param, folder


def same(one: Path, other: Path) -> bool:
    ours, theirs = (load_global_tensors(folder, with_optimizer=True) for folder in (one, other))
    return ours.keys() == theirs.keys() and all(
        value.dtype == theirs[name].dtype and torch.equal(value, theirs[name]) for name, value in ours.items()
    )


@pytest.mark.parametrize("name", TARGETS)
def test_each_rank_opens_its_own_file_only(checkpoint, tmp_path, monkeypatch, name):
    _, folder = checkpoint
    target, opened = TARGETS[name], list[str]()
    path, layout = reshard(open_source(folder, values=False), tmp_path / "new", target)
    assert same(tmp_path / "new", folder) and damaged_files(path, read_metadata(path)) == []
    metadata, (_, model) = read_metadata(path), model_of_checkpoint(open_source(path))
    layer_groups = [str(number) for number in range(len(model.layers))]
    bounds = layout_to_bounds(parse_layout(layout), layer_groups)
    real = tensor_io.safe_open
    monkeypatch.setattr(tensor_io, "safe_open", lambda file, **how: (opened.append(file.name), real(file, **how))[1])
    for number in range(target.pipeline * target.tensor):
        stage, index = divmod(number, target.tensor)
        spans = [span for span, home in zip(bounds, target.placement, strict=True) if home == stage]
        rank = build(model, 1, index, target.tensor, [each for span in spans for each in span])
        states = allocate(rank.tensors, rank.optimizer, metadata.tensors)
        opened.clear()
        tensor_io.read_boxes(path, metadata.tensors, [*rank.tensors, *describe_states(rank.tensors, states)])
        assert opened == [f"rank_{number:05d}.safetensors"]
    assert len(list(path.glob("*.safetensors"))) == target.pipeline * target.tensor


def test_it_says_what_it_said_before_and_any_layout_loads_it(checkpoint, tmp_path):
    _, folder = checkpoint
    path, _ = reshard(open_source(folder, values=False), tmp_path, Target(2, 2, layout="2|2"))
    before, after = (json.loads((at / "metadata.json").read_text()) for at in (folder / "iter_0000100", path))
    for field in ("iteration", "consumed_samples", "config", "extra", "optimizer", "model"):
        assert before[field] == after[field], field
    assert (after["layout"]["tp"], after["layout"]["pp"]) == (2, 2)
    ranks = [build(model_of_checkpoint(open_source(folder))[1], seed=7) for _ in range(2)]
    for rank, source in zip(ranks, (folder, tmp_path), strict=True):
        loaded = load_checkpoint(source, LocalState(rank.tensors, rank.optimizer))
        assert (loaded.iteration, loaded.extra) == (100, EXTRA)
    for one, other in zip(*(LocalState(rank.tensors, rank.optimizer).entries() for rank in ranks), strict=True):
        assert one.name == other.name and torch.equal(one.tensor, other.tensor)


@pytest.mark.parametrize(
    "flags, reason",
    [
        (["--tensor-model-parallel-size", "3"], "--tensor-model-parallel-size 3"),
        (["--pipeline-model-parallel-size", "40"], "--pipeline-model-parallel-size"),
        (["--pipeline-model-parallel-size", "0"], "(1, 0, 1)"),
        (["--placement", "v"], "two chunks on each rank"),
        (["--pipeline-model-parallel-layout", "1|1"], "has 2 entries for 1 chunk "),
    ],
)
def test_impossible_targets_are_refused(tmp_path, capsys, flags, reason):
    save_whole(tmp_path / "run", MODELS["vgg_dvs"])
    assert main(["reshard", "--load", str(tmp_path / "run"), "--save", str(tmp_path / "new"), *flags]) == 2
    assert reason in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_tensors_that_are_not_the_models_are_listed(tmp_path):
    save_whole(tmp_path / "run", MODELS["vgg_dvs"])
    source = open_source(tmp_path / "run", values=False)
    name = next(name for name in source.tensors if name.endswith("conv.weight") and not name.startswith("optimizer"))
    source.tensors["stray"] = source.tensors.pop(name)
    with pytest.raises(CheckpointError) as raised:
        reshard(source, tmp_path / "new", Target(1, 1))
    assert f"{name}: missing" in str(raised.value) and "stray" in str(raised.value) and not (tmp_path / "new").exists()
