"""Formats: images and event samples as the model takes them; from options to data sets; the sample data."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch

from megasnn.config import DataConfig
from megasnn.data.datasets import sample_format
from megasnn.data.events import FrameOptions, Recording
from megasnn.data.formats import decode_events, encode_events, encode_frames
from megasnn.data.images import NORMALISATIONS, ImageFormat
from megasnn.data.preprocess import sample
from tests.data.shard_files import (
    as_events,
    as_frames,
    image_file,
    loader,
    open_datasets,
    recording,
    write_shard,
    write_shards,
)

noise = np.random.default_rng(0).integers(0, 256, size=(32, 32, 3), dtype=np.uint8)


@pytest.mark.parametrize(("kind", "channels"), [("JPEG", 1), ("PNG", 3), ("WEBP", 3), ("PPM", 1)])
def test_all_kinds_become_the_channels_of_the_model(kind, channels):
    grey = np.full((32, 32), 100, dtype=np.uint8)
    for pixels in (grey, np.stack([grey] * 3, axis=-1)):
        decoded = ImageFormat(32, channels).decode(image_file(pixels, kind))
        assert decoded.shape == (32, 32, channels)
        assert np.abs(decoded.astype(int) - 100).max() <= 1


def test_images_are_cut_in_the_middle_and_scaled():
    """0.8 of the shorter side of 40 x 60 is 32 pixels: those from 4 on, and from 14 on along the other side."""
    assert np.array_equal(ImageFormat(32, 3).decode(image_file(noise)), noise), "of the right size: not touched"
    wide = np.zeros((20, 60), dtype=np.uint8)
    wide[:, 20:40] = 200
    assert (ImageFormat(10, 1).decode(image_file(wide))[:, 1:-1] == 200).all()
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    assert np.array_equal(ImageFormat(32, 3, center=0.8).decode(image_file(pixels)), pixels[4:36, 14:46])
    square = image_file(pixels[:32, :32])
    assert np.array_equal(ImageFormat(16, 3, center=0.5).decode(square), pixels[8:24, 8:24])
    ramp = np.tile(np.arange(256, dtype=np.uint8)[:, None], (1, 256))
    small = ImageFormat(32, 1).decode(image_file(ramp, "JPEG"))[..., 0].astype(int)
    assert np.abs(small - (np.arange(32)[:, None] * 8 + 4)).max() <= 3, "a JPEG is decoded at an eighth of its size"


def test_normalisation_is_mean_and_deviation_of_the_unit_range_and_no_bits_are_lost():
    with pytest.raises(ValueError, match="more than 8 bits"):
        ImageFormat(8, 1).decode(image_file(np.full((8, 8), 40_000, dtype=np.uint16)))
    with pytest.raises(ValueError, match="--in-channels"):
        ImageFormat(32, 2)
    batch = noise[None]
    expected = (batch / 255 - [0.4914, 0.4822, 0.4465]) / [0.2470, 0.2435, 0.2616]
    tensor = torch.from_numpy(ImageFormat(32, 3, "cifar10").batch(list(batch)))
    assert np.allclose(tensor.permute(0, 2, 3, 1), expected, atol=1e-5)
    black_and_white = np.array([0, 255], np.uint8).reshape(1, 2, 1)
    assert ImageFormat(2, 1).batch([black_and_white]).flatten().tolist() == [-2, 2]


def test_events_and_counts_come_back_as_they_were() -> None:
    for sensor in ((12, 16), (300, 400)):
        before = recording(1, sensor=sensor)
        after = decode_events(encode_events(before))
        assert isinstance(after, Recording) and after.sensor == sensor
        assert np.array_equal(after.events.t, before.events.t - before.events.t[0])
        for name in "xyp":
            assert np.array_equal(getattr(after.events, name), getattr(before.events, name))
    frames = np.random.default_rng(0).integers(0, 5, (3, 2, 4, 4)).astype(np.int32)
    for largest, dtype in ((255, np.uint8), (256, np.uint16), (70_000, np.uint32)):
        frames[1, 0, 2, 3] = largest
        after = decode_events(encode_frames(frames))
        assert isinstance(after, np.ndarray) and after.dtype == dtype and np.array_equal(after, frames)


@pytest.mark.parametrize("settings", [FrameOptions(5, "time", size=8), FrameOptions(5)])
def test_kept_events_and_finished_frames_are_the_same_to_the_model(tmp_path, settings: FrameOptions) -> None:
    events = write_shard(tmp_path / "events.tar", as_events(range(4), sensor=(16, 16)))
    frames = write_shard(tmp_path / "frames.tar", as_frames(range(4), settings, sensor=(16, 16)))
    shape = (5, 2, settings.size or 16, settings.size or 16)
    chosen = DataConfig(data_path=str(events), split_by=settings.split_by)
    kept = open_datasets(chosen, shape, 3).train
    finished = open_datasets(DataConfig(data_path=str(frames)), shape, 3).train
    batches = [
        next(loader(dataset, global_batch_size=4, micro_batch_size=4).batches()).micro_batches[0].inputs
        for dataset in (kept, finished)
    ]
    assert torch.equal(*batches) and batches[0].sum() > 0
    assert batches[0].shape == (4, *shape) and batches[0].dtype == torch.float32


def test_samples_of_another_length_or_shape_are_refused(tmp_path) -> None:
    shard = write_shard(tmp_path / "a.tar", as_frames(range(3), FrameOptions(5)))
    with pytest.raises(ValueError, match=f"--split-by: shard {shard} holds finished frames"):
        open_datasets(DataConfig(data_path=str(shard), split_by="time"), (5, 2, 12, 12), 3)
    mixed = as_frames(range(3), FrameOptions(5)) | {"odd": as_frames(range(1), FrameOptions(6))["r0"]}
    dataset = open_datasets(DataConfig(data_path=str(write_shard(tmp_path / "b.tar", mixed))), (5, 2, 12, 12), 3).train
    for skip_broken_samples in (False, True):
        batches = loader(dataset, shuffle=False, global_batch_size=4, skip_broken_samples=skip_broken_samples).batches()
        with pytest.raises(ValueError, match="'odd'.*has 6 frames.*--time-steps 5"):
            next(batches)


@pytest.mark.parametrize(
    ("flags", "shape", "problem"),
    [
        ({}, (1, 8, 6), "8 x 6"),
        ({}, (3, 8), r"\[3, 8\]"),
        ({}, (4, 3, 32, 32), "3 x 32 x 32; set --in-channels to 2"),
        ({"augment": "cifar"}, (4, 2, 32, 32), "--augment cifar .*none, dvs, nda"),
        ({"augment": "dvs"}, (3, 32, 32), "--augment dvs"),
        ({"split_by": "time"}, (3, 32, 32), "--split-by"),
        ({"rand_augment": "rand-m9-inc1"}, (1, 16, 16), "--rand-augment.*--in-channels 3"),
        ({"normalize_images": "cifar10"}, (1, 16, 16), "--normalize-images"),
        ({"random_erasing": 0.25}, (3, 2, 16, 16), "--random-erasing"),
        ({"mixup_alpha": 0.2}, (3, 2, 16, 16), "--mixup-alpha"),
    ],
)
def test_options_that_do_not_go_with_the_model(flags, shape, problem):
    with pytest.raises(ValueError, match=problem):
        sample_format(DataConfig(**flags), shape)


def test_training_and_validation_paths_kinds_and_constants(tmp_path):
    write_shards(tmp_path, samples=6, per_shard=3)
    both = DataConfig(data_path=f"{tmp_path}/train-{{00000..00001}}.tar", valid_data_path=f"{tmp_path}/train-00001.tar")
    datasets = open_datasets(both, input_shape=(1, 8, 8), num_classes=3)
    assert (len(datasets.train), len(datasets.valid)) == (6, 3)
    alone = DataConfig(data_path=f"{tmp_path}/train-00000.tar")
    assert open_datasets(alone, (1, 8, 8), 3).valid is None
    with pytest.raises(ValueError, match="--valid-data-path"):
        open_datasets(DataConfig(valid_data_path=f"{tmp_path}/none.tar"), (1, 8, 8), 3)
    events = DataConfig(data_path=str(write_shard(tmp_path / "a.tar", as_events(range(3)))))
    with pytest.raises(ValueError, match="events.npz.*images.*--event-frames"):
        open_datasets(events, (3, 32, 32), 3)
    names = {"generic": {}, "cifar10": {"augment": "cifar"}, "imagenet": {"augment": "crop"}}
    for name, flags in (*names.items(), ("cifar10", {"augment": "crop", "normalize_images": "cifar10"})):
        format = open_datasets(DataConfig(data_path=alone.data_path, **flags), (3, 16, 16), 3).train.format
        assert format.normalisation == name in NORMALISATIONS


def test_the_sample_is_the_digits(cache, monkeypatch):
    scans, labels = sample.read_digits()
    datasets = open_datasets(DataConfig(), input_shape=(1, 8, 8), num_classes=10)
    assert (len(datasets.train), len(datasets.valid)) == (1442, 355)
    seen = set()
    for dataset in (datasets.train, datasets.valid):
        assert np.bincount(dataset.labels).min() >= len(dataset) // 10 - 4
        for index in range(0, len(dataset), 7):
            number = int(dataset.key(index).removeprefix("digit_"))
            seen.add(number)
            assert dataset.labels[index] == labels[number]
            assert np.array_equal(np.rint(dataset.sample(index)[..., 0] * (16 / 255)), scans[number])
    assert len(seen) == 206 + 51
    first = [shard.read_bytes() for shard in sample.shards_of_sample(events=False)]
    monkeypatch.setenv("MEGASNN_CACHE", str(cache / "again"))
    assert [shard.read_bytes() for shard in sample.shards_of_sample(events=False)] == first


def test_the_sample_is_also_recorded_by_a_simulated_camera(monkeypatch) -> None:
    samples = sample.digit_samples
    monkeypatch.setattr(sample, "digit_samples", lambda *which: islice(samples(*which), 20))
    datasets = open_datasets(DataConfig(), (6, 2, 32, 32), 10)
    assert datasets.valid is not None and (len(datasets.train), len(datasets.valid)) == (20, 20)
    batch = next(loader(datasets.train, global_batch_size=20, micro_batch_size=20).batches()).micro_batches[0]
    assert batch.inputs.shape == (20, 6, 2, 32, 32)
    assert (batch.inputs.sum((2, 3, 4)) > 20).all(), "every frame has events"
    numbers = [int(datasets.train.key(index).removeprefix("digit_")) for index in batch.sample_ids.tolist()]
    assert batch.targets.tolist() == sample.read_digits()[1][numbers].tolist()
