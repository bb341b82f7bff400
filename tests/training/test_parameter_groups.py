"""Frozen parameters, and rates and weight decay by patterns of names, on any layout."""

from __future__ import annotations

import pytest
import torch

from megasnn.checkpoint import load_global_tensors
from megasnn.config import ConfigError, OptimizerConfig, parse, validate
from megasnn.config.patterns import patterns
from megasnn.engine.setup import parameter_names
from megasnn.kernels import NeuronSpec
from megasnn.models.building import describe
from megasnn.models.model import run_config
from megasnn.models.spikformer.dimensions import Spikformer
from megasnn.optim import build_optimizer, is_frozen, require_matches
from megasnn.sharded_tensors import ShardedTensor
from megasnn.sharding import Shard
from tests.training.runs import train, whole

FROZEN = "patch_embed.stages.*,blocks.0.attention,*.fc2.norm.weight"
RULES = ("--freeze", FROZEN, "--lr-scale-of", "blocks.*=0.5,head=3", "--weight-decay-of", "*=0.02,head.bias=0")
LAYOUTS = {
    "tensor 2": (2, "--tensor-model-parallel-size 2"),
    "data 2": (2, ""),
    "pipeline 3": (3, "--pipeline-model-parallel-size 3"),
    "tensor 2 zbv": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --pipeline-schedule zbv"),
}
NAMES = parameter_names(describe(Spikformer(depth=1), NeuronSpec()))


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


def frozen(name: str) -> bool:
    return is_frozen(OptimizerConfig(freeze=FROZEN), name)


@pytest.fixture(scope="module")
def straight(cache) -> dict[str, torch.Tensor]:
    return whole([train(cache, "--train-iters", "3", "--eval-iters", "0", "--precision", "fp64", *RULES)])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_the_same_ones(ranks, cache, straight, layout: str) -> None:
    size, flags = LAYOUTS[layout]
    common = ("--train-iters", "3", "--eval-iters", "0", "--precision", "fp64", *RULES)
    found = whole(ranks(size, train, cache, *common, *flags.split()))
    for name, value in straight.items():
        assert (found[name].double() - value.double()).norm() <= 1e-9 * value.double().norm(), name


def test_what_is_frozen_stays_and_all_else_is_trained(cache, straight) -> None:
    start = whole([train(cache, "--train-iters", "1", "--precision", "fp64", only_load=True)])
    stays = {name for name, value in start.items() if torch.equal(value, straight[name])}
    assert set(NAMES) <= start.keys()
    assert stays & set(NAMES) == set(filter(frozen, NAMES))
    assert len(stays) > 10 and "patch_embed.stages.0.norm.running_mean" not in stays


