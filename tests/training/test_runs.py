"""The training loop as a whole: it learns, stops where it should, resumes exactly, and can be read in TensorBoard."""

from __future__ import annotations

import math

import pytest
import torch
from spikingjelly.activation_based.model.spikformer import Spikformer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megasnn.checkpoint import from_spikingjelly, load_global_tensors
from megasnn.config import OptimizerConfig
from megasnn.optim import learning_rate
from tests.training.runs import train, whole

TP2_PP2 = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2")


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(((a[n].double() - b[n].double()).norm() / b[n].double().norm().clamp_min(1e-30)).item() for n in a)


def test_a_resumed_run_is_bit_for_bit_the_one_that_was_never_stopped(cache, tmp_path) -> None:
    straight = train(cache, "--train-iters", "5")
    train(cache, "--train-iters", "5", "--exit-interval", "3", "--save", str(tmp_path))
    resumed = train(cache, "--train-iters", "5", "--load", str(tmp_path), "--exit-on-missing-checkpoint")
    assert (resumed.iteration, resumed.consumed_samples) == (straight.iteration, straight.consumed_samples) == (5, 50)
    ours, theirs = whole([resumed]), whole([straight])
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    "layout",
    [
        "--async-save",
        "--tensor-model-parallel-size 2",
        "--pipeline-model-parallel-size 2 --pipeline-schedule zbv",
    ],
)
def test_so_is_one_of_several_ranks(ranks, cache, tmp_path, layout) -> None:
    common = ("--train-iters", "4", "--save-interval", "2", *layout.split())
    straight = ranks(2, train, cache, *common, "--save", str(tmp_path / "straight"))
    ranks(2, train, cache, *common, "--exit-interval", "2", "--save", str(tmp_path / "run"))
    resumed = ranks(2, train, cache, *common, "--load", str(tmp_path / "run"), "--save", str(tmp_path / "run"))
    ours, theirs = whole(resumed), whole(straight)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    saved = [load_global_tensors(tmp_path / name, with_optimizer=True) for name in ("run", "straight")]
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[1])


def test_a_run_goes_on_where_it_was_on_any_layout(ranks, cache, tmp_path) -> None:
    straight = train(cache, "--train-iters", "5", "--precision", "fp64")
    common = ("--train-iters", "5", "--precision", "fp64")
    ranks(4, train, cache, *common, "--exit-interval", "2", "--save", str(tmp_path / "a"), *TP2_PP2)
    # Two replicas now, and on from there on three stages.
    first = (*common, "--load", str(tmp_path / "a"), "--save", str(tmp_path / "b"), "--exit-interval", "4")
    ranks(2, train, cache, *first)
    last = ranks(3, train, cache, *common, "--load", str(tmp_path / "b"), "--pipeline-model-parallel-size", "3")
    assert {outcome.iteration for outcome in last} == {5}
    assert difference(whole(last), whole([straight])) < 1e-9


def test_what_tensorboard_shows(ranks, cache, tmp_path) -> None:
    flags = ("--train-iters", "6", "--log-interval", "2", "--eval-interval", "4", "--tensorboard-dir", str(tmp_path))
    ranks(4, train, cache, *flags, *TP2_PP2, "--log-pictures-interval", "3")
    events = EventAccumulator(str(tmp_path)).Reload()
    scalars = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    assert [event.step for event in scalars["loss/train"]] == [2, 4, 6]
    assert [event.step for event in scalars["loss/train vs samples"]] == [20, 40, 60]
    assert [event.step for event in scalars["accuracy/top1"]] == [4, 6]
    assert {f"memory/peak_mb/rank{rank}" for rank in range(4)} <= scalars.keys()
    assert all(scalars[f"communication/{group}_mb"][-1].value > 0 for group in ("tensor", "pipeline", "backward"))
    rates = {tag: events[-1].value for tag, events in scalars.items() if tag.startswith("spikes/firing_rate/")}
    # Each of the stem's five neurons, and of a block's five, once; not those "vs samples".
    assert len([tag for tag in rates if not tag.endswith("samples")]) == 10
    assert all(0 <= rate <= 1 for rate in rates.values()) and max(rates.values()) > 0
    expected = learning_rate(OptimizerConfig(lr=1e-2), 5, 6)
    assert scalars["learning_rate"][-1].value == pytest.approx(expected, rel=1e-6)
    assert "configuration/text_summary" in events.Tags()["tensors"]
    assert [event.step for event in events.Images("samples")] == [0]
    assert [event.step for event in events.Images("spikes/raster")] == [3, 6]


