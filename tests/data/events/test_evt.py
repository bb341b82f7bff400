"""EVT 2, 2.1 and 3: what was written is read, over every wrap of the clock; and what the words of others mean."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasnn.data.events import Events, RecordingError, SensorSize, read_recording
from megasnn.data.events.evt import decode_evt
from tests.data.events import writers
from tests.data.events.files import equal, event_lists, write

SENSOR = SensorSize(480, 640)
EVT = ["evt2", "evt21", "evt21 swapped", "evt3"]

# Words of EVT 3, as in Prophesee's table of them.
ROW, COLUMN, BASE, VECTOR_12, VECTOR_8, LOW, HIGH, TRIGGER, OTHERS, MORE = 0, 2, 3, 4, 5, 6, 8, 10, 14, 15
BRIGHTER = 1 << 11


def evt3(*words: tuple[int, int], lines: tuple[str, ...] = writers.EVT3_LINES) -> bytes:
    return writers.text(lines) + np.array([kind << 12 | value for kind, value in words], "<u2").tobytes()


def evt2(*words: int, lines: tuple[str, ...] = writers.EVT2_LINES) -> bytes:
    return writers.text(lines) + np.array(words, "<u4").tobytes()


def columns_of(events: Events) -> list[tuple[int, ...]]:
    return list(zip(*(getattr(events, name).tolist() for name in "txyp"), strict=True))


@pytest.mark.parametrize("name", EVT)
@pytest.mark.parametrize("before", [0, 9000])
def test_neighbours_are_read_in_vectors_and_over_the_wrap_of_the_clock(name, before) -> None:
    start = writers.WRAPS[name] - before if before else 5000
    events = writers.neighbours(4000, start, longest_gap=60)
    assert not before or events.t[0] < writers.WRAPS[name] < events.t[-1]
    recording = decode_evt(writers.WRITERS[name](events))
    assert recording.sensor == SENSOR and equal(recording.events, events)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(EVT), event_lists(*SENSOR, longest_time=8_000_000))
def test_any_events_are_read(name, events) -> None:
    assert equal(decode_evt(writers.WRITERS[name](events)).events, events)


@pytest.mark.parametrize("name", EVT)
def test_the_clock_wraps_again_and_again(name) -> None:
    turn = writers.WRAPS[name]
    t = np.arange(30) * (turn // 5)
    events = Events.make(t, np.arange(30), np.arange(30), np.arange(30) % 2)
    assert equal(decode_evt(writers.WRITERS[name](events)).events, events)


@pytest.mark.parametrize("swapped", [False, True])
def test_evt21_of_either_word_order(swapped) -> None:
    """Prophesee's page on EVT 2.1: 0x0102030405060708 is 04030201 08070605 from an IMX636, 08070605 04030201 from a
    GenX320. OpenEB 5.1.1 takes legacy from `% format` or from `% endianness`; without either the words tell."""
    time_high = ["80000002", "00000000"]
    event = ["10900003", "80000001"]  # brighter, 2 us behind the 64, x 512, y 3; pixels 0 and 31
    words = [half for word in (time_high, event) for half in (word if swapped else word[::-1])]
    body = b"".join(bytes.fromhex(half)[::-1] for half in words)
    order = "legacy" if swapped else "little"
    headers = [
        ("% evt 2.1", f"% format EVT21;endianness={order};height=480;width=640"),
        (f"% endianness {order}", "% evt 2.1", "% geometry 640x480", "% end"),
        ("% evt 2.1", "% geometry 640x480"),
    ]
    for lines in headers:
        events = decode_evt(writers.text(lines) + body).events
        assert columns_of(events) == [(130, 512, 3, 1), (130, 543, 3, 1)]


@pytest.mark.parametrize("unused", [0, 1, 0x12345678, 0xFFFF_FFFF])
@pytest.mark.parametrize("swapped", [False, True])
def test_evt21_whose_time_highs_have_any_lower_half(swapped, unused) -> None:
    """Prophesee's page says of it that it is unused, not that it is 0."""
    events = writers.neighbours(4000, 5000, longest_gap=60)
    data = writers.evt21(events, ("% evt 2.1", "% geometry 640x480"), swapped, unused)
    assert equal(decode_evt(data).events, events)


@pytest.mark.parametrize(("endianness", "swapped"), [("Little", False), ("LEGACY", True)])
@pytest.mark.parametrize("line", ["% endianness {}", "% format EVT21;endianness={};height=480;width=640"])
def test_the_word_order_of_evt21_may_be_in_capitals(line, endianness, swapped) -> None:
    """Too few words to tell the order by themselves."""
    events = Events.make([70, 70], [0, 31], [0, 0], [0, 0])
    data = writers.evt21(events, ("% evt 2.1", "% geometry 640x480", line.format(endianness)), swapped)
    assert equal(decode_evt(data).events, events)


