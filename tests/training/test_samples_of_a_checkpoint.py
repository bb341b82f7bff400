"""An evaluation and fine-tuning make samples as the training of the checkpoint did, or say that they do not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megasnn.config import PretrainConfig
from megasnn.config.identity import samples
from megasnn.models.registry import MODELS
from megasnn.pretraining import configuration, pretrain
from tests.data.shard_files import image_file, write_shard

MODEL = (
    "--image-size 8 --in-channels 3 --num-classes 10 --patch-size 4 --embed-dim 32 --depth 1 --num-heads 4 "
    "--time-steps 2 --mlp-ratio 2 --v-threshold 0.1"
).split()
BATCHES = "--micro-batch-size 4 --global-batch-size 8 --num-workers 0".split()
WARNING = "WARNING: samples are made otherwise than those that the checkpoint was trained on: "


@pytest.fixture(scope="module")
def shard(tmp_path_factory) -> str:
    """Images in colour that are larger than the model's."""
    random = np.random.default_rng(5)
    pictures = {f"s{n}": random.integers(0, 256, (12, 12, 3), dtype=np.uint8) for n in range(24)}
    files = {
        key: {"png": image_file(each), "cls": str(n % 10).encode()} for n, (key, each) in enumerate(pictures.items())
    }
    return str(write_shard(tmp_path_factory.mktemp("shards") / "a.tar", files))


def run(log: Path, *flags: str) -> list[float]:
    """The losses that a run has found on what it evaluated."""
    assert pretrain("spikformer", [*BATCHES, "--tensorboard-dir", str(log), *flags]) == 0
    lines = map(json.loads, (log / "log.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "validation"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, shard) -> tuple[str, float]:
    """A run by `--augment cifar` with a part of each image cut off, and the loss that it found at its end."""
    folder = tmp_path_factory.mktemp("trained")  # the log lies beside the checkpoints
    flags = ["--data-path", shard, "--valid-data-path", shard, "--augment", "cifar", "--center-crop", "0.5"]
    (loss,) = run(folder, *MODEL, *flags, "--train-iters", "8", "--save", str(folder))
    return str(folder), loss


def read(*flags: str) -> PretrainConfig:
    return configuration(MODELS["spikformer"], [*BATCHES, *flags])


def test_an_evaluation_finds_what_the_training_found(trained, shard, tmp_path, capsys) -> None:
    """Whatever is said of the training data and of its augmentation, that has no part in an evaluation."""
    folder, loss = trained
    evaluate = ("--load", folder, "--evaluate-only", "--valid-data-path", shard)
    for number, flags in enumerate(
        ([], ["--augment", "cifar"], ["--data-path", shard], ["--normalize-images", "cifar10", "--center-crop", "0.5"])
    ):
        assert run(tmp_path / str(number), *evaluate, *flags) == [loss]
        assert WARNING not in capsys.readouterr().out
    (other,) = run(tmp_path / "other", *evaluate, "--normalize-images", "generic", "--center-crop", "1")
    told = "--normalize-images from cifar10 to generic, --center-crop from 0.5 to 1.0"
    assert other != loss and f"{WARNING}{told}\n" in capsys.readouterr().out


def test_an_evaluation_makes_the_frames_of_the_training(tmp_path) -> None:
    sizes = "--channels 4,P,8,P --image-size 16 --time-steps 3 --num-classes 10 --train-iters 1 --save".split()
    trained = ["--split-by", "time"]
    assert pretrain("vgg_dvs", [*BATCHES, *sizes, str(tmp_path), *trained, "--eval-iters", "0"]) == 0
    found = configuration(MODELS["vgg_dvs"], ["--load", str(tmp_path), "--evaluate-only"]).data
    assert found.split_by == "time"


def test_fine_tuning_takes_the_constants_and_says_it(trained, shard, tmp_path, capsys) -> None:
    start = ["--load", trained[0], "--finetune", "--data-path", shard, "--train-iters", "1"]
    found = read(*start)
    assert samples(found) == {"normalize_images": "cifar10", "center_crop": 1.0} and found.data.augment == "none"
    assert capsys.readouterr().out.rstrip().endswith(" --normalize-images cifar10")
    run(tmp_path / "as it was", *start)
    assert WARNING not in capsys.readouterr().out
    run(tmp_path / "otherwise", *start, "--normalize-images", "imagenet")
    assert f"{WARNING}--normalize-images from cifar10 to imagenet\n" in capsys.readouterr().out


def test_a_run_that_goes_on_takes_none(trained, shard) -> None:
    found = read("--load", trained[0], "--data-path", shard, "--train-iters", "40")
    assert samples(found)["normalize_images"] == "generic"
