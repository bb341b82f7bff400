"""Recordings that cannot be used are refused with the file's name and the place."""

from __future__ import annotations

import pickle
import re
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasnn.events import FORMATS, Events, RecordingError, decode_recording, read_recording
from tests.events import files
from tests.events.files import equal, random_events, write

EVENTS = random_events(40, 34, 34, longest_gap=9)
BACKWARDS = Events(np.where(np.arange(40) == 30, 0, EVENTS.t + 1), EVENTS.x, EVENTS.y, EVENTS.p)
OUTSIDE = Events(EVENTS.t, np.where(np.arange(40) == 25, 200, EVENTS.x).astype(np.uint16), EVENTS.y, EVENTS.p)
DVS128 = len(files.text(files.AEDAT2_LINES))
GESTURE = len(files.text(files.AEDAT3_LINES))
PACKET = 28


def npz(folder, **changes):
    arrays = {"t": EVENTS.t, "x": EVENTS.x, "y": EVENTS.y, "p": EVENTS.p, "height": 34, "width": 34} | changes
    np.savez(folder / "made.npz", **{name: value for name, value in arrays.items() if value is not None})
    return (folder / "made.npz").read_bytes()


def as_dvs128(events: Events) -> bytes:
    return files.aedat2(files.dvs128_address(events), events.t)


def as_aedat3(events: Events) -> bytes:
    return files.aedat3([files.aedat3_packet(events[:10]), files.aedat3_packet(events[10:])])


def refusal(folder, name: str, data: bytes, **options) -> str:
    path = write(folder, name, data)
    with pytest.raises(RecordingError, match=re.escape(str(path))) as caught:
        read_recording(path, **options)
    again = pickle.loads(pickle.dumps(caught.value))  # as a worker process reports it
    assert str(again) == str(caught.value) and again.problem == caught.value.problem
    return caught.value.problem


@pytest.mark.parametrize("name", ["a.aedat", "a.bin", "a.npz", "a.npy", "a.aedat4"])
@pytest.mark.parametrize("format", ["auto", *FORMATS])
def test_an_empty_file(tmp_path, name, format):
    if format == "aedat4":
        pytest.importorskip("aedat")
    refusal(tmp_path, name, b"", format=format)


def test_an_empty_file_says_so(tmp_path):
    assert refusal(tmp_path, "a.aedat", b"") == "is empty (0 bytes)"


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.aedat", files.text(files.AEDAT2_LINES)),
        ("a.aedat", files.text(files.AEDAT3_LINES)),
        ("a.aedat", files.aedat3([files.aedat3_packet(EVENTS, valid=np.zeros(40))])),
        ("a.bin", files.atis(Events.make([5], [0], [240], [0]))),
    ],
)
def test_no_events(tmp_path, name, data):
    assert refusal(tmp_path, name, data) == "has no events"


@pytest.mark.parametrize(
    ("name", "data", "place"),
    [
        ("a.aedat", as_dvs128(EVENTS)[:-3], f"the event at byte {DVS128 + 39 * 8} is not complete"),
        ("a.aedat", as_aedat3(EVENTS)[:-3], f"the packet at byte {GESTURE + 2 * PACKET + 80} should have 240 bytes"),
        ("a.aedat", as_aedat3(EVENTS)[: GESTURE + 10], f"header of the packet at byte {GESTURE} is not complete"),
        ("a.bs2", files.atis(EVENTS)[:-2], "the event at byte 195 is not complete"),
    ],
)
def test_a_cut_file(tmp_path, name, data, place):
    problem = refusal(tmp_path, name, data)
    assert problem.startswith("is cut") and place in problem


@pytest.mark.parametrize("cut", [1, 30, 200, 600, -1])
def test_a_cut_npz(tmp_path, cut):
    problem = refusal(tmp_path, "a.npz", npz(tmp_path)[:cut], format="numpy")
    assert "not a sound NumPy file" in problem


def test_a_changed_byte_in_an_npz(tmp_path):
    data = bytearray(npz(tmp_path))
    data[200] ^= 1
    assert "CRC" in refusal(tmp_path, "a.npz", bytes(data))


@pytest.mark.parametrize("data", [b"#!AER-DAT2.0\r\n# no end", b"#!AER-DAT2.0"])
def test_a_file_that_ends_inside_its_header(tmp_path, data):
    assert "ends inside its header" in refusal(tmp_path, "a.aedat", data)


@pytest.mark.parametrize("version", ["1.0", "3.0", "5.0"])
def test_another_version(tmp_path, version):
    data = as_dvs128(EVENTS).replace(b"DAT2.0", f"DAT{version}".encode())
    assert f"is AEDAT {version}" in refusal(tmp_path, "a.aedat", data)
    assert f"is AEDAT {version}, not AEDAT 2.0" in refusal(tmp_path, "a.aedat", data, format="aedat2")


def test_no_version(tmp_path):
    data = as_dvs128(EVENTS).partition(b"\n")[2]
    assert "known format" in refusal(tmp_path, "a.aedat", data)
    assert "does not begin with a version" in refusal(tmp_path, "a.aedat", data, format="aedat2")


