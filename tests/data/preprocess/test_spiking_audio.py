"""SHD and SSC: every spike of a published file is in one frame, and the test part is in no choice."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from numpy.typing import NDArray

from megasnn.common.files import read_array
from megasnn.data.arrays import ArrayFile, ArrayFormat
from megasnn.data.datasets import ShardDataset
from megasnn.data.preprocess.options import Shd
from megasnn.data.preprocess.spiking_audio import SpikeFrames, count_spikes
from megasnn.data.shards import open_shard, read_index
from tests.data.preprocess.test_sets import labels, refusal, run, shards
from tests.data.shard_files import write_shard

SPEAKERS = (0, 1, 2, 3)
NAMES = [b"zero", b"one", b"null", b"eins"]
Spikes = list[tuple[NDArray, NDArray]]


def spikes_of(samples: int, seed: int, dtype: str = "float16") -> Spikes:
    random = np.random.default_rng(seed)
    found = []
    for _ in range(samples):
        count = int(random.integers(200, 400))
        times = np.sort(random.uniform(0, 1.37, count)).astype(dtype)
        found.append((times, random.integers(0, 700, count).astype(np.uint16)))
    return found


def write_h5(
    path: Path, spikes: Spikes, numbers: Sequence[int], speakers: Sequence[int] = (), names: Sequence[bytes] = ()
) -> None:
    """A file of the published layout."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for name, column, kind in (("times", 0, spikes[0][0].dtype), ("units", 1, np.uint16)):
            ragged = file.create_dataset(f"spikes/{name}", (len(spikes),), h5py.vlen_dtype(kind))
            for row, each in enumerate(spikes):
                ragged[row] = each[column]
        file["labels"] = np.array(numbers, np.uint16)
        if speakers:
            file["extra/speaker"] = np.array(speakers, np.uint16)
            file["extra/meta_info/gender"] = np.array([b"f"] * 12)
        if names:
            file["extra/keys"] = np.array(names)


