"""CIFAR10-DVS, N-MNIST and DVS128 Gesture in their own folders: splits, classes, clips, contents."""

from __future__ import annotations

import json
import os
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest

from megasnn.commands import preprocess_data
from megasnn.data.event_files import EVENTS, FRAMES, decode_sample
from megasnn.data.shards import open_shard
from megasnn.events import Events, FrameOptions, SensorSize, events_to_frames, resize_frames
from megasnn.preprocess.folders import items_of_list
from tests.preprocess.recordings import cifar10_dvs, dvs128_gesture, five_bytes, n_mnist, random_events


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MEGASNN_CACHE", str(tmp_path / "cache"))


def preprocess(*arguments: object) -> None:
    assert preprocess_data.main([*map(str, arguments), "--workers", "1"]) == 0


def contents(shard: Path) -> dict[str, tuple[int, object]]:
    """Label and decoded data of each sample by key, in the order of the shard."""
    opened = open_shard(shard, (FRAMES, EVENTS))
    data = shard.read_bytes()
    places = zip(opened.offsets.tolist(), opened.sizes.tolist(), strict=True)
    decoded = [decode_sample(data[start : start + size]) for start, size in places]
    keys = [key.decode() for key in opened.keys.tolist()]
    return dict(zip(keys, zip(opened.labels.tolist(), decoded, strict=True), strict=True))


def test_cifar10_dvs(tmp_path) -> None:
    """The first 90 % in numeric order train: file 9 of 0..9, not the one that sorts last as text."""
    cifar10_dvs(tmp_path / "in", each=20)
    preprocess("cifar10-dvs", "--input", tmp_path / "in", "--output", tmp_path / "out", "--time-steps", 4, "--size", 48)
    train, test = (contents(tmp_path / "out" / f"{split}-00000.tar") for split in ("train", "test"))
    assert {key: label for key, (label, _) in test.items()} == {
        "airplane_cifar10_airplane_18": 0,
        "airplane_cifar10_airplane_19": 0,
        "bird_cifar10_bird_18": 1,
        "bird_cifar10_bird_19": 1,
    }
    assert len(train) == 36 and list(train) != sorted(train), "the order is shuffled"
    events = Events.make(*random_events(107))
    expected = resize_frames(events_to_frames(events, SensorSize(128, 128), FrameOptions(4)), 48)
    assert np.array_equal(train["bird_cifar10_bird_7"][1], expected)
    assert json.loads((tmp_path / "out" / "index.json").read_text())["classes"] == ["airplane", "bird"]


def test_a_class_list_sets_the_numbers_and_leaves_classes_out(tmp_path) -> None:
    cifar10_dvs(tmp_path / "in", ("airplane", "bird", "cat"))
    (tmp_path / "classes.txt").write_text("cat\nairplane\n")
    flags = ("--class-list", tmp_path / "classes.txt", "--train-share", 0.5, "--keep-events")
    preprocess("cifar10-dvs", "--input", tmp_path / "in", "--output", tmp_path / "out", *flags)
    train = contents(tmp_path / "out" / "train-00000.tar")
    assert {(key.split("_")[0], label) for key, (label, _) in train.items()} == {("cat", 0), ("airplane", 1)}
    assert len(train) == 10


def test_n_mnist_keeps_every_event(tmp_path) -> None:
    n_mnist(tmp_path / "in")
    preprocess("n-mnist", "--input", tmp_path / "in", "--output", tmp_path / "out", "--keep-events", "--no-shuffle")
    train = contents(tmp_path / "out" / "train-00000.tar")
    assert [label for label, _ in train.values()] == [0] * 4 + [1] * 4 + [2] * 4
    recording = train["2_Tr00003"][1]
    t, x, y, p = random_events(23, side=34)
    assert recording.sensor == (34, 34)
    found = (recording.events.t, recording.events.x, recording.events.y, recording.events.p)
    assert all(np.array_equal(a, b) for a, b in zip(found, (t - t[0], x, y, p), strict=True))
    assert len(contents(tmp_path / "out" / "test-00000.tar")) == 12


def test_events_out_of_order_are_refused_or_sorted(tmp_path, capsys) -> None:
    n_mnist(tmp_path / "in")
    path = tmp_path / "in" / "Train" / "1" / "Tr00002.bin"
    swapped = random_events(12, side=34)[:, [*range(1, 300), 0]]
    path.write_bytes(five_bytes(swapped))
    arguments = ["n-mnist", "--input", tmp_path / "in", "--output", tmp_path / "out", "--keep-events"]
    assert preprocess_data.main([*map(str, arguments), "--workers", "1"]) != 0
    told = capsys.readouterr().err
    assert str(path) in told and "time runs backwards at event 299" in told and "--sort-events" in told
    arguments[4] = tmp_path / "sorted"
    preprocess(*arguments, "--sort-events")
    train = contents(tmp_path / "sorted" / "train-00000.tar")
    assert np.array_equal(train["1_Tr00002"][1].events.x, random_events(12, side=34)[1])


