"""Events in NumPy's arrays as other programs name them and lay them out; what could be two things is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megasnn.data.events import Events, RecordingError, read_recording
from tests.data.events import files
from tests.data.events.files import equal, random_events, write

SMALL = random_events(40, 34, 34, longest_gap=9)
NAMES = "txyp"
SIZE = {"height": 34, "width": 34}

# Types of the events of tonic 1.7.0, OpenEB 5.1.1, faery 0.7.1 and event_stream 1.6.3, dv's readers of AEDAT 4,
# N-ImageNet's files and evio 0.1.0.
STRUCTURED = {
    "tonic": [("x", "<i2"), ("y", "<i2"), ("t", "<i8"), ("p", "?")],
    "Prophesee": {"names": ["x", "y", "p", "t"], "formats": ["<u2", "<u2", "<i2", "<i8"], "itemsize": 16},
    "faery": [("t", "<u8"), ("x", "<u2"), ("y", "<u2"), ("on", "?")],
    "dv": [("timestamp", "<i8"), ("x", "<i2"), ("y", "<i2"), ("polarity", "i1"), ("_p1", "<i2")],
    "N-ImageNet": [("x", "<u2"), ("y", "<u2"), ("t", "<u4"), ("p", "?")],
    "evio": [("t", "<i8"), ("x", "<u2"), ("y", "<u2"), ("p", "i1")],
}
FIELDS = {"timestamp": "t", "on": "p", "polarity": "p"}


def structured(dtype, events: Events = SMALL) -> np.ndarray:
    array = np.zeros(len(events), dtype)
    for name in array.dtype.names:
        field = FIELDS.get(name, name)
        if field in NAMES:
            array[name] = getattr(events, field)
    return array


def columns(order: str, dtype: str = "float64", events: Events = SMALL) -> np.ndarray:
    return np.stack([getattr(events, name) for name in order], axis=1).astype(dtype)


def saved(folder: Path, **arrays) -> Path:
    np.savez(folder / "a.npz", **arrays)
    return folder / "a.npz"


def refusal(path: Path, **options) -> str:
    with pytest.raises(RecordingError, match=str(path)) as caught:
        read_recording(path, **options)
    return str(caught.value)


@pytest.mark.parametrize("writer", STRUCTURED)
def test_structured_arrays(tmp_path, writer) -> None:
    array = structured(STRUCTURED[writer])
    np.save(tmp_path / "a.npy", array)
    for path in (tmp_path / "a.npy", saved(tmp_path, event_data=array)):
        recording = read_recording(path, sensor_size=(34, 34))
        assert equal(recording.events, SMALL)
    assert read_recording(saved(tmp_path, event_data=array, **SIZE)).sensor == (34, 34)


@pytest.mark.parametrize("order", ["txyp", "xytp", "xypt"])
@pytest.mark.parametrize("dtype", ["int64", "uint32", "float32", "float64"])
def test_columns(tmp_path, order, dtype) -> None:
    np.save(tmp_path / "a.npy", columns(order, dtype))
    for path in (tmp_path / "a.npy", saved(tmp_path, events=columns(order, dtype))):
        assert equal(read_recording(path, sensor_size=(34, 34)).events, SMALL)


@pytest.mark.parametrize("names", [("ts", "xs", "ys", "ps"), ("timestamps", "x", "y", "pol"), ("t", "x", "y", "p")])
def test_names_and_whole_numbers_as_floats(tmp_path, names) -> None:
    arrays = {name: getattr(SMALL, field).astype(np.float64) for name, field in zip(names, NAMES, strict=True)}
    assert equal(read_recording(saved(tmp_path, **arrays, **SIZE)).events, SMALL)
    arrays[names[3]] = 2 * arrays[names[3]] - 1
    assert equal(read_recording(saved(tmp_path, **arrays, **SIZE)).events, SMALL), "-1 and 1"


@pytest.mark.parametrize(
    ("unit", "t"),
    [
        ("s", SMALL.t / 1e6),
        ("ms", SMALL.t / 1e3),
        ("us", SMALL.t + 0.3),
        ("ns", SMALL.t * 1000 + 499),
        ("ns", SMALL.t * 1000.0),
        ("us", SMALL.t),
    ],
)
def test_the_unit_of_time_is_asked_for_where_it_is_not_clear(tmp_path, unit, t) -> None:
    arrays = {"x": SMALL.x, "y": SMALL.y, "p": SMALL.p, **SIZE}
    path = saved(tmp_path, t=t, **arrays)
    assert equal(read_recording(path, time_unit=unit).events, SMALL)
    if (t != np.floor(t)).any():
        assert "--time-unit s, ms, us or ns" in refusal(path)


def test_whole_seconds_and_milliseconds(tmp_path) -> None:
    arrays = {"x": SMALL.x, "y": SMALL.y, "p": SMALL.p, **SIZE}
    for unit, factor in (("s", 10**6), ("ms", 1000)):
        events = read_recording(saved(tmp_path, t=SMALL.t, **arrays), time_unit=unit).events
        assert np.array_equal(events.t, SMALL.t * factor)


@pytest.mark.parametrize("name", ["a.bin", "a.aedat"])
def test_a_unit_of_time_is_refused_for_formats_that_have_one(tmp_path, name) -> None:
    data = files.atis(SMALL) if name == "a.bin" else files.aedat2(files.dvs128_address(SMALL), SMALL.t)
    assert "--time-unit is for .npz" in refusal(write(tmp_path, name, data), time_unit="ms")


def test_columns_that_could_be_two_things_are_refused(tmp_path) -> None:
    steps = np.arange(40) % 34
    rising = Events.make(np.arange(40), np.sort(steps), steps, steps % 2)
    np.save(tmp_path / "a.npy", columns("txyp", events=rising)[:34])
    assert "could be txyp or xytp" in refusal(tmp_path / "a.npy", sensor_size=(34, 34))
    np.save(tmp_path / "a.npy", columns("tpxy"))
    assert "none of txyp, xytp, xypt" in refusal(tmp_path / "a.npy", sensor_size=(34, 34))


@pytest.mark.parametrize(
    ("named", "changes"),
    [
        (r"no array t; it has x \[40\], y \[40\], p", {"t": None}),
        ("t = .* .float64. at event .* is no whole number", {"t": SMALL.t / 1e6}),
        ("x = 0.5 .float64. at event 0 is no whole number in 0..65535", {"x": SMALL.x * 0 + 0.5}),
        ("x = nan", {"x": np.full(40, np.nan)}),
        ("t = inf", {"t": np.full(40, np.inf)}),
        (r"of equal length; x is uint16 \[39\]", {"x": SMALL.x[:-1]}),
        (r"must be numbers of one dimension .*; x is int64 \[\]", {"x": np.array(3)}),
        ("must be numbers .*; p is <U2", {"p": np.full(40, "on")}),
        ("x = inf .float16. at event 0", {"x": np.full(40, np.inf, np.float16)}),
        ("t = inf .float16. at event 0", {"t": np.full(40, np.inf, np.float16)}),
        ("y = .* at event 0 ", {"y": SMALL.y.astype(int) + 65536}),
        ("p = 2 ", {"p": SMALL.p + 1}),
        ("height must be one integer from 1 to 65536, not array", {"height": np.zeros(7, int)}),
        ("width must be one integer .*, not array.1.5", {"width": np.array(1.5)}),
        ("both t and ts", {"ts": SMALL.t}),
        ("--sensor-size", {"height": None}),
    ],
)
def test_arrays_that_are_no_events(tmp_path, named, changes) -> None:
    sound = {name: getattr(SMALL, name) for name in NAMES} | SIZE
    arrays = {name: value for name, value in (sound | changes).items() if value is not None}
    path = saved(tmp_path, **arrays)
    with pytest.raises(RecordingError, match=named):
        read_recording(path)


def test_structured_arrays_and_files_that_are_no_events(tmp_path) -> None:
    path = saved(tmp_path, events=structured(STRUCTURED["tonic"])[["x", "y", "t"]])
    assert "no field p in its structured array; it has x, y, t" in refusal(path, sensor_size=(34, 34))
    path = saved(tmp_path, one=columns("txyp"), two=columns("txyp"))
    assert "no array t; it has one [40, 4], two [40, 4]" in refusal(path, sensor_size=(34, 34))
    np.save(tmp_path / "a.npy", np.array([{}], object), allow_pickle=True)
    assert "not a sound NumPy file" in refusal(tmp_path / "a.npy")
    assert "no array t; it has words" in refusal(saved(tmp_path, words=np.full((5, 4), "t")))
    np.save(tmp_path / "a.npy", np.array(3))
    assert "no array t" in refusal(tmp_path / "a.npy")


def test_times_too_large_for_their_unit_are_refused(tmp_path) -> None:
    arrays = {"x": [1, 2], "y": [1, 2], "p": [0, 1], **SIZE}
    for t in (np.array([0, 1 << 60]), np.array([0.0, 1e18])):
        assert "at event 1" in refusal(saved(tmp_path, t=t, **arrays), time_unit="s")
