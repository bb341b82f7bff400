"""The training loop as a whole: it learns, stops where it should, resumes exactly, and can be read in TensorBoard."""

from __future__ import annotations

import json
import math

import pytest
import torch
from spikingjelly.activation_based.model.spikformer import Spikformer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megasnn.checkpoint.load import load_global_tensors
from megasnn.config import OptimizerConfig
from megasnn.engine import model as distributed_model
from megasnn.losses.sums import correct_predictions
from megasnn.optim.rates import learning_rate
from tests.data.shard_files import write_shards
from tests.data.shard_server import serving
from tests.parity.spikingjelly_reference import from_spikingjelly
from tests.training.runs import train, whole

TP2_PP2 = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2")


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


def test_a_resumed_run_is_bit_for_bit_the_one_that_was_never_stopped(cache, tmp_path) -> None:
    straight = train(cache, "--train-iters", "5")
    train(cache, "--train-iters", "5", "--exit-interval", "3", "--save", str(tmp_path))
    resumed = train(cache, "--train-iters", "5", "--load", str(tmp_path))
    assert (resumed.iteration, resumed.consumed_samples) == (straight.iteration, straight.consumed_samples) == (5, 50)
    ours, theirs = whole([resumed]), whole([straight])
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_so_is_one_of_several_ranks(ranks, cache, tmp_path) -> None:
    layout = "--pipeline-model-parallel-size 2 --pipeline-schedule zbv --async-save".split()
    common = ("--train-iters", "4", "--save-interval", "2", *layout)
    straight = ranks(2, train, cache, *common, "--save", str(tmp_path / "straight"))
    ranks(2, train, cache, *common, "--exit-interval", "2", "--save", str(tmp_path / "run"))
    resumed = ranks(2, train, cache, *common, "--load", str(tmp_path / "run"), "--save", str(tmp_path / "run"))
    ours, theirs = whole(resumed), whole(straight)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    saved = [load_global_tensors(tmp_path / name, with_optimizer=True) for name in ("run", "straight")]
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[1])


def test_what_tensorboard_shows(ranks, cache, tmp_path) -> None:
    flags = ("--train-iters", "6", "--log-interval", "2", "--eval-interval", "4", "--tensorboard-dir", str(tmp_path))
    ranks(4, train, cache, *flags, *TP2_PP2)
    events = EventAccumulator(str(tmp_path)).Reload()
    scalars = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    cards = sorted(scalars)
    assert cards[:5] == [
        "1_training/1_loss", "1_training/2_accuracy", "1_training/3_samples_per_second", "1_training/4_grad_norm",
        "1_training/5_learning_rate",
    ]  # fmt: skip
    assert len(cards) <= 33
    assert [tag for tag, points in scalars.items() if all(point.value == 0 for point in points)] == []
    assert not any("data_mb" in card for card in cards), "there is one replica"
    assert [event.step for event in scalars["1_training/1_loss"]] == [2, 4, 6]
    assert [event.value for event in scalars["1_training/6_consumed_samples"]] == [20, 40, 60]
    assert {event.step for event in scalars["2_validation/1_loss"]} == {4, 6}
    for kind in ("peak", "predicted"):
        assert {f"5_memory/{kind}_mb_{what}" for what in ("largest", "mean")} <= scalars.keys()
    assert all(scalars[f"7_communication/{group}_mb"][-1].value > 0 for group in ("tp", "pp", "backward"))
    assert 0 < scalars["3_spikes/1_firing_rate"][-1].value < 1
    expected = learning_rate(OptimizerConfig(lr=1e-2), 5, 6)
    assert scalars["1_training/5_learning_rate"][-1].value == pytest.approx(expected, rel=1e-6)
    assert "configuration/text_summary" in events.Tags()["tensors"]
    assert events.PluginTagToContent("custom_scalars")
    assert [event.step for event in events.Images("samples")] == [0]