def test_lists_of_a_flat_folder(tmp_path) -> None:
    n_mnist(tmp_path / "in")
    flat = tmp_path / "flat"
    flat.mkdir()
    for number, path in enumerate(sorted((tmp_path / "in" / "Train").rglob("*.bin")), 1):
        path.rename(flat / f"{number}.bs2")
    (tmp_path / "train.txt").write_text("#sample #class\n1 0\n12\t2\n5 1\n")
    (tmp_path / "test.txt").write_text("2 0\n")
    lists = ("--train-list", tmp_path / "train.txt", "--test-list", tmp_path / "test.txt")
    preprocess("n-mnist", "--input", flat, "--output", tmp_path / "out", "--time-steps", 2, *lists)
    labels = {key: label for key, (label, _) in contents(tmp_path / "out" / "train-00000.tar").items()}
    assert labels == {"1": 0, "12": 2, "5": 1}
    _, frames = contents(tmp_path / "out" / "train-00000.tar")["5"]
    assert frames.dtype == np.uint8 and frames.shape == (2, 2, 34, 34) and frames.sum() == 300


@pytest.mark.parametrize("label, message", [("9" * 11, "has more than 6 digits"), ("\u00b2", "not a name and a class")])
def test_a_class_number_in_a_list_that_makes_no_sense(tmp_path, label, message) -> None:
    """Every class up to the largest is listed: the first took all memory. The other is a digit and no number."""
    (tmp_path / "a.bin").write_bytes(b"")
    (tmp_path / "train.txt").write_text(f"a 0\na {label}\n")
    with pytest.raises(ValueError, match=f"train.txt, line 2.*{message}"):
        items_of_list(tmp_path / "train.txt", tmp_path, (".bin",))


def test_dvs128_gesture_is_cut_into_clips(tmp_path) -> None:
    dvs128_gesture(tmp_path / "in" / "DvsGesture")
    preprocess("dvs128-gesture", "--input", tmp_path / "in", "--output", tmp_path / "out", "--keep-events")
    train, test = (contents(tmp_path / "out" / f"{split}-00000.tar") for split in ("train", "test"))
    assert {key: label for key, (label, _) in test.items()} == {
        "user24_led_00_right_hand_wave": 1,
        "user24_led_01_hand_clapping": 0,
        "user24_led_02_other_gestures": 10,
    }
    assert len(train) == 6
    t, x, _, _ = random_events(1, 900, start=5000)
    clip = train["user02_lab_01_hand_clapping"][1].events
    inside = (30_000 <= t) & (t < 60_000)
    assert np.array_equal(clip.x, x[inside]) and np.array_equal(clip.t, t[inside] - t[inside][0])


def test_a_recording_is_read_once_for_its_clips(tmp_path, monkeypatch) -> None:
    import megasnn.preprocess.event_sets as event_sets

    reads = []
    read = event_sets.read_recording
    monkeypatch.setattr(event_sets, "read_recording", lambda path, **more: reads.append(path) or read(path, **more))
    event_sets._read.cache_clear()
    dvs128_gesture(tmp_path / "in")
    preprocess("dvs128-gesture", "--input", tmp_path / "in", "--output", tmp_path / "out", "--time-steps", 2)
    assert len(reads) == len(set(reads)) == 3


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda folder: (folder / "trials_to_test.txt").unlink(), "trials_to_test.txt does not exist"),
        (lambda folder: (folder / "user02_lab.aedat").unlink(), "user02_lab.aedat does not exist, and .*to_train.txt"),
        (lambda folder: (folder / "user02_lab_labels.csv").unlink(), "user02_lab_labels.csv does not exist"),
        (lambda folder: (folder / "user02_lab_labels.csv").write_text("h\n1,2\n"), "labels.csv, line 2.*is not class"),
        (lambda folder: (folder / "user02_lab_labels.csv").write_text("h\n12,2,3\n"), "labels.csv, line 2: no class"),
        (lambda folder: (folder / "user02_lab_labels.csv").write_text("h\n1,3,3\n"), "line 2: no class .* 3 to 3 us"),
    ],
)
def test_what_is_missing_in_dvs128_gesture(tmp_path, capsys, damage, message) -> None:
    damage(dvs128_gesture(tmp_path / "in"))
    refused(tmp_path, capsys, message, "dvs128-gesture")


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda folder: [path.unlink() for path in (folder / "bird").iterdir()], "class 'bird' is empty: .*in/bird"),
        (lambda folder: (folder / "empty").mkdir(), "class 'empty' is empty"),
        (
            lambda folder: [path.unlink() for path in (folder / "bird").iterdir() if "_0" not in path.name],
            "1 recordings",
        ),
    ],
)
def test_what_is_missing_in_cifar10_dvs(tmp_path, capsys, damage, message) -> None:
    damage(cifar10_dvs(tmp_path / "in"))
    refused(tmp_path, capsys, message, "cifar10-dvs")


