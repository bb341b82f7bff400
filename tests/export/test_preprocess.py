"""Inputs from files for a trained model: the bits of the evaluation of its run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megasnn import Engine, TrainedModel, load_model
from megasnn.config import DataConfig
from megasnn.data import BatchShare
from megasnn.data.events import Events, FrameOptions, Recording, SensorSize, make_frames
from megasnn.data.formats import encode_events, encode_frames
from megasnn.data.loader import BatchLoader
from tests.data.shard_files import image_file, open_datasets, write_shard
from tests.engine.test_engine import MODEL
from tests.training.runs import train, train_vgg

IMAGES = 3
RANDOM = np.random.default_rng(0)
PICTURES = [image_file(RANDOM.integers(0, 256, (20, 26, 3), np.uint8), "JPEG") for _ in range(IMAGES)]


def recording(events: int) -> Recording:
    t = np.sort(RANDOM.integers(0, 9000, events))
    x, y = RANDOM.integers(0, 24, (2, events))
    return Recording(Events.make(t, x, y, RANDOM.integers(0, 2, events)), SensorSize(24, 24))


def evaluated(config: DataConfig, shape: tuple[int, ...]) -> torch.Tensor:
    """All samples as an evaluation reads them."""
    dataset = open_datasets(config, shape, 10).train
    (batch,) = BatchLoader(dataset, BatchShare(IMAGES, IMAGES), config, seed=0, training=False).batches()
    (micro,) = batch.micro_batches
    return micro.inputs


def test_images_become_what_an_evaluation_reads(tmp_path: Path) -> None:
    samples = {f"s{n}": {"jpg": content, "cls": b"1"} for n, content in enumerate(PICTURES)}
    shard = str(write_shard(tmp_path / "a.tar", samples))
    flags = f"--data-path {shard} --center-crop 0.8 --normalize-images imagenet --in-channels 3".split()
    train(str(tmp_path), *flags, "--train-iters", "1", "--eval-iters", "0", "--save", str(tmp_path / "run"))
    files = [tmp_path / f"s{n}.jpg" for n in range(IMAGES)]
    for file, content in zip(files, PICTURES, strict=True):
        file.write_bytes(content)

    model = load_model(tmp_path / "run")
    found = model.preprocess(*files)
    config = DataConfig(data_path=shard, center_crop=0.8, normalize_images="imagenet", num_workers=0)
    assert torch.equal(found, evaluated(config, (3, 8, 8)))
    assert model.double().preprocess(files[0]).dtype == torch.float64
    model.save_pretrained(tmp_path / "folder")
    again = TrainedModel.from_pretrained(tmp_path / "folder")
    assert torch.equal(again(again.preprocess(str(files[1]))), load_model(tmp_path / "run")(found[1:2]))

    cut = tmp_path / "cut.jpg"
    cut.write_bytes(PICTURES[0][:200])
    with pytest.raises(ValueError, match=r"cut.jpg cannot be decoded"):
        model.preprocess(cut)
    with pytest.raises(FileNotFoundError):
        model.preprocess(tmp_path / "absent.jpg")
    with pytest.raises(ValueError, match="takes images, not recordings"):
        model.preprocess(recording(9))


def test_recordings_become_the_frames_of_an_evaluation(tmp_path: Path) -> None:
    recordings = [recording(200 + n) for n in range(IMAGES)]
    samples = {f"s{n}": {"events.npz": encode_events(each), "cls": b"1"} for n, each in enumerate(recordings)}
    shard = str(write_shard(tmp_path / "a.tar", samples))
    flags = ["--data-path", shard, "--split-by", "time"]
    train_vgg(*flags, "--train-iters", "1", "--save", str(tmp_path / "run"))
    files = [tmp_path / f"s{n}.npz" for n in range(IMAGES)]
    for file, each in zip(files, recordings, strict=True):
        file.write_bytes(encode_events(each))
    frames = tmp_path / "s0.frames.npz"
    frames.write_bytes(encode_frames(make_frames(recordings[0], FrameOptions(3, "time"))))

    model = load_model(tmp_path / "run")
    expected = evaluated(DataConfig(data_path=shard, split_by="time", num_workers=0), (3, 2, 16, 16))
    assert torch.equal(model.preprocess(*files), expected)
    assert torch.equal(model.preprocess(recordings[1], frames), expected[[1, 0]])
    with pytest.raises(ValueError, match="one file or more"):
        model.preprocess()


def test_inputs_that_did_not_come_from_files_are_refused(tmp_path: Path) -> None:
    with Engine(MODEL, micro_batch_size=2, global_batch_size=2, train_iters=1, lr=1e-2) as engine:
        engine.save(tmp_path / "engine")
    with pytest.raises(ValueError, match="does not say how its inputs are made from files"):
        load_model(tmp_path / "engine").preprocess(tmp_path / "a.jpg")