def test_words_of_evt2() -> None:
    high, event = 8 << 28, 1 << 28 | 5 << 22 | 300 << 11 | 200
    trigger, others, more = 10 << 28 | 1, 14 << 28 | 7, 15 << 28 | 9
    data = evt2(event, high | 1, trigger, event, others, more, high | 2, event & ~(1 << 28))
    assert columns_of(decode_evt(data).events) == [(69, 300, 200, 1), (133, 300, 200, 0)], "none before a TIME_HIGH"


def test_words_of_evt3() -> None:
    """A vector moves its base; a TIME_HIGH that changes sets the lower part to 0, one that repeats does not."""
    data = evt3(
        (LOW, 9), (ROW, 1), (COLUMN, 3), (HIGH, 1), (VECTOR_8, 1), (COLUMN, BRIGHTER | 4), (LOW, 7), (TRIGGER, 1),
        (BASE, BRIGHTER | 100), (VECTOR_12, 0x801), (VECTOR_12, 0), (ROW, 2), (VECTOR_8, 0xF80), (HIGH, 1),
        (COLUMN, 5), (OTHERS, 3), (MORE, 4), (HIGH, 2), (VECTOR_8, 3), (LOW, 1), (COLUMN, 6),
    )  # fmt: skip
    assert columns_of(decode_evt(data).events) == [
        (4096, 4, 1, 1), (4103, 100, 1, 1), (4103, 111, 1, 1), (4103, 131, 2, 1), (4103, 5, 2, 0),
        (8192, 132, 2, 1), (8192, 133, 2, 1), (8193, 6, 2, 0),
    ]  # fmt: skip


@pytest.mark.parametrize("first", [0, 1, 2047, 2048, 4094, 4095])
def test_evt3_begins_anywhere_on_its_clock(first) -> None:
    data = evt3((HIGH, first), (ROW, 0), (COLUMN, 1), (HIGH, (first + 2) % 4096), (LOW, 9), (COLUMN, 2))
    assert np.diff(decode_evt(data).events.t).tolist() == [2 * 4096 + 9]


def test_a_writer_that_leaves_out_unchanged_time_highs() -> None:
    """One event each 10 ms for 60 s: TIME_HIGH falls from 4094, say, to 0 or 1. faery 0.7.1 gives 4,322 other times."""
    events = Events.make(np.arange(6000) * 10_000, np.arange(6000) % 640, np.arange(6000) % 480, np.arange(6000) % 2)
    assert equal(decode_evt(writers.evt3(events)).events, events)


@pytest.mark.parametrize("name", ["evt2", "evt21", "evt21 swapped"])
def test_a_step_back_of_evt2_stays_one_on_either_side_of_the_wrap(tmp_path, name) -> None:
    """OpenEB 5.1.1 counts a turn only from the last TIME_HIGH to 0; faery 0.7.1 counts one for any step back."""
    for start in (1000, writers.WRAPS[name] - 100):
        late = Events.make(start + np.array([0, 70, 150, 40, 210, 300]), range(6), range(6), [0, 1] * 3)
        path = write(tmp_path, "a.raw", writers.WRITERS[name](late))
        assert decode_evt(path.read_bytes()).events.t.tolist() == late.t.tolist()
        with pytest.raises(RecordingError, match="backwards at event 3.*--sort-events"):
            read_recording(path)
        assert equal(read_recording(path, sort=True).events, late[np.array([0, 3, 1, 2, 4, 5])])


def test_a_late_event_of_evt3_is_refused_or_sorted(tmp_path) -> None:
    """faery 0.7.1 gives it the time of the event before."""
    path = write(tmp_path, "a.raw", evt3((HIGH, 3), (ROW, 0), (LOW, 900), (COLUMN, 1), (LOW, 880), (COLUMN, 2)))
    with pytest.raises(RecordingError, match="backwards at event 1: 13168 us comes after 13188 us"):
        read_recording(path)
    assert read_recording(path, sort=True).events.x.tolist() == [2, 1]


@pytest.mark.parametrize(("before", "after"), [(7, 6), (3000, 952), (2047, 0), (0, 2049), (0, 4095), (900, 3000)])
def test_evt3_is_refused_and_not_sorted_where_its_clock_may_have_turned(tmp_path, before, after) -> None:
    path = write(tmp_path, "a.raw", evt3((HIGH, before), (ROW, 0), (COLUMN, 1), (HIGH, after), (COLUMN, 2)))
    for sort in (False, True):
        with pytest.raises(RecordingError, match=f"from {before} to {after} at byte .*8.4 s"):
            read_recording(path, sort=sort)


