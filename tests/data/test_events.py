"""Event samples: finished frames and kept recordings, decoded as the model takes them."""

from __future__ import annotations

import io
import zipfile
from itertools import islice, product

import numpy as np
import pytest
import torch

from megasnn.config import DataConfig
from megasnn.data.event_files import decode_sample, encode_events, encode_frames
from megasnn.data.event_frames import EventFormat
from megasnn.events import Events, FrameOptions, Recording, SensorSize, make_frames
from megasnn.files import read_arrays
from tests.data.shard_files import loader, open_datasets, write_shard


def recording(seed: int, events: int = 500, sensor: tuple[int, int] = (12, 16), duration: int = 10_000) -> Recording:
    random = np.random.default_rng(seed)
    t = np.sort(random.integers(0, duration, events)) + 77
    places = [random.integers(0, side, events) for side in (sensor[1], sensor[0], 2)]
    return Recording(Events.make(t, *places), SensorSize(*sensor))


def as_events(numbers: range, **changes) -> dict[str, dict[str, bytes]]:
    return {
        f"r{number}": {"events.npz": encode_events(recording(number, **changes)), "cls": str(number % 3).encode()}
        for number in numbers
    }


def as_frames(numbers: range, settings: FrameOptions, **changes) -> dict[str, dict[str, bytes]]:
    return {
        f"r{number}": {
            "frames.npz": encode_frames(make_frames(recording(number, **changes), settings)),
            "cls": str(number % 3).encode(),
        }
        for number in numbers
    }


def test_events_come_back_as_they_were() -> None:
    for sensor in ((12, 16), (300, 400)):
        before = recording(1, sensor=sensor)
        after = decode_sample(encode_events(before))
        assert isinstance(after, Recording) and after.sensor == sensor
        assert np.array_equal(after.events.t, before.events.t - before.events.t[0])
        for name in "xyp":
            assert np.array_equal(getattr(after.events, name), getattr(before.events, name))


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_arrays_come_back_as_numpy_reads_them(version: tuple[int, int]) -> None:
    random = np.random.default_rng(0)
    shapes = [(), (5,), (0, 3), (2, 3), (3, 2), (2, 3)]  # the last one has a header that was parsed before
    for shape, dtype, order in product(shapes, (np.uint8, ">i4", np.float32), ("C", "F")):
        before = np.array(random.integers(0, 200, shape), dtype, order=order)
        npy, npz = io.BytesIO(), io.BytesIO()
        np.lib.format.write_array(npy, before, version)
        with zipfile.ZipFile(npz, "w") as archive:
            archive.writestr("values.npy", npy.getvalue())
        after = read_arrays(npz.getvalue())["values"]
        assert after.dtype == before.dtype and after.shape == before.shape
        assert np.array_equal(after, before)


@pytest.mark.parametrize("largest, dtype", [(255, np.uint8), (256, np.uint16), (70_000, np.uint32)])
def test_counts_take_the_smallest_type_that_holds_them(largest: int, dtype: type) -> None:
    frames = np.random.default_rng(0).integers(0, 5, (3, 2, 4, 4)).astype(np.int32)
    frames[1, 0, 2, 3] = largest
    after = decode_sample(encode_frames(frames))
    assert isinstance(after, np.ndarray) and after.dtype == dtype
    assert np.array_equal(after, frames)


@pytest.mark.parametrize(
    "settings",
    [
        FrameOptions(5),
        FrameOptions(5, "time", size=8),
    ],
)
def test_kept_events_and_finished_frames_are_the_same_to_the_model(tmp_path, settings: FrameOptions) -> None:
    events = write_shard(tmp_path / "events.tar", as_events(range(4), sensor=(16, 16)))
    frames = write_shard(tmp_path / "frames.tar", as_frames(range(4), settings, sensor=(16, 16)))
    shape = (5, 2, settings.size or 16, settings.size or 16)
    chosen = DataConfig(
        data_path=str(events),
        split_by=settings.split_by,
    )
    kept = open_datasets(chosen, shape, 3).train
    finished = open_datasets(DataConfig(data_path=str(frames)), shape, 3).train
    batches = [
        next(loader(dataset, global_batch_size=4, micro_batch_size=4).batches()).micro_batches[0].images
        for dataset in (kept, finished)
    ]
    assert torch.equal(*batches)
    assert batches[0].shape == (4, *shape) and batches[0].dtype == torch.float32
    assert batches[0].sum() > 0


def test_frames_of_a_fixed_duration_are_cut_and_filled_up() -> None:
    whole = recording(3)
    assert make_frames(whole, FrameOptions(20, frame_duration=1000)).sum() == 500
    filled = make_frames(whole, FrameOptions(20, frame_duration=1000))
    assert filled[:10].sum() == 500 and not filled[10:].any()
    cut = make_frames(whole, FrameOptions(4, frame_duration=1000))
    assert np.array_equal(cut, filled[:4])


