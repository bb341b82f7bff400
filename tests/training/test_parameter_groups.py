"""Frozen parameters, and rates and weight decay by patterns of names, on any layout."""

from __future__ import annotations

import pytest
import torch

from megasnn.checkpoint.load import load_global_tensors
from megasnn.config import OptimizerConfig
from megasnn.engine.build import parameter_names
from megasnn.kernels import NeuronSpec
from megasnn.models.build import describe
from megasnn.models.spikformer.model import Spikformer
from megasnn.optim import build_optimizer, is_frozen, require_matches
from megasnn.parallel.sharding import Shard, ShardedTensor
from tests.training.runs import train, whole

FROZEN = "patch_embed.stages.*=0,blocks.0.attention=0,*.fc2.norm.weight=0"
RULES = ("--lr-scale-of", f"blocks.*=0.5,head=3,{FROZEN}")
LAYOUTS = {
    "pipeline 3": (3, "--pipeline-model-parallel-size 3"),
    "tensor 2 zbv": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --pipeline-schedule zbv"),
}
NAMES = parameter_names(describe(Spikformer(depth=1), NeuronSpec()))


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


def frozen(name: str) -> bool:
    return is_frozen(OptimizerConfig(lr_scale_of=FROZEN), name)


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


def test_a_checkpoint_has_no_state_of_what_is_frozen(cache, tmp_path, capsys) -> None:
    folder, common = str(tmp_path), ("--eval-iters", "0", "--save", str(tmp_path), "--load", str(tmp_path))
    train(cache, "--train-iters", "1", *common, "--lr-scale-of", "blocks=0")
    saved = load_global_tensors(folder, with_optimizer=True)
    of_state = {name.removeprefix("optimizer.exp_avg.") for name in saved if name.startswith("optimizer.exp_avg.")}
    assert {name for name in saved if name.startswith("blocks")} and "head.weight" in of_state
    assert not any(name.startswith("blocks") for name in of_state)
    capsys.readouterr()
    train(cache, "--train-iters", "2", *common, "--lr-scale-of", "head=0")
    assert "--lr-scale-of from blocks=0 to head=0" in capsys.readouterr().out
    again = load_global_tensors(folder, with_optimizer=True)
    assert again["optimizer.step.blocks.0.mlp.fc1.conv.weight"] == 1
    assert "optimizer.step.head.weight" not in again and torch.equal(again["head.weight"], saved["head.weight"])


def test_groups_of_an_optimizer() -> None:
    names = {"stem.weight": (4, 3), "stem.bias": (4,), "block.weight": (4, 4), "head.weight": (2, 4), "head.bias": (2,)}
    tensors = [ShardedTensor(name, torch.nn.Parameter(torch.ones(s)), Shard(s), True) for name, s in names.items()]
    config = OptimizerConfig(weight_decay=0.3, lr_scale_of="*=0.5,head.*=2,block=0.1")
    groups = build_optimizer(tensors, config).param_groups
    found = {
        entry.name: (group["weight_decay"], group["lr_scale"])
        for group in groups
        for entry in tensors
        if any(entry.tensor is parameter for parameter in group["params"])
    }
    assert found == {
        "stem.weight": (0.3, 0.5),
        "stem.bias": (0.0, 0.5),
        "block.weight": (0.3, 0.1),
        "head.weight": (0.3, 2.0),
        "head.bias": (0.0, 2.0),
    }


@pytest.mark.parametrize(
    ("patterns", "named"),
    [("stem.*=0", r"stem\.\*"), ("*=0", "no parameter to train"), ("tail=2", "tail"), ("head=0,*=0.1", "head")],
)
def test_a_pattern_without_effect_is_refused(patterns: str, named: str) -> None:
    with pytest.raises(ValueError, match=f"--lr-scale-of.*{named}"):
        require_matches(OptimizerConfig(lr_scale_of=patterns), NAMES)
