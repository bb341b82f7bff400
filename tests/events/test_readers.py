"""What the readers give, on files written by the tests: what was written, and what SpikingJelly's readers give."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasnn.events import Events, RecordingError, decode_recording, read_recording
from megasnn.events.aedat3 import PACKET_HEADER
from tests.events import files
from tests.events.files import equal, event_lists, random_events, write
from tests.events.spikingjelly_events import cifar10_dvs, utils

quick = settings(max_examples=40, deadline=None)


def like_spikingjelly(events: Events, theirs: dict) -> bool:
    return all(np.array_equal(getattr(events, name), theirs[name]) for name in ("t", "x", "y", "p"))


@quick
@given(event_lists(128, 128, 2**32 - 1), st.lists(st.text("abc #é\t", max_size=20), max_size=6))
def test_aedat2(tmp_path_factory, events, comments):
    path = tmp_path_factory.getbasetemp() / "cifar10_cat_0.aedat"
    lines = [*files.AEDAT2_LINES, *(f"# {comment}" for comment in comments)]
    path.write_bytes(files.aedat2(files.dvs128_address(events), events.t, lines))
    recording = read_recording(path)
    assert recording.sensor == (128, 128) and recording.format == "aedat2" and recording.skipped == 0
    assert equal(recording.events, events)
    if not any("é" in comment for comment in comments):  # their reader takes such a line for events
        assert like_spikingjelly(recording.events, cifar10_dvs()._load_origin_data(path))


def test_a_header_that_says_where_it_ends_may_be_followed_by_a_number_sign(tmp_path):
    events = Events.make([7, 8], [0, 1], [0x23 << 2, 0x23 << 2], [1, 0])
    lines = [files.AEDAT2_LINES[0], "# AEChip: eu.seebetter.ini.chips.davis.DAVIS346B", "#End Of ASCII Header"]
    data = files.aedat2(files.davis_address(events), events.t, lines)
    assert data.split(b"Header\r\n")[1][:1] == b"#"
    assert equal(decode_recording(data, "file").events, events)


@pytest.mark.parametrize(("bit", "by"), [(15, "jAER's synchronisation"), (31, "the recorder")])
def test_triggers_of_a_dvs128_are_no_events(bit, by):
    events = random_events(50, 128, 128)
    address = files.dvs128_address(events)
    address[[0, 7, 49]] |= np.uint32(1 << bit)
    recording = decode_recording(files.aedat2(address, events.t), "file")
    assert recording.skipped == 3
    assert equal(recording.events, events[np.delete(np.arange(50), [0, 7, 49])])


@pytest.mark.parametrize(
    ("chip", "height", "width"), [("DAVIS240C", 180, 240), ("DAVIS346B", 260, 346), ("Davis640", 480, 640)]
)
def test_davis(chip, height, width, tmp_path):
    events = random_events(200, height, width)
    address = files.davis_address(events)
    lines = [*files.AEDAT2_LINES, f"# AEChip: eu.seebetter.ini.chips.davis.{chip}"]
    path = write(tmp_path, "recording.aedat", files.aedat2(address, events.t, lines))
    recording = read_recording(path)
    assert recording.sensor == (height, width) and equal(recording.events, events)
    with path.open("rb") as file:
        theirs = dict(zip("txyp", cifar10_dvs()._load_events(file, filter_dvs=True), strict=True))
    assert like_spikingjelly(recording.events, theirs)

    address[[3, 4]] |= np.array([1 << 31, 1 << 10], np.uint32)  # a frame's sample and a trigger
    recording = decode_recording(files.aedat2(address, events.t), "file", sensor_size=(height, width))
    assert recording.skipped == 2 and equal(recording.events, events[np.delete(np.arange(200), [3, 4])])


@quick
@given(st.lists(event_lists(128, 128, 1000, least=0), min_size=1, max_size=4))
def test_aedat3(tmp_path_factory, parts):
    path = tmp_path_factory.getbasetemp() / "user01_led.aedat"
    other = files.aedat3_packet(random_events(3, 10, 10), kind=3)
    packets, written = [other], []
    for overflow, part in enumerate(parts):
        packets += [files.aedat3_packet(part, overflow), other]
        written.append(Events(part.t + (overflow << 31), part.x, part.y, part.p))
    path.write_bytes(files.aedat3(packets))
    expected = Events.make(*(np.concatenate([getattr(part, name) for part in written]) for name in "txyp"))
    if not len(expected):
        with pytest.raises(RecordingError, match="has no events"):
            read_recording(path)
        return
    recording = read_recording(path)
    assert recording.sensor == (128, 128) and recording.format == "aedat3"
    assert equal(recording.events, expected)
    assert like_spikingjelly(recording.events, utils().load_aedat_v3(path))


def test_aedat3_leaves_out_what_is_marked_invalid():
    events = random_events(20, 128, 128)
    valid = np.arange(20) % 3 != 0
    recording = decode_recording(files.aedat3([files.aedat3_packet(events, valid=valid)]), "file")
    assert recording.skipped == 7 and equal(recording.events, events[valid])


def test_aedat3_packets_may_have_room_for_more_events():
    events = random_events(5, 128, 128)
    packet = bytearray(files.aedat3_packet(events))
    header = np.frombuffer(packet, PACKET_HEADER, 1)
    header["number"] = 3
    recording = decode_recording(files.aedat3([bytes(packet)]), "file")
    assert equal(recording.events, events[:3])


@quick
@given(event_lists(34, 34, 2**23 - 1))
def test_atis(tmp_path_factory, events):
    path = tmp_path_factory.getbasetemp() / "00002.bin"
    path.write_bytes(files.atis(events))
    recording = read_recording(path)
    assert recording.sensor == (34, 34) and recording.format == "atis"
    assert equal(recording.events, events)
    assert like_spikingjelly(recording.events, utils().load_ATIS_bin(path))


def test_atis_row_240_says_that_time_has_overflowed():
    written = Events.make([5, 8000, 8191, 3, 8190, 8191, 1], [1, 2, 0, 3, 4, 0, 5], [1, 2, 240, 3, 4, 240, 5], [1] * 7)
    recording = decode_recording(files.atis(written), "00001.bin")
    assert recording.skipped == 2
    assert recording.events.t.tolist() == [5, 8000, 8192 + 3, 8192 + 8190, 2 * 8192 + 1]
    assert recording.events.x.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("compressed", [True, False])
def test_spikingjellys_npz(tmp_path, compressed):
    events = random_events(100, 128, 128)
    save = np.savez_compressed if compressed else np.savez
    # as its conversion of CIFAR10-DVS saves them
    save(
        tmp_path / "a.npz",
        t=events.t.astype(np.uint32),
        x=events.x.astype(np.uint32),
        y=events.y,
        p=events.p.astype(int),
    )
    recording = read_recording(tmp_path / "a.npz", sensor_size=(128, 128))
    assert recording.format == "numpy" and equal(recording.events, events)


@pytest.mark.parametrize("names", ["txyp", ("timestamp", "x", "y", "polarity"), ("x", "y", "p", "ts")])
def test_structured_arrays(tmp_path, names):
    events = random_events(100, 20, 30)
    columns = {"timestamp": "t", "ts": "t", "polarity": "p"}
    table = np.empty(100, [(name, "i8" if columns.get(name, name) == "t" else "u2") for name in names])
    for name in names:
        table[name] = getattr(events, columns.get(name, name))
    np.save(tmp_path / "a.npy", table)
    assert equal(read_recording(tmp_path / "a.npy", sensor_size=(20, 30)).events, events)


def test_polarity_may_be_a_sign_or_a_truth_value(tmp_path):
    events = random_events(100, 20, 30)
    for polarity in (2 * events.p.astype(np.int8) - 1, events.p.astype(bool)):
        np.savez(tmp_path / "a.npz", t=events.t, x=events.x, y=events.y, p=polarity, height=20, width=30)
        assert equal(read_recording(tmp_path / "a.npz").events, events)


def test_an_npz_may_say_its_sensors_size():
    events = random_events(300, 34, 40)
    recording = decode_recording(files.npz(events, 34, 40), "a.events.npz")
    assert recording.sensor == (34, 40) and equal(recording.events, events)


def test_aedat4(tmp_path):
    pytest.importorskip("aedat")
    events = random_events(100, 260, 346)
    path = write(tmp_path, "a.aedat4", files.aedat4([events[:60], events[60:]], 260, 346))
    recording = read_recording(path)
    assert recording.sensor == (260, 346) and recording.format == "aedat4"
    assert equal(recording.events, events)


def test_aedat4_without_its_package_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "aedat", None)
    path = write(tmp_path, "a.aedat4", files.aedat4([random_events(3, 10, 10)], 10, 10))
    with pytest.raises(ModuleNotFoundError, match=r"a\.aedat4.*pip install megasnn\[events\]"):
        read_recording(path)


def test_clips_between_two_times():
    events = Events.make([1, 2, 2, 5, 9], [0] * 5, [0] * 5, [0] * 5)
    assert events.between(2, 9).t.tolist() == [2, 2, 5]
    assert len(events.between(3, 5)) == 0
