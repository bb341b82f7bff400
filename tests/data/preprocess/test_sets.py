"""Data sets in their own folders become shards; what is missing or damaged is named."""

from __future__ import annotations

import io
import json
import os
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megasnn.commands import preprocess_data
from megasnn.data.events import Events, FrameOptions, Recording, SensorSize, make_frames
from megasnn.data.formats import decode_events
from megasnn.data.shards import read_index
from tests.data.events import files
from tests.data.events.files import equal, random_events


def run(*arguments: object) -> int:
    return preprocess_data.main([*map(str, arguments), "--workers", "1"])


def shards(folder: Path, data_set: str, *flags: object) -> dict[str, dict[str, tuple[int, bytes]]]:
    """Label and data of each sample by split and key, of a data set in `folder`/in."""
    assert run(data_set, "--input", folder / "in", "--output", folder / "out", *flags) == 0
    found = {}
    for record in read_index(folder / "out").shards:
        data, members = (folder / "out" / record.file).read_bytes(), record.members
        places = zip(members.offsets, members.sizes, strict=True)
        samples = zip(members.labels, (data[start : start + size] for start, size in places), strict=True)
        found[record.split] = dict(zip(members.keys, samples, strict=True))
    return found


def refusal(folder: Path, capsys: pytest.CaptureFixture[str], data_set: str, *flags: object) -> str:
    """What is said of a data set in `folder`/in that cannot be used; nothing is left of it."""
    assert run(data_set, "--input", folder / "in", "--output", folder / "out", *flags) == 1
    assert not (folder / "out").exists() and not (folder / "out.partial").exists()
    return capsys.readouterr().err


def labels(samples: dict[str, tuple[int, bytes]]) -> dict[str, int]:
    return {key: label for key, (label, _) in samples.items()}


def recording(seed: int, side: int = 128) -> Events:
    return random_events(300, side, side, seed)


def put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def dvs128(events: Events) -> bytes:
    return files.aedat2(files.dvs128_address(events), events.t)


def gestures(folder: Path) -> None:
    """Two recordings for training and one for testing, each with three clips; what comes later belongs to none."""
    for number, (name, split) in enumerate([("user01_led", "train"), ("user02_lab", "train"), ("user24_led", "test")]):
        put(folder / f"{name}.aedat", files.aedat3([files.aedat3_packet(recording(number))]))
        lines = ["class,startTime_usec,endTime_usec", "2,0,1000", "1,1000,3000", f"{9 + number},3000,4000", ""]
        (folder / f"{name}_labels.csv").write_text("\n".join(lines))
        with open(folder / f"trials_to_{split}.txt", "a") as trials:
            trials.write(f"{name}.aedat\n")


def image(path: Path, size: tuple[int, int] = (8, 8)) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (len(str(path)) % 256, 30, 40)).save(path)
    return path.read_bytes()


def test_cifar10_dvs(tmp_path) -> None:
    """The first 90 % in numeric order train: file 9 of 0..9, not the one that sorts last as text. x and y are
    SpikingJelly's, which are a DVS128's y and x; elsewhere they are upright."""
    for label, name in enumerate(("airplane", "bird")):
        for number in range(20):
            path = tmp_path / "in" / name / f"cifar10_{name}_{number}.aedat"
            put(path, dvs128(recording(100 * label + number)))
    found = shards(tmp_path, "cifar10-dvs", "--time-steps", 4, "--size", 48)
    numbers = [("airplane", 0, 18), ("airplane", 0, 19), ("bird", 1, 18), ("bird", 1, 19)]
    assert labels(found["test"]) == {f"{name}_cifar10_{name}_{number}": label for name, label, number in numbers}
    assert len(found["train"]) == 36
    expected = make_frames(Recording(recording(107), SensorSize(128, 128)), FrameOptions(4, size=48))
    transposed = decode_events(found["train"]["bird_cifar10_bird_7"][1])
    np.testing.assert_allclose(transposed.swapaxes(2, 3), expected, rtol=1e-6)
    (tmp_path / "out").rename(tmp_path / "before")
    found = shards(tmp_path, "event-folder", "--time-steps", 4, "--size", 48)
    assert np.array_equal(decode_events(found["train"]["bird_cifar10_bird_7"][1]), expected)
    assert read_index(tmp_path / "out").classes == ["airplane", "bird"]


def test_n_mnist_keeps_every_event(tmp_path) -> None:
    for split, digit, number in product(("Train", "Test"), range(3), range(4)):
        path = tmp_path / "in" / split / str(digit) / f"{split[:2]}{number:05d}.bin"
        put(path, files.atis(recording(10 * digit + number, 34)))
    found = shards(tmp_path, "n-mnist", "--keep-events")
    assert sorted(labels(found["train"]).values()) == [0] * 4 + [1] * 4 + [2] * 4 and len(found["test"]) == 12
    kept, events = decode_events(found["train"]["2_Tr00003"][1]), recording(23, 34)
    assert kept.sensor == (34, 34)
    assert equal(kept.events, Events(events.t - events.t[0], events.x, events.y, events.p))