def shd(folder: Path, names: Sequence[bytes] = NAMES) -> Spikes:
    """Ten samples of each of four classes by four speakers, two of whom are in the test alone."""
    train = spikes_of(40, seed=1)
    numbers = [row % 4 for row in range(40)]
    write_h5(folder / "in" / "shd_train.h5", train, numbers, [SPEAKERS[row // 20] for row in range(40)], names)
    write_h5(folder / "in" / "shd_test.h5", spikes_of(8, seed=2), numbers[:8], [2, 3] * 4, names)
    return train


def frames_of(data: bytes) -> NDArray:
    """The array of a sample's files in a tar."""
    return read_array(data[data.index(b"\x93NUMPY") :])


def one_by_one(times: NDArray, units: NDArray, steps: int, duration: float, width: int) -> NDArray:
    """Counts as the definition says, spike by spike."""
    counts = np.zeros((steps, 700 // width), int)
    edges = np.array([step * (duration / steps) for step in range(steps)])
    for time, unit in zip(times, units, strict=True):
        frame = np.flatnonzero(edges <= float(time))[-1]
        counts[frame, int(unit) // width] += 1
    return counts


@pytest.mark.parametrize(("steps", "channels"), [(100, 700), (250, 700), (350, 140)])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_every_spike_is_in_one_frame(dtype: str, steps: int, channels: int) -> None:
    for times, units in spikes_of(3, seed=steps, dtype=dtype):
        counts = count_spikes(times, units, SpikeFrames(steps, channels=channels))
        assert counts.sum() == len(times)
        assert np.array_equal(counts, one_by_one(times, units, steps, 1.4, 700 // channels))


def test_a_frame_begins_at_its_edge_and_order_is_free() -> None:
    """0.25 and its neighbours in float16; a product in float16 would be 249 or infinite."""
    edge = np.float16(0.25)
    times = np.array([edge, np.nextafter(edge, np.float16(0)), 0, np.nextafter(np.float16(0.5), np.float16(0))], "f2")
    counts = count_spikes(times, np.array([699, 699, 0, 5], np.uint16), SpikeFrames(2, duration=0.5))
    assert counts.sum(1).tolist() == [2, 2] and counts[1, [5, 699]].tolist() == [1, 1]
    assert counts[0, [0, 699]].tolist() == [1, 1]
    # In float16 the duration would be the spike's time, which lies before it.
    last = np.array([1433 / 1024], "f2")
    assert count_spikes(last, np.array([7], np.uint16), SpikeFrames(10, duration=1.3995))[9, 7] == 1
    assert not count_spikes(np.empty(0, "f2"), np.empty(0, "u2"), SpikeFrames(3)).any()


def test_shd_becomes_shards(tmp_path) -> None:
    train = shd(tmp_path)
    found = shards(tmp_path, "shd", "--valid-share", 0)
    assert {split: len(each) for split, each in found.items()} == {"train": 40, "test": 8}
    assert read_index(tmp_path / "out").classes == ["zero", "one", "null", "eins"]
    for row, (times, units) in enumerate(train):
        label, data = found["train"][f"shd_train_{row:05d}"]
        assert label == row % 4
        frames = frames_of(data)
        assert frames.shape == (100, 700) and frames.dtype == np.uint8
        assert np.array_equal(frames, one_by_one(times, units, 100, 1.4, 1))


def test_training_reads_counts_as_floats_and_refuses_wider_whole_numbers(tmp_path) -> None:
    train = shd(tmp_path)
    shards(tmp_path, "shd", "--valid-share", 0)
    spikes = ArrayFile("spikes", "npy", (100, 700), "float")
    dataset = ShardDataset([open_shard(tmp_path / "out" / "train-00000.tar")], ArrayFormat((spikes,), ("spikes",)), 4)
    found = dataset.sample(7)["spikes"]
    assert found.dtype == np.float32 and np.array_equal(found, one_by_one(*train[7], 100, 1.4, 1))
    wide = tmp_path / "wide.tar"
    buffer = io.BytesIO()
    np.save(buffer, np.zeros((100, 700), np.int64))
    write_shard(wide, {"a": {"npy": buffer.getvalue(), "cls": b"0"}})
    with pytest.raises(ValueError, match="int64.*'spikes' is float"):
        ShardDataset([open_shard(wide)], dataset.format, 4).sample(0)


def test_the_validation_split_is_a_share_of_each_class_or_whole_speakers(tmp_path) -> None:
    shd(tmp_path)
    found = shards(tmp_path, "shd")
    assert sorted(labels(found["val"]).values()) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len(found["train"]) == 32 and not found["train"].keys() & found["val"].keys()
    rows = [int(key[-5:]) for key in found["val"]]
    assert min(rows) < 20 <= max(rows)  # of both speakers
    (tmp_path / "out").rename(tmp_path / "before")
    again = shards(tmp_path, "shd", "--valid-share", 0.2)
    assert again["val"].keys() == found["val"].keys()
    (tmp_path / "out").rename(tmp_path / "again")
    by_speaker = shards(tmp_path, "shd", "--valid-speakers", 1)
    assert sorted(by_speaker["val"]) == [f"shd_train_{row:05d}" for row in range(20, 40)]
    assert by_speaker["test"].keys() == found["test"].keys()


def test_ssc_has_its_own_validation_file_and_no_speakers(tmp_path) -> None:
    for name, samples in (("train", 6), ("valid", 4), ("test", 2)):
        write_h5(tmp_path / "in" / f"ssc_{name}.h5", spikes_of(samples, samples, "float32"), [1, 0] * (samples // 2))
    found = shards(tmp_path, "ssc", "--time-steps", 250, "--channels", 140)
    assert {split: len(each) for split, each in found.items()} == {"train": 6, "val": 4, "test": 2}
    assert read_index(tmp_path / "out").classes == ["0", "1"]
    label, data = found["val"]["ssc_valid_00001"]
    assert label == 0 and frames_of(data).shape == (250, 140)


def test_labels_stay_the_files_also_with_the_numbers_of_another_folder(tmp_path) -> None:
    shd(tmp_path)
    first = shards(tmp_path, "shd")
    (tmp_path / "out").rename(tmp_path / "before")
    again = shards(tmp_path, "shd", "--classes-of", tmp_path / "before")
    assert labels(again["train"]) == labels(first["train"])


def damaged(path: Path, name: str, value: object) -> None:
    with h5py.File(path, "a") as file:
        del file[name]
        if value is not None:
            file[name] = value


def late(path: Path) -> None:
    with h5py.File(path, "a") as file:
        file["spikes/times"][3] = np.array([0.1, 1.5], "f2")
        file["spikes/units"][3] = np.array([1, 2], "u2")


def unequal(path: Path) -> None:
    with h5py.File(path, "a") as file:
        file["spikes/units"][3] = np.array([1], "u2")


def outside(path: Path) -> None:
    with h5py.File(path, "a") as file:
        file["spikes/times"][3] = np.array([0.1], "f2")
        file["spikes/units"][3] = np.array([700], "u2")


def unknown_time(path: Path) -> None:
    with h5py.File(path, "a") as file:
        file["spikes/times"][3] = np.array([np.nan], "f2")
        file["spikes/units"][3] = np.array([1], "u2")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


BROKEN = {
    "late spike": (late, "shd_train.h5, sample 3: a spike at 1.5 s is outside 0 to 1.4 s; --duration"),
    "nan": (unknown_time, "a spike at nan s"),
    "unit 700": (outside, "units are 700 to 700, and should be 0 to 699"),
    "fewer units": (unequal, r"uint16 [1]"),
    "cut file": (cut, "shd_train.h5 cannot be read"),
    "no labels": (lambda path: damaged(path, "labels", None), "no data set labels"),
    "fewer labels": (lambda path: damaged(path, "labels", np.zeros(3, int)), "40 samples, and labels 3"),
    "labels of floats": (lambda path: damaged(path, "labels", np.zeros(40)), "labels must be whole numbers"),
    "negative label": (lambda path: damaged(path, "labels", np.full(40, -1)), "labels are -1 to -1"),
    "label without a name": (lambda path: damaged(path, "labels", np.full(40, 4)), "4 class names"),
    "other names": (lambda path: damaged(path, "extra/keys", np.array([b"a"] * 4)), "other class names"),
    "fewer speakers": (lambda path: damaged(path, "extra/speaker", np.zeros(3, int)), "extra/speaker has 3"),
    "times as whole numbers": (lambda path: damaged(path, "spikes/times", np.zeros((40, 2), int)), "must be seconds"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_with_a_file_is_named(tmp_path, capsys, name: str) -> None:
    shd(tmp_path)
    damage, named = BROKEN[name]
    damage(tmp_path / "in" / "shd_train.h5")
    assert named in refusal(tmp_path, capsys, "shd")


@pytest.mark.parametrize("kind", ["external link", "soft link", "external storage", "virtual"])
def test_data_of_another_file_are_not_read(tmp_path, capsys, kind: str) -> None:
    shd(tmp_path)
    secret = tmp_path / "secret"
    write_h5(secret, spikes_of(40, 5), [0] * 40)
    with h5py.File(tmp_path / "in" / "shd_train.h5", "a") as file:
        del file["labels"]
        if kind == "external link":
            file["labels"] = h5py.ExternalLink(secret, "/labels")
        elif kind == "soft link":
            file["elsewhere"] = h5py.ExternalLink(secret, "/labels")
            file["labels"] = h5py.SoftLink("/elsewhere")
        elif kind == "external storage":
            file.create_dataset("labels", (40,), np.uint8, external=[(str(secret), 0, 40)])
        else:
            layout = h5py.VirtualLayout((40,), np.uint16)
            layout[:] = h5py.VirtualSource(secret, "labels", (40,))
            file.create_virtual_dataset("labels", layout)
    said = refusal(tmp_path, capsys, "shd")
    assert "which is not followed" in said or "which is not read" in said


def test_splits_that_cannot_be_and_missing_files_are_named(tmp_path, capsys) -> None:
    shd(tmp_path)
    for flags, named in (
        (("--valid-speakers", 3), "--valid-speakers 3: the speakers of"),
        (("--valid-speakers", 0, 1), "no samples for the split 'train'"),
        (("--valid-share", 0.01), "no samples for the split 'val'"),
    ):
        assert named in refusal(tmp_path, capsys, "shd", *flags)
    packed = tmp_path / "in" / "shd_test.h5"
    packed.rename(tmp_path / "in" / "shd_test.h5.gz")
    assert "shd_test.h5 is missing, or no file; unpack shd_test.h5.gz" in refusal(tmp_path, capsys, "shd")
    assert "ssc_train.h5 is missing" in refusal(tmp_path, capsys, "ssc")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"valid_speakers": (0,), "valid_share": 0.1}, "leave one out"),
        ({"valid_share": 1.0}, "--valid-share must be"),
        ({"channels": 300}, "--channels must divide 700"),
        ({"duration": float("nan")}, "--duration must be"),
        ({"time_steps": 0}, "--time-steps must be"),
    ],
)
def test_flags_out_of_bounds_are_named(flags: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Shd(input=Path("in"), output=Path("out"), **flags)


def test_a_broken_sample_is_left_out_if_that_is_asked_for(tmp_path) -> None:
    shd(tmp_path)
    late(tmp_path / "in" / "shd_train.h5")
    found = shards(tmp_path, "shd", "--valid-share", 0, "--skip-broken")
    assert len(found["train"]) == 39 and "shd_train_00003" not in found["train"]


def test_without_h5py_it_is_named(tmp_path, monkeypatch, capsys) -> None:
    shd(tmp_path)
    monkeypatch.setitem(sys.modules, "h5py", None)
    assert run("shd", "--input", tmp_path / "in", "--output", tmp_path / "out") == 1
    assert "pip install megasnn[audio]" in capsys.readouterr().err
