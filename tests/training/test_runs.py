"""The training loop as a whole: what its logs hold, empty chunks, and weights of another run."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megasnn.config import OptimizerConfig
from megasnn.data.formats import encode_frames
from megasnn.models import task
from megasnn.models.losses import correct_predictions
from megasnn.optim.rates import learning_rate
from tests.data.shard_files import numbered, write_shard, write_shards
from tests.data.shard_server import serving
from tests.training.runs import log_of, train, train_vgg


@pytest.fixture(scope="module")
def logged(ranks, tmp_path_factory) -> Path:
    """The folder of a run on four ranks. Its samples have a bright square, whose place says the class."""
    random, samples = np.random.default_rng(0), {}
    for number in range(30):
        frames = random.poisson(0.2, (3, 2, 16, 16))
        frames[:, :, number % 10 : number % 10 + 4, 4:8] += 3
        samples[f"s{number}"] = {"frames.npz": encode_frames(frames), "cls": str(number % 10).encode()}
    folder = tmp_path_factory.mktemp("logged")
    shard = str(write_shard(folder / "a.tar", samples))
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --pipeline-schedule zbv".split()
    layout += ["--pipeline-model-parallel-layout", "1|1|0|2"]
    data = ("--data-path", shard, "--valid-data-path", shard, "--eval-interval", "4", "--eval-iters", "1")
    flags = ("--train-iters", "10", "--log-interval", "1", "--save", str(folder), "--tensorboard-dir", str(folder))
    ranks(4, train_vgg, *flags, *data, *layout)
    return folder


def test_what_tensorboard_shows(logged) -> None:
    events = EventAccumulator(str(logged), size_guidance={"images": 0}).Reload()
    scalars = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    cards = sorted(scalars)
    assert cards[:5] == [
        "1_training/1_loss", "1_training/2_accuracy", "1_training/3_samples_per_second", "1_training/4_grad_norm",
        "1_training/5_learning_rate",
    ]  # fmt: skip
    assert len(cards) <= 33
    assert [tag for tag, points in scalars.items() if all(point.value == 0 for point in points)] == []
    assert not any("data_mb" in card for card in cards), "there is one replica"
    assert [event.step for event in scalars["1_training/1_loss"]] == list(range(1, 11))
    assert [event.value for event in scalars["1_training/6_consumed_samples"]] == list(range(10, 101, 10))
    assert {event.step for event in scalars["2_validation/1_loss"]} == {4, 8, 10}
    for kind in ("peak", "predicted"):
        assert {f"5_memory/{kind}_mb_{what}" for what in ("largest", "mean")} <= scalars.keys()
    assert all(scalars[f"7_communication/{group}_mb"][-1].value > 0 for group in ("tp", "pp", "backward"))
    # Pooling comes after the transfer, so that one bit of 32 travels.
    sent, dense = (scalars[f"7_communication/pp_mb{form}"][-1].value for form in ("", "_if_dense"))
    assert 0 < sent <= dense / 30
    assert 0 < scalars["3_spikes/1_firing_rate"][-1].value < 1
    expected = learning_rate(OptimizerConfig(lr=1e-2), 9, 10)
    assert scalars["1_training/5_learning_rate"][-1].value == pytest.approx(expected, rel=1e-6)
    assert "configuration/text_summary" in events.Tags()["tensors"]
    assert events.PluginTagToContent("custom_scalars")
    assert [event.step for event in events.Images("samples")] == [0]
    rasters = events.Images("spikes/raster")
    assert [event.step for event in rasters] == [10]
    picture = np.asarray(Image.open(io.BytesIO(rasters[-1].encoded_image_string)))
    assert (picture == 0).all(axis=2).any() and (picture == 160).all(axis=2).any(), "spikes, and borders of samples"


def test_what_the_json_log_holds(logged) -> None:
    (start,) = log_of(logged, "start")
    assert start["config"] == json.loads((logged / "config.json").read_text()) and start["ranks"] == 4
    assert start["costs"].keys() >= {"features.0", "classifier"}
    assert all(cost["forward"] > 0 and cost["weight_gradient"] >= 0 for cost in start["costs"].values())
    iterations = log_of(logged, "iteration")
    assert [line["iteration"] for line in iterations] == list(range(1, 11))
    last = iterations[-1]
    assert last["consumed_samples"] == 100 and last["global_batch_size"] == 10 and 0 <= last["accuracy"] <= 1
    assert last["communication/pp_mb"] > 0 and last["memory/peak_mb_mean"] > 100
    traffic = [{name: value for name, value in line.items() if "comm" in name and "_mb" in name} for line in iterations]
    assert traffic[0] == traffic[1] and traffic[0], "the trial of the layers is no traffic of training"
    assert list(last["layers"]) == [f"features.{number}.neuron" for number in range(3)]  # the second on another rank
    assert all(0 <= layer["firing_rate"] <= 1 for layer in last["layers"].values())
    assert [line["iteration"] for line in log_of(logged, "validation")] == [4, 8, 10]
    (predicted,), (end,) = (log_of(logged, kind) for kind in ("memory_predicted", "memory"))
    assert len(predicted["mb"]) == 4 and all(each["messages"] > 0 for each in predicted["mb"])
    assert end["predicted_mb"] == [each["total"] for each in predicted["mb"]]


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


def test_the_accuracy_of_training_is_that_of_its_logits(cache, tmp_path, monkeypatch) -> None:
    flags = ("--train-iters", "3", "--log-interval", "1", "--eval-iters", "0", "--precision", "fp64", "--lr", "3e-3")
    correct = []

    def counted(logits: torch.Tensor, labels: torch.Tensor, top: tuple[int, ...]) -> torch.Tensor:
        best = logits.detach().sum(0).max(1).indices.tolist()
        correct.append(sum(one == other for one, other in zip(best, labels.tolist(), strict=True)))
        return correct_predictions(logits, labels, top)

    monkeypatch.setattr(task, "correct_predictions", counted)
    train(cache, *flags, "--tensorboard-dir", str(tmp_path))
    found = [line["accuracy"] for line in log_of(tmp_path, "iteration")]
    assert max(found) > 0
    assert found == [sum(correct[first : first + 3]) / 10 for first in (0, 3, 6)], "three micro-batches a step"


def test_a_run_is_the_same_with_empty_chunks(ranks, cache) -> None:
    """Loaders give images and labels to the ranks that have the first and the last chunk; evaluation counts there."""
    common, flags = ("--train-iters", "2", "--eval-interval", "1"), ("--pipeline-model-parallel-layout", "3|0|4|1")
    one = train(cache, *common).tensors
    two = ranks(2, train, cache, *common, "--pipeline-model-parallel-size", "2", "--recompute", "always", *flags)
    assert all(torch.equal(one[name], value) for name, value in two[0].tensors.items())


@pytest.mark.parametrize("layout", ["", "--pipeline-model-parallel-size 2", "--context-parallel-size 2"])
def test_an_evaluation_leaves_broken_samples_out(ranks, cache, tmp_path, layout) -> None:
    """It is that of the sound samples alone, on two replicas, two stages, and ranks that share samples."""
    broken = (1, 4, 10)
    (valid,) = write_shards(tmp_path, 11, 11, broken)
    samples = numbered(range(11))
    for number in broken:
        del samples[f"s{number:03d}"]
    sound = write_shard(tmp_path / "b.tar", samples)
    flags = ("--train-iters", "1", "--precision", "fp64", "--micro-batch-size", "2", "--skip-broken-samples")
    train(cache, *flags, "--valid-data-path", str(sound), "--tensorboard-dir", str(tmp_path / "sound"))
    given = ("--valid-data-path", str(valid), "--tensorboard-dir", str(tmp_path / "given"))
    ranks(2, train, cache, *flags, *given, *layout.split())
    (expected,), (found,) = (log_of(tmp_path / name, "validation") for name in ("sound", "given"))
    assert found["samples"] == expected["samples"] == 8 and found["skipped_samples"] == 3
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-9) and found["top1"] == expected["top1"]


def test_a_new_head_on_the_weights_of_another_run(ranks, cache, tmp_path) -> None:
    train(cache, "--train-iters", "2", "--save", str(tmp_path))
    classes, tensor = ("--num-classes", "11"), ("--tensor-model-parallel-size", "2")
    finetune = ("--train-iters", "1", "--load", str(tmp_path), "--finetune")
    taken = ranks(2, _load_only, cache, *finetune, *tensor)[0].tensors
    with_new_head = ranks(2, _load_only, cache, *finetune, *classes, *tensor)[0].tensors
    fresh = _load_only(cache, "--train-iters", "1", *classes).tensors
    assert with_new_head["head.weight"].shape != taken["head.weight"].shape
    for name in taken:
        assert torch.equal(with_new_head[name], (fresh if name.startswith("head.") else taken)[name]), name


def _load_only(cache: str, *flags: str):
    return train(cache, *flags, only_load=True)