def test_the_size_of_the_pipeline_changes_no_bit(ranks, cache) -> None:
    common = ("--train-iters", "2", "--eval-iters", "0", *RULES)
    one = whole([train(cache, *common)])
    two = whole(ranks(2, train, cache, *common, "--pipeline-model-parallel-size", "2", "--pipeline-schedule", "zb1p"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_freezing_changes_no_bit_of_the_others_gradients(cache) -> None:
    common = ("--train-iters", "1", "--eval-iters", "0", "--optimizer", "sgd", "--clip-grad", "0")
    every, some = whole([train(cache, *common)]), whole([train(cache, *common, "--freeze", FROZEN)])
    differs = {name for name in every if not torch.equal(every[name], some[name])}
    assert differs and all(map(frozen, differs))


def test_a_checkpoint_has_no_state_of_what_is_frozen(cache, tmp_path, capsys) -> None:
    folder, common = str(tmp_path), ("--eval-iters", "0", "--save", str(tmp_path), "--load", str(tmp_path))
    train(cache, "--train-iters", "1", *common, "--freeze", "blocks")
    saved = load_global_tensors(folder, with_optimizer=True)
    of_state = {name.removeprefix("optimizer.exp_avg.") for name in saved if name.startswith("optimizer.exp_avg.")}
    assert {name for name in saved if name.startswith("blocks")} and "head.weight" in of_state
    assert not any(name.startswith("blocks") for name in of_state)
    capsys.readouterr()
    train(cache, "--train-iters", "2", *common, "--freeze", "head")
    assert "--freeze from blocks to head" in capsys.readouterr().out
    again = load_global_tensors(folder, with_optimizer=True)
    assert again["optimizer.step.blocks.0.mlp.fc1.conv.weight"] == 1
    assert "optimizer.step.head.weight" not in again and torch.equal(again["head.weight"], saved["head.weight"])


def test_groups_of_an_optimizer() -> None:
    names = {"stem.weight": (4, 3), "stem.bias": (4,), "block.weight": (4, 4), "head.weight": (2, 4), "head.bias": (2,)}
    tensors = [ShardedTensor(name, torch.nn.Parameter(torch.ones(s)), Shard(s), True) for name, s in names.items()]
    config = OptimizerConfig(weight_decay=0.3, lr_scale_of="*=0.5,head.*=2,block=0.1", weight_decay_of="*.bias=0.1")
    groups = build_optimizer(tensors, config).param_groups
    found = {
        entry.name: (group["weight_decay"], group["lr_scale"])
        for group in groups
        for entry in tensors
        if any(entry.tensor is parameter for parameter in group["params"])
    }
    assert found == {
        "stem.weight": (0.3, 0.5),
        "stem.bias": (0.1, 0.5),
        "block.weight": (0.3, 0.1),
        "head.weight": (0.3, 2.0),
        "head.bias": (0.1, 2.0),
    }


@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        (
            {"freeze": "stem.*"},
            r"--freeze: 'stem\.\*' matches no parameter; names are like .* \(they begin with",
        ),
        ({"freeze": "*"}, r"--freeze \* leaves no parameter to train"),
        ({"lr_scale_of": "tail=2"}, "--lr-scale-of: 'tail' matches no trained parameter"),
        ({"freeze": "head", "lr_scale_of": "head.*=2"}, "--lr-scale-of: 'head.*' matches no trained parameter"),
        ({"weight_decay_of": "head=0,*=0.1"}, "--weight-decay-of: 'head' matches .* only those that a later pattern"),
    ],
)
def test_a_pattern_without_effect_is_refused(rules: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        require_matches(OptimizerConfig(**rules), NAMES)


def test_it_is_refused_before_anything_is_built(cache, monkeypatch) -> None:
    monkeypatch.setattr("megasnn.training.data.open_datasets", None)
    with pytest.raises(ValueError, match="--freeze: 'stem' matches no parameter"):
        train(cache, "--train-iters", "1", "--freeze", "stem")


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--freeze head=0.1", "--freeze: 'head=0.1' should look like patch_embed.*"),
        ("--lr-scale-of head", "--lr-scale-of: 'head' should look like head.*=0.1"),
        ("--lr-scale-of a=1,,b=2", "--lr-scale-of: '' should look like"),
        ("--weight-decay-of head=x", "--weight-decay-of: 'x' in 'head=x' is no number"),
        ("--lr-scale-of head=0", "--lr-scale-of: head=0 must be a finite number above 0; --freeze is for what stays"),
        ("--weight-decay-of head=-1", "--weight-decay-of: head=-1 must be a finite number of at least 0"),
    ],
)
def test_a_text_that_is_no_pattern_is_refused(flags: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(parse(run_config(Spikformer), ["--train-iters", "1", *flags.split()]), 1)
    assert problem in str(caught.value)


def test_the_name_of_a_layer_stands_for_all_below_it() -> None:
    (layer,) = patterns("freeze", "blocks.1", with_values=False)
    assert layer.matches("blocks.1.mlp.fc1.conv.weight") and layer.matches("blocks.1")
    assert not layer.matches("blocks.10.mlp.fc1.conv.weight")