def test_dvs128_gesture_is_cut_into_clips(tmp_path) -> None:
    gestures(tmp_path / "in")
    found = shards(tmp_path, "dvs128-gesture", "--keep-events")
    assert labels(found["test"]) == {
        "right_hand_wave_user24_led_00": 1,
        "hand_clapping_user24_led_01": 0,
        "other_gestures_user24_led_02": 10,
    }
    assert len(found["train"]) == 6 and len(read_index(tmp_path / "out").classes) == 11
    clip = decode_events(found["train"]["hand_clapping_user02_lab_01"][1]).events
    events = recording(1).between(1000, 3000)
    assert equal(clip, Events(events.t - events.t[0], events.x, events.y, events.p))


@pytest.mark.parametrize(("data_set", "side"), [("n-mnist", 34), ("dvs128-gesture", 128)])
def test_files_as_spikingjelly_writes_them(tmp_path, data_set, side) -> None:
    """np.savez(t=, x=, y=, p=) in class folders, without a size of the sensor; and other sensors by a flag."""
    for split in ("train", "test"):
        for label in range(2):
            events = recording(label, side)
            path = tmp_path / "in" / split / str(label) / "a.npz"
            path.parent.mkdir(parents=True)
            np.savez(path, t=events.t, x=events.x, y=events.y, p=events.p)
    (tmp_path / "in" / "train" / "0" / "._a.npz").write_bytes(b"left by macOS")
    found = shards(tmp_path, data_set, "--keep-events")
    assert decode_events(found["test"]["1_a"][1]).sensor == (side, side)
    assert run("event-folder", "--input", tmp_path / "in", "--output", tmp_path / "none") == 1
    sizes = ("--sensor-size", 130, 140)
    (tmp_path / "out").rename(tmp_path / "before")
    found = shards(tmp_path, "event-folder", *sizes, "--time-steps", 3)
    assert decode_events(found["test"]["1_a"][1]).shape == (3, 2, 130, 140)


def test_times_of_another_unit(tmp_path, capsys) -> None:
    """Structured arrays with times in milliseconds, as floats."""
    events = recording(3)
    array = np.empty(len(events), [("x", "<u2"), ("y", "<u2"), ("t", "<f8"), ("p", "?")])
    for name in "xyp":
        array[name] = getattr(events, name)
    array["t"] = events.t / 1000
    for split in ("train", "test"):
        path = tmp_path / "in" / split / "cat" / "a.npy"
        path.parent.mkdir(parents=True)
        np.save(path, array)
    assert "--time-unit s, ms, us or ns" in refusal(tmp_path, capsys, "dvs128-gesture")
    found = shards(tmp_path, "dvs128-gesture", "--time-unit", "ms", "--keep-events")
    kept = decode_events(found["test"]["cat_a"][1]).events
    assert equal(kept, Events(events.t - events.t[0], events.x, events.y, events.p))
    put(path.with_suffix(".bin"), files.atis(recording(1, 34)))
    (tmp_path / "out").rename(tmp_path / "before")
    assert "--time-unit is for .npz and .npy files" in refusal(tmp_path, capsys, "dvs128-gesture", "--time-unit", "ms")


def test_image_folders(tmp_path) -> None:
    """As ImageNet has them: files are taken over as they are; hidden ones are none; folders have any name."""
    expected, tmp_path = {}, tmp_path / os.fsdecode(b"caf\xe9")
    for split, count in (("train", 3), ("val", 2)):
        for label, name in enumerate(("2", "10")):
            for number in range(count):
                data = image(tmp_path / "in" / split / name / f"n.{number}.png")
                expected[split, f"{name}_n_{number}"] = label, data
    for name in ("._n.1.png", ".DS_Store", "readme.txt"):
        put(tmp_path / "in" / "train" / "2" / name, b"no image")
    (tmp_path / "in" / "train" / ".cache").mkdir()
    found = shards(tmp_path, "image-folder")
    assert {(split, key): value for split, samples in found.items() for key, value in samples.items()} == expected
    assert read_index(tmp_path / "out").classes == ["2", "10"]


def test_tiny_imagenet(tmp_path) -> None:
    """`train/<wnid>/images`, and one folder for validation, with the classes in a text file."""
    for wnid in ("n02", "n01"):
        for number in range(2):
            image(tmp_path / "in" / "train" / wnid / "images" / f"{wnid}_{number}.JPEG")
        put(tmp_path / "in" / "train" / wnid / f"{wnid}_boxes.txt", b"n01_0.JPEG\t0\t0\t62\t62\n")
    data = image(tmp_path / "in" / "val" / "images" / "val_0.JPEG")
    put(tmp_path / "in" / "val" / "val_annotations.txt", b"val_0.JPEG\tn02\t0\t32\t44\t62\n")
    found = shards(tmp_path, "tiny-imagenet")
    assert labels(found["train"]) == {"n01_0": 0, "n01_1": 0, "n02_0": 1, "n02_1": 1}
    assert found["val"] == {"n02_val_0": (1, data)}


