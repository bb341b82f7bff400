"""Readers give the events that were written to the files, and those of SpikingJelly's readers."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasnn.data.events import Events, Recording, RecordingError, read_recording
from tests.data.events import files
from tests.data.events.files import equal, event_lists, random_events, spikingjelly_module, write

quick = settings(max_examples=40, deadline=None)
SMALL = random_events(40, 34, 34, longest_gap=9)
BACKWARDS = Events(np.where(np.arange(40) == 30, 0, SMALL.t + 1), SMALL.x, SMALL.y, SMALL.p)
OUTSIDE = Events(SMALL.t, np.where(np.arange(40) == 25, 200, SMALL.x).astype(np.uint16), SMALL.y, SMALL.p)


def dvs128(events: Events) -> bytes:
    return files.aedat2(files.dvs128_address(events), events.t)


def aedat3(events: Events) -> bytes:
    return files.aedat3([files.aedat3_packet(events[:10]), files.aedat3_packet(events[10:])])


WRITERS = {
    "dvs128.aedat": dvs128,
    "gesture.aedat": aedat3,
    "a.aedat4": lambda events: files.aedat4([events[:10], events[10:]], 34, 34),
    "a.bin": files.atis,
    "a.npz": lambda events: files.npz(events, 34, 34),
    "a.dat": lambda events: files.dat2(events, (34, 34)),
    "evt3.raw": lambda events: files.evt3(events, (34, 34)),
}


@pytest.fixture(autouse=True)
def no_backtraces(monkeypatch) -> None:
    monkeypatch.setenv("RUST_BACKTRACE", "0")


def like_spikingjelly(events: Events, theirs: dict) -> bool:
    return all(np.array_equal(getattr(events, name), theirs[name]) for name in ("t", "x", "y", "p"))


def read(folder: Path, name: str, data: bytes, **options) -> Recording:
    return read_recording(write(folder, name, data), **options)


def refusal(folder: Path, name: str, data: bytes, **options) -> str:
    with pytest.raises(RecordingError, match=str(folder / name)) as caught:
        read(folder, name, data, **options)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value), "as a worker process reports it"
    return str(caught.value)


@pytest.mark.parametrize("name", WRITERS)
def test_written_events_are_read_within_a_bound_and_cuts_and_places_outside_refused(tmp_path, name, limits) -> None:
    data = WRITERS[name](SMALL)
    limits(max(len(data), 13 * 40) + 2000)
    recording = read(tmp_path, name, data)
    assert equal(recording.events, SMALL)
    assert recording.sensor == ((128, 128) if name.endswith(".aedat") else (34, 34))
    for size in (0, 1, 21) if name.endswith((".raw", ".dat")) else (0, 1, 21, -3, -1):  # these end at a whole event
        refusal(tmp_path, name, data[:size])
    for limit in (100, len(data) - 1, 13 * 40 - 1 if name not in ("dvs128.aedat", "gesture.aedat", "a.bin") else 50):
        limits(limit)
        assert "--max-sample-mb" in refusal(tmp_path, name, data)
    limits(1 << 20)
    if name != "dvs128.aedat":
        assert "200" in refusal(tmp_path, name, WRITERS[name](OUTSIDE))


@quick
@given(event_lists(128, 128, 2**32 - 1), st.lists(st.text("abc #\t", max_size=20), max_size=6))
def test_aedat2_of_a_dvs128(tmp_path_factory, events, comments) -> None:
    path = tmp_path_factory.getbasetemp() / "cifar10_cat_0.aedat"
    address, lines = files.dvs128_address(events), [*files.AEDAT2_LINES, *(f"# {comment}" for comment in comments)]
    path.write_bytes(files.aedat2(address, events.t, lines))
    recording = read_recording(path)
    assert recording.sensor == (128, 128) and equal(recording.events, events)
    assert like_spikingjelly(recording.events, spikingjelly_module("cifar10_dvs")._load_origin_data(path))
    triggers = np.arange(len(events)) % 3 == 1
    path.write_bytes(files.aedat2(address | np.uint32(1 << 31) * triggers.astype(np.uint32), events.t))
    assert equal(read_recording(path).events, events[~triggers])


@pytest.mark.parametrize(("chip", "size"), [("DAVIS240C", (180, 240)), ("DAVIS346B", (260, 346))])
def test_aedat2_of_a_davis(tmp_path, chip, size) -> None:
    events = random_events(200, *size)
    address = files.davis_address(events)
    lines = [*files.AEDAT2_LINES, f"# AEChip: eu.seebetter.ini.chips.davis.{chip}"]
    path = write(tmp_path, "recording.aedat", files.aedat2(address, events.t, lines))
    recording = read_recording(path)
    assert recording.sensor == size and equal(recording.events, events)
    with path.open("rb") as file:
        theirs = dict(zip("txyp", spikingjelly_module("cifar10_dvs")._load_events(file, filter_dvs=True), strict=True))
    assert like_spikingjelly(recording.events, theirs)
    address[[3, 4]] |= np.array([1 << 31, 1 << 10], np.uint32)  # a sample of a frame, and a trigger
    recording = read(tmp_path, "b.aedat", files.aedat2(address, events.t), sensor_size=size)
    assert equal(recording.events, events[np.delete(np.arange(200), [3, 4])])
    events = Events.make([7, 8], [0, 1], [0x23 << 2, 0x23 << 2], [1, 0])
    data = files.aedat2(files.davis_address(events), events.t, [*lines, "#End Of ASCII Header"])
    assert data.split(b"Header\r\n")[1].startswith(b"#"), "a number sign that is data"
    assert equal(read(tmp_path, "a.aedat", data).events, events)


@quick
@given(st.lists(event_lists(128, 128, 1000, least=0), min_size=1, max_size=4))
def test_aedat3(tmp_path_factory, parts) -> None:
    path = tmp_path_factory.getbasetemp() / "user01_led.aedat"
    other = files.aedat3_packet(random_events(3, 10, 10), kind=3)
    packets, written = [other], [Events.make([], [], [], [])]
    for overflow, part in enumerate(parts):
        packets += [files.aedat3_packet(part, overflow), other]
        written.append(Events(part.t + (overflow << 31), part.x, part.y, part.p))
    path.write_bytes(files.aedat3(packets))
    expected = Events.make(*(np.concatenate([getattr(part, name) for part in written]) for name in "txyp"))
    if not len(expected):
        with pytest.raises(RecordingError):
            read_recording(path)
        return
    recording = read_recording(path)
    assert recording.sensor == (128, 128) and equal(recording.events, expected)
    assert like_spikingjelly(recording.events, spikingjelly_module("utils").load_aedat_v3(path))
    valid = np.arange(40) % 3 != 0
    path.write_bytes(files.aedat3([files.aedat3_packet(SMALL, valid=valid)]))
    assert equal(read_recording(path).events, SMALL[valid])


@quick
@given(event_lists(34, 34, 2**23 - 1))
def test_n_mnist(tmp_path_factory, events) -> None:
    path = tmp_path_factory.getbasetemp() / "00002.bin"
    path.write_bytes(files.atis(events))
    recording = read_recording(path)
    assert recording.sensor == (34, 34) and equal(recording.events, events)
    assert like_spikingjelly(recording.events, spikingjelly_module("utils").load_ATIS_bin(path))


def test_row_240_of_n_mnist_says_that_time_has_overflowed(tmp_path) -> None:
    written = Events.make([5, 8000, 8191, 3, 8190, 8191, 1], [1, 2, 0, 3, 4, 0, 5], [1, 2, 240, 3, 4, 240, 5], [1] * 7)
    events = read(tmp_path, "00001.bin", files.atis(written)).events
    assert events.t.tolist() == [5, 8000, 8192 + 3, 8192 + 8190, 2 * 8192 + 1] and events.x.tolist() == [1, 2, 3, 4, 5]


def test_numpy_files_and_sizes_of_sensors(tmp_path) -> None:
    """As SpikingJelly's conversions write them: other types, no size of the sensor; polarity may be a sign."""
    events = random_events(100, 128, 128)
    for polarity in (events.p.astype(int), events.p.astype(bool), 2 * events.p.astype(np.int8) - 1):
        np.savez_compressed(tmp_path / "a.npz", t=events.t.astype(np.uint32), x=events.x, y=events.y, p=polarity)
        assert equal(read_recording(tmp_path / "a.npz", sensor_size=(128, 128)).events, events)
    with pytest.raises(RecordingError, match="--sensor-size"):
        read_recording(tmp_path / "a.npz")
    for name in ("a.npz", "a.dat", "evt3.raw", "a.aedat4"):
        assert read(tmp_path, name, WRITERS[name](SMALL), sensor_size=(99, 99)).sensor == (34, 34)
    assert "--sensor-size" in refusal(tmp_path, "b.dat", files.dat2(SMALL, None))
    assert read(tmp_path, "b.dat", files.dat2(SMALL, None), sensor_size=(34, 40)).sensor == (34, 40)