@pytest.mark.parametrize(("before", "after", "passed"), [(0, 2048, 2048), (2048, 4095, 2047), (3000, 951, 2047)])
def test_evt3_is_silent_for_up_to_half_a_turn(before, after, passed) -> None:
    data = evt3((HIGH, before), (ROW, 0), (COLUMN, 1), (HIGH, after), (COLUMN, 2))
    assert np.diff(decode_evt(data).events.t).tolist() == [passed << 12]


def test_evt3_without_time_highs_is_refused_and_not_sorted(tmp_path) -> None:
    """expelliarmus 1.1.12 writes the first TIME_HIGH alone; whole turns of the lower part may be missing."""
    path = write(tmp_path, "a.raw", evt3((ROW, 0), (HIGH, 1), (LOW, 4000), (COLUMN, 1), (LOW, 20), (COLUMN, 2)))
    for sort in (False, True):
        with pytest.raises(RecordingError, match="TIME_LOW falls from 4000 to 20 .*cannot be known"):
            read_recording(path, sort=sort)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (evt2(lines=("% evt 4.0", "% end")), "'4.0'.*2.0, 2.1, 3.0"),
        (evt2(lines=("% format HISTO3D;height=1;width=1",)), "HISTO3D"),
        (evt2(lines=("% Date 2020-09-25",)), "no line `% format` or `% evt`"),
        (evt2(), "no word TIME_HIGH"),
        (evt3((ROW, 1), (COLUMN, 2)), "no word TIME_HIGH"),
        (evt2(8 << 28) + b"\0", "cut.* word of 4 bytes.* last 1 "),
        (evt3((HIGH, 0)) + b"\0", "cut.* word of 2 bytes"),
        (writers.evt21_swapped(writers.neighbours(9, 0, 9)) + bytes(5), "cut.* word of 8 bytes.* last 5 "),
        (evt2(lines=("% evt 2.1", "% format EVT21;endianness=big;height=1;width=1")), "'big'.*little and legacy"),
        (evt2(8 << 28, lines=("% evt 2.0",)), "--sensor-size"),
        (evt2(8 << 28, lines=("% evt 2.0", "% geometry 640x-480")), "'-480'"),
        (evt2(8 << 28, lines=("% evt 2.0", "% geometry 0x480")), "'0'"),
        (b"% evt 2.0", "inside its header"),
        (b"% a\n" * (1 << 19), "header of more than 1048576 bytes"),
    ],
)
def test_what_cannot_be_read_is_named(data, named) -> None:
    with pytest.raises(ValueError, match=named):
        decode_evt(data)


def test_the_size_of_the_sensor_is_taken_from_the_header_first() -> None:
    body = (8 << 28, 1 << 28)
    fields = ("% evt 2.0", "% Width 64", "% Height 48")
    for lines in (fields, ("% evt 2.0", "% geometry 64x48"), ("% format EVT2;width=64;height=48",)):
        assert decode_evt(evt2(*body, lines=lines), SensorSize(9, 9)).sensor == (48, 64)
    assert decode_evt(evt2(*body, lines=("% evt 2.0",)), SensorSize(9, 9)).sensor == (9, 9)


@pytest.mark.parametrize("value", [0x025, 0xA25])
def test_data_that_begins_with_a_percent_sign_is_no_header(value) -> None:
    """Headers of cameras need no `% end`; the lower byte of a word may be '%', and there is a line end somewhere."""
    data = evt3((HIGH, value), (ROW, 0x20A), (COLUMN, 1), (ROW, 10), (COLUMN, 2), lines=writers.EVT3_LINES[:2])
    assert columns_of(decode_evt(data, SensorSize(600, 600)).events) == [
        (value << 12, 1, 0x20A, 0),
        (value << 12, 2, 10, 0),
    ]


def test_vectors_of_more_events_than_a_sample_may_have_take_no_memory(limits) -> None:
    vectors = [(VECTOR_12, 0xFFF)] * 50_000
    data = evt3((HIGH, 0), (ROW, 0), (BASE, 0), *vectors)
    limits(1 << 21)
    with pytest.raises(ValueError, match="--max-sample-mb"):
        decode_evt(data)
    limits(1 << 24)
    assert decode_evt(data).events.x.max() == 65535, "a column that no sensor has"