def test_frames_of_the_right_size_stay_counts() -> None:
    whole = recording(0, sensor=(16, 16))
    frames = make_frames(whole, FrameOptions(4, size=16))
    assert frames.dtype == np.int32 and np.array_equal(frames, make_frames(whole, FrameOptions(4)))


def test_frames_are_scaled_to_the_model() -> None:
    frames = make_frames(recording(0, sensor=(16, 16)), FrameOptions(4))
    scaled = EventFormat(FrameOptions(4, size=8)).decode(encode_frames(frames))
    assert scaled.shape == (4, 2, 8, 8)
    assert np.allclose(scaled.mean(), frames.mean(), rtol=0.05)


def test_another_number_of_time_steps_is_refused_with_the_flag(tmp_path) -> None:
    shard = write_shard(tmp_path / "a.tar", as_frames(range(3), FrameOptions(5)))
    with pytest.raises(ValueError, match=rf"{shard} .*5 frames.*--time-steps 8"):
        open_datasets(DataConfig(data_path=str(shard)), (8, 2, 12, 12), 3)
    mixed = as_frames(range(3), FrameOptions(5)) | {"odd": as_frames(range(1), FrameOptions(6))["r0"]}
    dataset = open_datasets(DataConfig(data_path=str(write_shard(tmp_path / "b.tar", mixed))), (5, 2, 12, 12), 3).train
    for skip_broken in (False, True):
        batches = loader(dataset, shuffle=False, global_batch_size=4, skip_broken=skip_broken).batches()
        with pytest.raises(ValueError, match="'odd'.*has 6 frames.*--time-steps 5"):
            next(batches)


def test_a_model_is_not_given_another_kind_of_samples(tmp_path) -> None:
    events = DataConfig(data_path=str(write_shard(tmp_path / "a.tar", as_events(range(3)))))
    with pytest.raises(ValueError, match="events.npz.*images.*--event-frames"):
        open_datasets(events, (3, 32, 32), 3)
    with pytest.raises(ValueError, match="--augment cifar is not for event frames.*none, dvs, nda, roll"):
        open_datasets(DataConfig(augment="cifar"), (4, 2, 32, 32), 10)
    with pytest.raises(ValueError, match="--augment dvs is not for images"):
        open_datasets(DataConfig(augment="dvs"), (3, 32, 32), 10)
    with pytest.raises(ValueError, match="--split-by: the model takes images"):
        open_datasets(DataConfig(split_by="time"), (3, 32, 32), 10)
    with pytest.raises(ValueError, match="3 x 32 x 32; set --in-channels to 2"):
        open_datasets(DataConfig(), (4, 3, 32, 32), 10)


def test_options_of_frames_that_are_finished_are_refused(tmp_path) -> None:
    shard = write_shard(tmp_path / "a.tar", as_frames(range(3), FrameOptions(5)))
    with pytest.raises(ValueError, match=f"--split-by: shard {shard} holds finished frames"):
        open_datasets(DataConfig(data_path=str(shard), split_by="time"), (5, 2, 12, 12), 3)


@pytest.mark.parametrize("damage", [lambda data: data[:100], lambda data: b"", lambda data: b"PK\3\4" + data[:40]])
def test_damaged_samples_are_broken_samples(tmp_path, damage) -> None:
    samples = as_events(range(6))
    samples["r2"]["events.npz"] = damage(samples["r2"]["events.npz"])
    data = DataConfig(data_path=str(write_shard(tmp_path / "a.tar", samples)))
    dataset = open_datasets(data, (5, 2, 12, 12), 3).train
    with pytest.raises(ValueError, match="'r2'.*--skip-broken-samples"):
        next(loader(dataset, shuffle=False).batches())
    batch = next(loader(dataset, shuffle=False, skip_broken=True).batches())
    assert [len(part.skipped) for part in batch.micro_batches] == [1, 0, 1, 0]


def test_the_sample_is_also_recorded_by_a_simulated_camera(monkeypatch) -> None:
    from megasnn.preprocess import sample

    samples = sample.digit_samples
    monkeypatch.setattr(sample, "digit_samples", lambda *which: islice(samples(*which), 20))
    datasets = open_datasets(DataConfig(), (6, 2, 32, 32), 10)
    assert datasets.valid is not None and (len(datasets.train), len(datasets.valid)) == (20, 20)
    batch = next(loader(datasets.train, global_batch_size=20, micro_batch_size=20).batches()).micro_batches[0]
    assert batch.images.shape == (20, 6, 2, 32, 32)
    assert (batch.images.sum((2, 3, 4)) > 20).all(), "every frame has events"
    assert batch.labels.tolist() == [
        sample.read_digits()[1][int(datasets.train.key(index).removeprefix("digit_"))]
        for index in batch.sample_ids.tolist()
    ]