@pytest.mark.parametrize(
    ("name", "make", "byte"),
    [
        ("a.aedat", as_dvs128, DVS128 + 8 * 30),
        ("a.aedat", as_aedat3, GESTURE + 2 * PACKET + 8 * 30),
        ("a.bin", files.atis, 5 * 30),
    ],
)
def test_time_that_runs_backwards(tmp_path, name, make, byte):
    problem = refusal(tmp_path, name, make(BACKWARDS))
    place = f"time runs backwards at event 30 (byte {byte}): 0 us comes after {BACKWARDS.t[29]} us"
    assert problem == f"{place}; sort=True (--sort-events) puts events in order"


@pytest.mark.parametrize(("name", "make"), [("a.aedat", as_dvs128), ("a.aedat", as_aedat3), ("a.bin", files.atis)])
def test_events_may_be_put_in_order_instead(tmp_path, name, make):
    events = read_recording(write(tmp_path, name, make(BACKWARDS)), sort=True).events
    order = [30, *range(30), *range(31, 40)]
    assert events.t.tolist() == [0, *np.delete(EVENTS.t + 1, 30)]
    assert equal(events, BACKWARDS[np.array(order)])


@pytest.mark.parametrize(
    ("name", "make", "byte"),
    [("a.aedat", as_aedat3, GESTURE + 2 * PACKET + 8 * 25), ("a.bin", files.atis, 5 * 25)],
)
def test_outside_the_sensor(tmp_path, name, make, byte):
    assert f"x = 200 at event 25 (byte {byte}) is outside the sensor of" in refusal(tmp_path, name, make(OUTSIDE))


def test_the_last_row_and_column_are_inside(tmp_path):
    path = write(tmp_path, "a.bin", files.atis(Events.make([0], [6], [4], [1])))
    assert len(read_recording(path, sensor_size=(5, 7)).events) == 1
    for size, field in (((4, 7), "y = 4"), ((5, 6), "x = 6")):
        assert field in refusal(tmp_path, "a.bin", path.read_bytes(), sensor_size=size)


def test_the_place_counts_what_was_left_out():
    address = files.davis_address(EVENTS)
    address[[0, 1]] |= np.uint32(1 << 31)
    with pytest.raises(RecordingError, match=f"backwards at event 30 .byte {DVS128 + 8 * 30}"):
        decode_recording(files.aedat2(address, BACKWARDS.t), "file", sensor_size=(260, 346))
    mark = files.Events.make([0], [0], [240], [0])
    with pytest.raises(RecordingError, match=r"backwards at event 31 \(byte 155\)"):
        decode_recording(files.atis(mark) + files.atis(BACKWARDS), "a.bin")


def test_addresses_of_another_sensor(tmp_path):
    problem = refusal(tmp_path, "a.aedat", files.aedat2(files.davis_address(EVENTS), EVENTS.t))
    assert re.match(r"address 0x\w{8} at event 0 \(byte \d+\) is none of a DVS128's", problem)


@pytest.mark.parametrize("size", [(64, 64), (128, 127)])
def test_aedat2_sensor_sizes_without_known_addresses(tmp_path, size):
    assert "DVS128 (128 x 128)" in refusal(tmp_path, "a.aedat", as_dvs128(EVENTS), sensor_size=size)


def test_an_unknown_chip(tmp_path):
    data = files.aedat2(files.dvs128_address(EVENTS), EVENTS.t, [*files.AEDAT2_LINES, "# AEChip: ch.unizh.Tmpdiff128"])
    assert "'ch.unizh.Tmpdiff128'" in refusal(tmp_path, "a.aedat", data)
    data = files.aedat3([files.aedat3_packet(EVENTS)], ["#!AER-DAT3.1", "#Source 1: Thing", "#!END-HEADER"])
    assert "'#Source 1: Thing'" in refusal(tmp_path, "a.aedat", data)
    assert len(read_recording(write(tmp_path, "a.aedat", data), sensor_size=(34, 34)).events) == 40


@pytest.mark.parametrize(
    "fields", [(1, 7, 40, 40), (1, 8, -1, 0), (1, 8, 40, 41), (1, 8, 40, -1), (2, 0, 9, 9), (1, -8, 40, 40)]
)
def test_packets_that_make_no_sense(tmp_path, fields):
    kind, size, capacity, number = fields
    packet = struct.pack("<hhiiiiii", kind, 1, size, 4, 0, capacity, number, number) + bytes(400)
    assert f"the packet at byte {GESTURE} makes no sense" in refusal(tmp_path, "a.aedat", files.aedat3([packet]))