def test_splits_of_n_mnist_have_the_same_classes(tmp_path, capsys) -> None:
    """A digit that one of them lacks would shift the numbers of those behind it."""
    n_mnist(tmp_path / "in")
    (tmp_path / "in" / "Test" / "1").rename(tmp_path / "elsewhere")
    refused(tmp_path, capsys, "folder .*Test/1 of class '1' does not exist", "n-mnist")
    (tmp_path / "in" / "Train" / "1").rename(tmp_path / "in" / "Test" / "1")
    refused(tmp_path, capsys, "Test has folders that .*Train does not have: 1", "n-mnist")


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--keep-events", "--size", "48", "--time-steps", "5"], "--keep-events .* --time-steps 5, --size 48"),
        (["--split-by", "time", "--frame-duration", "5"], "exclude each other"),
        (["--time-steps", "0"], "--time-steps must be at least 1, got 0"),
        (["--size", "0"], "--size must be at least 1, got 0"),
        (["--frame-duration", "0"], "--frame-duration must be at least 1, got 0"),
        (["--keep-events", "--size", "0"], "--keep-events makes no frames: leave out --size 0"),
        (["--workers", "0"], "--workers must be at least 1"),
        (["--samples-per-shard", "0"], "--samples-per-shard must be at least 1"),
        (["--train-share", "1"], "leaves a split empty"),
        (["--class-list", "nowhere.txt"], "nowhere.txt does not exist"),
        (["--input", "nowhere"], "--input nowhere is no folder"),
    ],
)
def test_options_that_cannot_be_meant(tmp_path, capsys, flags, message) -> None:
    cifar10_dvs(tmp_path / "in")
    refused(tmp_path, capsys, message, "cifar10-dvs", *flags)


@pytest.mark.parametrize(
    "line, message",
    [("3", "line 1: '3' is not a name"), ("3 x", "line 1"), ("99 0", "line 1: there is no file 99")],
)
def test_lists_that_cannot_be_used(tmp_path, capsys, line, message) -> None:
    n_mnist(tmp_path / "in")
    (tmp_path / "train.txt").write_text(line)
    refused(tmp_path, capsys, message, "n-mnist", "--train-list", str(tmp_path / "train.txt"))
    refused(tmp_path, capsys, "no such.txt does not exist", "n-mnist", "--train-list", "no such.txt")
    refused(tmp_path, capsys, "needs --train-list", "n-mnist", "--test-list", str(tmp_path / "train.txt"))


def refused(tmp_path: Path, capsys, message: str, dataset: str, *flags: str) -> None:
    """Status 1, the message on stderr, and nothing written."""
    argv = [dataset, "--input", str(tmp_path / "in"), "--output", str(tmp_path / "out"), "--workers", "1", *flags]
    assert preprocess_data.main(argv) == 1
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert not (tmp_path / "out").exists()


def test_an_unknown_data_set(capsys) -> None:
    with pytest.raises(SystemExit):
        preprocess_data.main(["cifar11", "--output", "x"])
    assert "cifar10-dvs" in "".join(capsys.readouterr())


REAL = os.environ.get("MEGASNN_DATA")


@pytest.mark.skipif(not REAL, reason="MEGASNN_DATA does not name the folder of real data")
def test_real_n_mnist(tmp_path) -> None:
    folder = Path(str(REAL)) / "nmnist_small"
    with tarfile.open(next(folder.glob("*.tar.xz"))) as archive:
        archive.extractall(tmp_path / "in", filter="data")
    inside = next((tmp_path / "in").rglob("1.bs2")).parent
    lists = ("--train-list", folder / "train1K.txt", "--test-list", folder / "test100.txt")
    preprocess("n-mnist", "--input", inside, "--output", tmp_path / "out", *lists)
    for split, count in (("train", 1000), ("test", 100)):
        shards = sorted((tmp_path / "out").glob(f"{split}-*.tar"))
        found = {key: value for shard in shards for key, value in contents(shard).items()}
        assert len(found) == count
        assert all(frames.shape == (10, 2, 34, 34) for _, frames in found.values())
        total = sum(int(frames.sum()) for _, frames in found.values())
        assert total == sum((inside / f"{key}.bs2").stat().st_size // 5 for key in found)
