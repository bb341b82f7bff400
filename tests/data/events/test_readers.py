"""Readers give the events that were written to the files, and those of SpikingJelly's readers."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasnn.data.events import Events, Recording, RecordingError, read_recording
from tests.data.events import files, writers
from tests.data.events.files import equal, event_lists, random_events, spikingjelly_module, write

quick = settings(max_examples=40, deadline=None)
SMALL = random_events(40, 34, 34, longest_gap=9)
BACKWARDS = Events(np.where(np.arange(40) == 30, 0, SMALL.t + 1), SMALL.x, SMALL.y, SMALL.p)
OUTSIDE = Events(SMALL.t, np.where(np.arange(40) == 25, 200, SMALL.x).astype(np.uint16), SMALL.y, SMALL.p)

SIZE = ("% Height 34", "% Width 34")


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
    "a.npy": files.npy,
    "a.dat": lambda events: writers.dat(events, ("% Version 2", *SIZE)),
    "evt2.raw": lambda events: writers.evt2(events, ("% evt 2.0", *SIZE)),
    "evt21.raw": lambda events: writers.evt21(events, ("% evt 2.1", *SIZE)),
    "evt3.raw": lambda events: writers.evt3(events, ("% evt 3.0", *SIZE)),
}

DECODED_LARGER = {*WRITERS} - {"dvs128.aedat", "gesture.aedat", "a.bin"}
"""Files that may be smaller than their events in memory."""


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
    size = {"sensor_size": (34, 34)} if name == "a.npy" else {}
    recording = read(tmp_path, name, data, **size)
    assert equal(recording.events, SMALL)
    assert recording.sensor == ((128, 128) if name.endswith(".aedat") else (34, 34))
    for length in (0, 1, 21, -3, -1):
        refusal(tmp_path, name, data[:length], **size)
    for limit in (100, len(data) - 1, 13 * 40 - 1 if name in DECODED_LARGER else 50):
        limits(limit)
        assert "--max-sample-mb" in refusal(tmp_path, name, data, **size)
    limits(1 << 20)
    if name != "dvs128.aedat":
        assert "200" in refusal(tmp_path, name, WRITERS[name](OUTSIDE), **size)


@quick
@given(event_lists(128, 128, 2**32 - 1), st.lists(st.text("abc #\t", max_size=20), max_size=6))
def test_aedat2_of_a_dvs128(tmp_path_factory, events, comments) -> None:
    path = tmp_path_factory.getbasetemp() / "cifar10_cat_0.aedat"
    address, lines = files.dvs128_address(events), [*files.AEDAT2_LINES, *(f"# {comment}" for comment in comments)]
    path.write_bytes(files.aedat2(address, events.t, lines))
    recording = read_recording(path)
    assert recording.sensor == (128, 128) and equal(recording.events, events)
    transposed = read_recording(path, transpose_dvs128=True)
    assert like_spikingjelly(transposed.events, spikingjelly_module("cifar10_dvs")._load_origin_data(path))
    triggers = np.arange(len(events)) % 3 == 1
    path.write_bytes(files.aedat2(address | np.uint32(1 << 31) * triggers.astype(np.uint32), events.t))
    assert equal(read_recording(path).events, events[~triggers])


@pytest.mark.parametrize(("chip", "size"), [("DAVIS240C", (180, 240)), ("DAVIS346B", (260, 346))])
def test_aedat2_of_a_davis(tmp_path, chip, size) -> None:
    events = random_events(200, *size)
    address = files.davis_address(events, *size)
    lines = [*files.AEDAT2_LINES, f"# AEChip: eu.seebetter.ini.chips.davis.{chip}"]
    recording = read(tmp_path, "recording.aedat", files.aedat2(address, events.t, lines))
    assert recording.sensor == size and equal(recording.events, events)
    address[[3, 4]] |= np.array([1 << 31, 1 << 10], np.uint32)  # a sample of a frame, and a trigger
    recording = read(tmp_path, "b.aedat", files.aedat2(address, events.t), sensor_size=size)
    assert equal(recording.events, events[np.delete(np.arange(200), [3, 4])])
    data = files.aedat2(np.array([0x23 << 24, 400 << 12]), np.arange(2), [*lines, "#End Of ASCII Header"])
    assert data.split(b"Header\r\n")[1].startswith(b"#"), "a number sign that is data"
    assert "column 400 and row 0 at event 1" in refusal(tmp_path, "a.aedat", data)
    assert len(read(tmp_path, "a.aedat", data[:-8]).events) == 1


def test_pixels_of_aedat2_lie_where_jaer_shows_them(tmp_path) -> None:
    """jAER's DavisBaseCamera and DVS128 count columns from the right and rows, as OpenGL, from the bottom.

    tonic 1.7.0 has the same pixel of a DAVIS346. Of a DVS128 SpikingJelly 2.0 has the transposed one, evutils 0.3.18
    and tonic 1.7.0 have the bits as they are.
    """
    davis = files.aedat2(np.array([20 << 22 | 10 << 12 | 1 << 11]), np.array([7]))
    events = read(tmp_path, "a.aedat", davis, sensor_size=(260, 346)).events
    assert (events.x, events.y, events.p, events.t) == ([335], [239], [1], [7])
    dvs128_event = files.aedat2(np.array([20 << 8 | 10 << 1 | 1]), np.array([7]))
    upright = read(tmp_path, "b.aedat", dvs128_event).events
    assert (upright.x, upright.y, upright.p) == ([117], [107], [0])
    transposed = read(tmp_path, "b.aedat", dvs128_event, transpose_dvs128=True).events
    assert (transposed.x, transposed.y, transposed.p) == ([107], [117], [0])


@pytest.mark.parametrize("turn", [1 << 31, 1 << 32])
def test_the_clock_of_aedat2_wraps(tmp_path, turn) -> None:
    """jAER counts 32 bits and cAER 31; an event that comes late on the other side of the wrap is late, too."""
    t = turn + np.array([-900, -5, 3, 8, 700])
    events = Events.make(t, range(5), range(5), [0, 1, 0, 1, 0])
    address = files.dvs128_address(events)
    assert equal(read(tmp_path, "a.aedat", files.aedat2(address, t % turn)).events, events)
    late = t[[0, 2, 1, 3, 4]] % turn
    assert "--sort-events" in refusal(tmp_path, "a.aedat", files.aedat2(address, late))
    assert read(tmp_path, "a.aedat", files.aedat2(address, late), sort=True).events.t.tolist() == t.tolist()


@pytest.mark.parametrize("minutes", [5, 20, 34, 40, 70])
def test_a_reset_of_the_clock_of_aedat2_is_no_wrap(tmp_path, minutes) -> None:
    """jAER's timestamps are 32 bits and wrap after 71.6 minutes, cAER's after 35.8; a user may set either to 0."""
    t = np.array([0, 9, 10, 20]) + 60_000_000 * minutes * np.array([1, 1, 0, 0])
    data = files.aedat2(files.dvs128_address(Events.make(t, range(4), range(4), [0] * 4)), t)
    problem = refusal(tmp_path, "a.aedat", data)
    assert f"backwards at event 2: 10 us comes after {t[1]} us" in problem


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
    unsized = writers.dat(SMALL, ("% Version 2",))
    assert "--sensor-size" in refusal(tmp_path, "b.dat", unsized)
    assert read(tmp_path, "b.dat", unsized, sensor_size=(34, 40)).sensor == (34, 40)


def test_without_faery_it_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "faery", None)
    with pytest.raises(ModuleNotFoundError, match=r"megasnn\[events\]"):
        read(tmp_path, "a.aedat4", WRITERS["a.aedat4"](SMALL))
    for name in ("a.dat", "evt2.raw", "evt21.raw", "evt3.raw"):
        assert len(read(tmp_path, name, WRITERS[name](SMALL)).events) == 40


@pytest.mark.parametrize("name", sorted({*WRITERS} - {"a.aedat4", "a.npy"}))
def test_time_that_runs_backwards_is_refused_or_sorted(tmp_path, name) -> None:
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
        ("a.dat", writers.dat(SMALL, ("% Version 2", *SIZE), kind=14), "kind 14"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, data, named) -> None:
    assert named in refusal(tmp_path, name, data)


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_or_a_device_is_no_recording(tmp_path, kind) -> None:
    path = tmp_path / "a.aedat"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(RecordingError, match=f"{path}: is no regular file"):
        read_recording(path)


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
        assert len(read_recording(path, sensor_size=(34, 34)).events) > 0
    except RecordingError as error:
        assert str(path) in str(error)