def test_compressed_packets(tmp_path):
    data = files.aedat3(
        [files.aedat3_packet(EVENTS)], [*files.AEDAT3_LINES[:1], "#Format: Compressed", *files.AEDAT3_LINES[2:]]
    )
    assert "'Compressed'" in refusal(tmp_path, "a.aedat", data)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"t": None}, "has no array t or ts or timestamp; it has x, y, p, height, width"),
        ({"t": EVENTS.t / 1e6}, "t must be integers (time in microseconds), it is float64"),
        ({"x": EVENTS.x[:-1]}, "equal length"),
        ({"x": EVENTS.x - 10_000.0}, "x must be integers"),
        ({"x": EVENTS.x.astype(int) - 100}, "at event 0 is outside the sensor"),
        ({"y": EVENTS.y.astype(int) + 65536}, "at event 0 is outside the sensor"),
        ({"y": OUTSIDE.x}, "y = 200 at event 25 is outside the sensor of 34 x 34"),
        ({"p": EVENTS.p * 2}, "is no polarity"),
        ({"t": BACKWARDS.t}, "time runs backwards at event 30"),
        ({"height": None}, "does not say the size of its sensor"),
        ({"t": EVENTS.t[:0], "x": EVENTS.x[:0], "y": EVENTS.y[:0], "p": EVENTS.p[:0]}, "has no events"),
        ({"t": EVENTS.t[None], "x": EVENTS.x[None], "y": EVENTS.y[None], "p": EVENTS.p[None]}, "one dimension"),
    ],
)
def test_arrays_that_are_no_events(tmp_path, changes, problem):
    assert problem in refusal(tmp_path, "a.npz", npz(tmp_path, **changes))


def test_objects_are_not_unpickled(tmp_path):
    np.save(tmp_path / "made.npy", np.array([{"t": 1}], object), allow_pickle=True)
    assert "cannot be read" in refusal(tmp_path, "a.npy", (tmp_path / "made.npy").read_bytes())


def test_aedat4(tmp_path):
    pytest.importorskip("aedat")
    data = files.aedat4([EVENTS[:20], EVENTS[20:]], 34, 34)
    table = len(data) - 8
    between_packets = (len(data) - 8 + len(files.aedat4([], 34, 34)) - 8) // 2  # both packets are equally long
    problem = refusal(tmp_path, "a.aedat4", data[:between_packets])
    assert problem == f"is cut: its table of packets begins at byte {table}, the file ends at byte {between_packets}"
    assert "header that is cut or damaged" in refusal(tmp_path, "a.aedat4", data[:20])
    assert "header that is cut or damaged" in refusal(tmp_path, "a.aedat4", data[:40] + bytes(len(data) - 40))
    first_packet = len(files.aedat4([], 34, 34)) - 8
    sizes = bytearray(data)
    sizes[first_packet + 4] += 1
    assert f"the packet at byte {between_packets + 1} " in refusal(tmp_path, "a.aedat4", bytes(sizes))
    inside = data[: first_packet + 8] + b"\xff" * 20 + data[first_packet + 28 :]
    assert "cannot be decoded after event 0" in refusal(tmp_path, "a.aedat4", inside)
    assert refusal(tmp_path, "a.aedat4", files.aedat4([], 34, 34)) == "has no events"
    assert "time runs backwards at event 30" in refusal(tmp_path, "a.aedat4", files.aedat4([BACKWARDS], 34, 34))
    assert "x = 200 at event 25" in refusal(tmp_path, "a.aedat4", files.aedat4([OUTSIDE], 34, 34))
    nothing = data.replace(b"EVTS</attr>", b"TRIG</attr>")
    assert "has 0 event streams" in refusal(tmp_path, "a.aedat4", nothing)


def test_aedat4_needs_a_file():
    with pytest.raises(RecordingError, match="a.aedat4: cannot be decoded in memory as aedat4"):
        decode_recording(files.aedat4([EVENTS], 34, 34), "a.aedat4")


WHOLE = {
    "a.aedat": as_dvs128(EVENTS),
    "b.aedat": as_aedat3(EVENTS),
    "a.bin": files.atis(EVENTS),
    "a.npz": files.npz(EVENTS, 34, 34),
    "a.aedat4": files.aedat4([EVENTS[:20], EVENTS[20:]], 34, 34),
}


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(WHOLE)), st.data())
def test_whatever_is_damaged_is_read_or_refused(tmp_path_factory, name, draw):
    if name == "a.aedat4":
        pytest.importorskip("aedat")
    data = bytearray(WHOLE[name])
    for _ in range(draw.draw(st.integers(1, 4))):
        start = draw.draw(st.integers(0, len(data)))
        end = draw.draw(st.sampled_from([start, start + 1, start + 7, len(data)]))
        data[start:end] = draw.draw(st.binary(max_size=9))
    path = write(tmp_path_factory.getbasetemp(), name, bytes(data))
    try:
        recording = read_recording(path)
    except RecordingError as error:
        assert str(path) in str(error)
    else:
        assert len(recording.events) > 0


def test_a_missing_file_and_unknown_formats(tmp_path):
    with pytest.raises(FileNotFoundError, match="missing.aedat"):
        read_recording(tmp_path / "missing.aedat")
    assert "known: aedat2" in refusal(tmp_path, "a.txt", b"hello")
    with pytest.raises(ValueError, match="'aedat9'; choose from auto, aedat2"):
        read_recording(write(tmp_path, "a.bin", files.atis(EVENTS)), format="aedat9")