@pytest.mark.parametrize(("classes", "labels"), [(10, 1), (100, 2)])
def test_cifar(tmp_path, capsys, classes, labels) -> None:
    """The binary version, as it is published; the one of pickles is refused."""
    folder, names = ("cifar-10-batches-bin", "batches.meta.txt") if classes == 10 else (
        "cifar-100-binary", "fine_label_names.txt")  # fmt: skip
    rows = np.random.default_rng(0).integers(0, 256, (6, labels + 3072)).astype(np.uint8)
    rows[:, labels - 1] = [3, 0, 9, 3, 1, 2]
    train = [f"data_batch_{number}.bin" for number in range(1, 6)] if classes == 10 else ["train.bin"]
    for file in (*train, "test_batch.bin" if classes == 10 else "test.bin"):
        put(tmp_path / "in" / folder / file, rows.tobytes())
    put(tmp_path / "in" / folder / names, "".join(f"c{label}\n" for label in range(classes)).encode() + b"\n")
    found = shards(tmp_path, f"cifar{classes}")
    assert len(found["train"]) == 6 * len(train) and len(found["test"]) == 6
    label, png = found["test"]["test_c9_0_00002"]
    assert label == 9
    assert np.array_equal(
        np.asarray(Image.open(io.BytesIO(png))), rows[2, labels:].reshape(3, 32, 32).transpose(1, 2, 0)
    )
    assert read_index(tmp_path / "out").classes[9] == "c9"
    (tmp_path / "out").rename(tmp_path / "before")
    put(tmp_path / "in" / folder / train[0], rows.tobytes()[:-1])
    assert train[0] in refusal(tmp_path, capsys, f"cifar{classes}")
    (tmp_path / "in" / folder / names).unlink()
    assert names in refusal(tmp_path, capsys, f"cifar{classes}")


@pytest.mark.parametrize(
    ("lines", "named"), [("1,2", "1,2"), ("1,9000000,9000001", "9000000"), ("", "trials_to_test.txt")]
)
def test_what_is_missing_in_dvs128_gesture(tmp_path, capsys, lines, named) -> None:
    gestures(tmp_path / "in")
    if lines:
        (tmp_path / "in" / "user02_lab_labels.csv").write_text(f"h\n{lines}\n")
    else:
        (tmp_path / "in" / "trials_to_test.txt").unlink()
    assert named in refusal(tmp_path, capsys, "dvs128-gesture")


@pytest.mark.parametrize(
    ("data_set", "paths", "named"),
    [
        ("cifar10-dvs", ["cat/1.aedat"], "'cat'"),
        ("n-mnist", ["Train/0/a.bin", "Train/1/a.bin", "Test/0/a.bin"], "Test/1"),
        ("image-folder", [os.fsdecode(b"cat/caf\xe9.png")], "UTF-8"),
        ("tiny-imagenet", ["train/n01/images/1.jpg"], "val_annotations.txt"),
        ("cifar10", ["cifar-10-batches-py/data_batch_1"], "cifar-10-batches-bin"),
        ("cifar100", ["cifar-100-python/train"], "cifar-100-binary"),
    ],
)
def test_what_is_missing_or_cannot_be_used_is_named(tmp_path, capsys, data_set, paths, named) -> None:
    (tmp_path / "in").mkdir()
    for path in paths:
        put(tmp_path / "in" / path, b"nothing")
    assert named in refusal(tmp_path, capsys, data_set)


@pytest.mark.parametrize(
    "flags", [["--keep-events", "--size", "48"], ["--time-steps", "0"], ["--sensor-size", "0", "34"]]
)
def test_flags_that_cannot_be_meant(tmp_path, capsys, flags) -> None:
    with pytest.raises(SystemExit) as status:
        preprocess_data.main(["n-mnist", "--input", str(tmp_path), "--output", str(tmp_path / "out"), *flags])
    problem = capsys.readouterr().err
    assert status.value.code == 2
    assert flags[0] in problem and (len(flags) == 3 or flags[1] in problem)


def test_a_sample_beyond_the_bound_is_broken(tmp_path, capsys) -> None:
    image(tmp_path / "in" / "cat" / "1.png", (600, 600))
    image(tmp_path / "in" / "cat" / "2.png")
    problem = refusal(tmp_path, capsys, "image-folder", "--max-sample-mb", 1)
    assert "600" in problem and "--skip-broken" in problem
    os.mkfifo(tmp_path / "in" / "cat" / "3.png")
    found = shards(tmp_path, "image-folder", "--max-sample-mb", 1, "--skip-broken")
    assert list(found["train"]) == ["cat_2"]
    reasons = sorted(reason for shard in read_index(tmp_path / "out").shards for reason in shard.broken)
    assert "1.png" in reasons[0] and "--max-sample-mb" in reasons[0] and "3.png" in reasons[1]
    assert "2 broken samples" in capsys.readouterr().out and json.loads((tmp_path / "out" / "index.json").read_text())