def test_without_faery_it_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "faery", None)
    with pytest.raises(ModuleNotFoundError, match=r"megasnn\[events\]"):
        read(tmp_path, "a.dat", WRITERS["a.dat"](SMALL))


@pytest.mark.parametrize("name", ["dvs128.aedat", "gesture.aedat", "a.bin", "a.npz", "a.dat"])
def test_time_that_runs_backwards_is_refused_or_sorted(tmp_path, name) -> None:
    if name == "a.dat":  # faery moves a late event to the time of the one before
        late = read(tmp_path, name, WRITERS[name](BACKWARDS)).events.t
        assert np.array_equal(late, np.where(np.arange(40) == 30, BACKWARDS.t[29], BACKWARDS.t))
        return
    problem = refusal(tmp_path, name, WRITERS[name](BACKWARDS))
    assert "event 30" in problem and "--sort-events" in problem
    events = read(tmp_path, name, WRITERS[name](BACKWARDS), sort=True).events
    assert equal(events, BACKWARDS[np.array([30, *range(30), *range(31, 40)])])
    clip = Events.make([1, 2, 2, 5, 9], [0] * 5, [0] * 5, [0] * 5)
    assert clip.between(2, 9).t.tolist() == [2, 2, 5] and len(clip.between(3, 5)) == 0