def test_the_loss_falls(cache, tmp_path) -> None:
    larger = "--image-size 16 --time-steps 4 --micro-batch-size 32 --global-batch-size 32".split()
    train(cache, *larger, "--train-iters", "120", "--log-interval", "20", "--tensorboard-dir", str(tmp_path))
    losses = [event.value for event in EventAccumulator(str(tmp_path)).Reload().Scalars("loss/train")]
    assert losses[0] < 1.2 * math.log(10) and losses[-1] < 0.8 * losses[0]


def test_samples_and_minutes_end_a_run(cache) -> None:
    assert train(cache, "--train-samples", "39").iteration == 3
    assert train(cache, "--train-iters", "500", "--exit-duration-in-mins", "0.0001").iteration == 1


@pytest.mark.parametrize(
    "flags",
    [
        ("--pipeline-schedule", "zbv", "--pipeline-model-parallel-layout", "3|0|4|1"),
        ("--pipeline-schedule", "interleaved", "--num-virtual-stages-per-pipeline-rank", "3"),
        ("--pipeline-schedule", "v-min", "--pipeline-memory-limit", "2"),
        ("--pipeline-memory-limit", "1"),
    ],
)
def test_a_run_is_the_same_with_any_schedule(ranks, cache, flags) -> None:
    """Loaders give images and labels to the ranks that have the first and the last chunk; evaluation counts there."""
    common = ("--train-iters", "2", "--eval-interval", "1")
    one = whole([train(cache, *common)])
    two = whole(ranks(2, train, cache, *common, "--pipeline-model-parallel-size", "2", *flags))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_bfloat16_agrees_between_pipeline_sizes(ranks, cache) -> None:
    flags = ("--train-iters", "3", "--precision", "bf16")
    one = whole([train(cache, *flags)])
    assert one["head.weight"].dtype == torch.float32
    two = whole(ranks(2, train, cache, *flags, "--pipeline-model-parallel-size", "2"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_run_starts_from_spikingjellys_weights(ranks, cache, tmp_path) -> None:
    model = Spikformer(T=2, in_channels=1, img_size_h=8, img_size_w=8, patch_size=4, num_classes=10, embed_dims=32,
                       num_heads=4, mlp_ratio=2.0, depths=1)  # fmt: skip
    torch.save(model.state_dict(), tmp_path / "model.pt")
    flags = ("--train-iters", "1", "--load-spikingjelly", str(tmp_path / "model.pt"))
    loaded = whole(ranks(4, _load_only, cache, *flags, *TP2_PP2))
    expected = from_spikingjelly(model.state_dict())
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_a_new_head_on_the_weights_of_another_run(ranks, cache, tmp_path) -> None:
    train(cache, "--train-iters", "2", "--save", str(tmp_path))
    finetune = ("--train-iters", "1", "--load", str(tmp_path), "--finetune")
    taken = whole(ranks(2, _load_only, cache, *finetune, "--tensor-model-parallel-size", "2"))
    with_new_head = whole(ranks(2, _load_only, cache, *finetune, "--reset-head", "--tensor-model-parallel-size", "2"))
    fresh = whole([_load_only(cache, "--train-iters", "1")])
    assert not torch.equal(taken["head.weight"], fresh["head.weight"])
    for name in taken:
        assert torch.equal(with_new_head[name], (fresh if name.startswith("head.") else taken)[name]), name


def _load_only(cache: str, *flags: str):
    return train(cache, *flags, only_load=True)