def test_secrets_in_urls_are_in_no_log(cache, tmp_path, capfd, monkeypatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    shards, run = tmp_path / "shards", tmp_path / "run"
    shards.mkdir()
    write_shards(shards, 12, 6)
    with serving(shards) as server:
        url = server.url("train-{00000..00001}.tar?key=SECRET").replace("//", "//me:SECRET@")
        folders = ("--save", str(run), "--tensorboard-dir", str(run / "events"))
        train(cache, "--train-iters", "1", "--data-path", url, "--valid-data-path", url, *folders)
    with_it = [path.name for path in run.rglob("*") if path.is_file() and b"SECRET" in path.read_bytes()]
    assert with_it == ["config.json"]
    told = "".join(capfd.readouterr())
    assert "SECRET" not in told and server.url("train-{00000..00001}.tar?...") in told


def test_what_the_json_log_holds(ranks, cache, tmp_path) -> None:
    flags = ("--train-iters", "4", "--log-interval", "2", "--save", str(tmp_path), "--eval-iters", "1")
    ranks(2, train, cache, *flags, "--pipeline-model-parallel-size", "2", "--pipeline-schedule", "zbv")
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    (start,) = [line for line in lines if line["kind"] == "start"]
    assert start["config"] == json.loads((tmp_path / "config.json").read_text()) and start["ranks"] == 2
    iterations = [line for line in lines if line["kind"] == "iteration"]
    assert [line["iteration"] for line in iterations] == [2, 4]
    last = iterations[-1]
    assert last["consumed_samples"] == 40 and last["global_batch_size"] == 10 and 0 <= last["accuracy"] <= 1
    assert last["communication/pp_mb"] > 0 and last["memory/peak_mb_mean"] > 100
    # Each of the stem's five neurons, and of a block's five, in the model's order although chunks are placed as a V.
    names = list(last["layers"])
    assert len(names) == 10 and names[0].startswith("patch_embed.stages.0") and names[-1].startswith("blocks.0.mlp.fc2")
    assert all(0 <= layer["firing_rate"] <= 1 for layer in last["layers"].values())
    assert [line["iteration"] for line in lines if line["kind"] == "validation"] == [4]


def test_the_accuracy_of_training_is_that_of_its_logits(ranks, cache, tmp_path, monkeypatch) -> None:
    """Counted apart on one rank, and the same on every layout."""
    common = ("--train-iters", "3", "--log-interval", "1", "--eval-iters", "0", "--precision", "fp64", "--lr", "3e-3")
    found, correct = [], []

    def counted(logits: torch.Tensor, labels: torch.Tensor, top: tuple[int, ...]) -> torch.Tensor:
        best = logits.detach().sum(0).max(1).indices.tolist()
        correct.append(sum(one == other for one, other in zip(best, labels.tolist(), strict=True)))
        return correct_predictions(logits, labels, top)

    monkeypatch.setattr(distributed_model, "correct_predictions", counted)
    for layout in ((), ("--pipeline-model-parallel-size", "2"), ("data",)):
        folder = tmp_path / f"run{len(found)}"
        flags = (*common, "--tensorboard-dir", str(folder), *(flag for flag in layout if flag != "data"))
        ranks(2, train, cache, *flags) if layout else train(cache, *flags)
        lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
        found.append([line["accuracy"] for line in lines if line["kind"] == "iteration"])
    assert found[0] == found[1] == found[2] and len(found[0]) == 3 and max(found[0]) > 0
    assert found[0] == [sum(correct[first : first + 3]) / 10 for first in (0, 3, 6)], "three micro-batches a step"


def test_the_loss_falls(cache, tmp_path) -> None:
    larger = "--image-size 16 --time-steps 4 --micro-batch-size 32 --global-batch-size 32".split()
    train(cache, *larger, "--train-iters", "60", "--log-interval", "10", "--tensorboard-dir", str(tmp_path))
    losses = [event.value for event in EventAccumulator(str(tmp_path)).Reload().Scalars("1_training/1_loss")]
    assert losses[0] < 1.2 * math.log(10) and losses[-1] < 0.85 * losses[0]


def test_a_run_is_the_same_with_empty_chunks(ranks, cache) -> None:
    """Loaders give images and labels to the ranks that have the first and the last chunk; evaluation counts there."""
    common, flags = ("--train-iters", "2", "--eval-interval", "1"), ("--pipeline-model-parallel-layout", "3|0|4|1")
    one = whole([train(cache, *common)])
    two = ranks(2, train, cache, *common, "--pipeline-model-parallel-size", "2", "--pipeline-schedule", "zbv", *flags)
    assert all(torch.equal(one[name], value) for name, value in whole(two).items())


def test_a_run_starts_from_spikingjellys_weights(ranks, cache, tmp_path) -> None:
    model = Spikformer(T=2, in_channels=1, img_size_h=8, img_size_w=8, patch_size=4, num_classes=10, embed_dims=32,
                       num_heads=4, mlp_ratio=2.0, depths=1)  # fmt: skip
    torch.save(model.state_dict(), tmp_path / "model.pt")
    flags = ("--train-iters", "1", "--load", str(tmp_path / "model.pt"))
    loaded = whole(ranks(4, _load_only, cache, *flags, *TP2_PP2))
    expected = from_spikingjelly(model.state_dict())
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_a_new_head_on_the_weights_of_another_run(ranks, cache, tmp_path) -> None:
    train(cache, "--train-iters", "2", "--save", str(tmp_path))
    finetune = ("--train-iters", "1", "--load", str(tmp_path), "--finetune")
    taken = whole(ranks(2, _load_only, cache, *finetune, "--tensor-model-parallel-size", "2"))
    classes = ("--num-classes", "11")
    with_new_head = whole(ranks(2, _load_only, cache, *finetune, *classes, "--tensor-model-parallel-size", "2"))
    fresh = whole([_load_only(cache, "--train-iters", "1", *classes)])
    assert with_new_head["head.weight"].shape != taken["head.weight"].shape
    for name in taken:
        assert torch.equal(with_new_head[name], (fresh if name.startswith("head.") else taken)[name]), name


def _load_only(cache: str, *flags: str):
    return train(cache, *flags, only_load=True)