@pytest.mark.parametrize(
    ("name", "data", "named"),
    [
        ("a.aedat", files.text(files.AEDAT2_LINES), "no events"),
        ("a.aedat", dvs128(SMALL).replace(b"DAT2.0", b"DAT3.0"), "DAT3.0"),
        ("a.txt", b"hello", "hello"),
        ("a.aedat", files.aedat2(files.dvs128_address(SMALL), SMALL.t, [*files.AEDAT2_LINES, "# AEChip: Tmp"]), "Tmp"),
        ("a.aedat", aedat3(SMALL).replace(b"RAW", b"Compressed"), "Compressed"),
        ("a.aedat", aedat3(SMALL).replace(b"\x08\0\0\0\x04", b"\xf8\xff\xff\xff\x04"), "packet at byte"),
        ("a.aedat4", files.aedat4([SMALL], 34, 34).replace(b"EVTS</attr>", b"TRIG</attr>"), "0 event streams"),
        ("a.dat", files.dat2(SMALL, (34, 34)).replace(b"\x0c\x08", b"\x0e\x08"), "trigger"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, data, named) -> None:
    assert named in refusal(tmp_path, name, data)


def test_arrays_that_are_no_events(tmp_path) -> None:
    sound = {"t": SMALL.t, "x": SMALL.x, "y": SMALL.y, "p": SMALL.p, "height": 34, "width": 34}
    wrong = {
        "array t": {"t": None},
        "float64": {"t": SMALL.t / 1e6},
        "as many as t": {"x": SMALL.x[:-1]},
        "event 0": {"y": SMALL.y.astype(int) + 65536},
        "height": {"height": np.zeros(7, int)},
        "one dimension": {"x": np.array(3)},
    }
    for named, changes in wrong.items():
        arrays = {name: value for name, value in (sound | changes).items() if value is not None}
        np.savez(tmp_path / "made.npz", **arrays)
        assert named in refusal(tmp_path, "a.npz", (tmp_path / "made.npz").read_bytes())


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(WRITERS)), st.data())
def test_whatever_is_damaged_is_read_or_refused(tmp_path_factory, name, draw) -> None:
    data = bytearray(WRITERS[name](SMALL))
    for _ in range(draw.draw(st.integers(1, 4))):
        start = draw.draw(st.integers(0, len(data)))
        end = draw.draw(st.sampled_from([start, start + 1, start + 7, len(data)]))
        data[start:end] = draw.draw(st.binary(max_size=9))
    path = write(tmp_path_factory.getbasetemp(), name, bytes(data))
    try:
        assert len(read_recording(path).events) > 0
    except RecordingError as error:
        assert str(path) in str(error)
