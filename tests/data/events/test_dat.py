"""DAT of both kinds of events: what was written is read, over the wrap of the clock, with the headers of others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasnn.data.events import Events, RecordingError, SensorSize, read_recording
from megasnn.data.events.dat import decode_dat
from tests.data.events import writers
from tests.data.events.files import equal, event_lists, write

SENSOR = SensorSize(480, 640)
SMALL = writers.neighbours(40, 0, 60)

# First lines of an N-CARS recording, and of a file that evio 0.1.0 writes; both are of kind 0.
HEADERS = {
    "N-CARS": ("% Data file containing N9Chronocam7Event2dE events.", "% Version 2", "% Date 2017-10-31 11:27:54"),
    "evio": ("% Date 1970-01-01 00:00:00", "% evio", "% Width 640", "% Height 480"),
    "end": ("% Height 480", "% Width 640", "% end"),
}


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([0, 12]), event_lists(*SENSOR, longest_time=2**32 - 1))
def test_any_events_of_either_kind_are_read(kind, events) -> None:
    t = np.sort(events.t // 2)  # no gap of more than half of the clock
    events = Events(t, events.x, events.y, events.p)
    recording = decode_dat(writers.dat(events, kind=kind))
    assert recording.sensor == SENSOR and equal(recording.events, events)


def test_the_clock_wraps_after_71_minutes() -> None:
    events = writers.neighbours(4000, writers.WRAPS["dat"] - 9000, longest_gap=60)
    assert events.t[0] < writers.WRAPS["dat"] < events.t[-1]
    assert equal(decode_dat(writers.dat(events)).events, events)


@pytest.mark.parametrize("start", [0, 2**32 - 1000])
def test_a_late_event_is_refused_or_sorted_on_either_side_of_the_wrap(tmp_path, start) -> None:
    late = Events.make(start + np.array([0, 990, 1010, 995, 1020, 1030]), range(6), range(6), [0, 1] * 3)
    path = write(tmp_path, "a.dat", writers.dat(late))
    with pytest.raises(RecordingError, match="backwards at event 3.*--sort-events"):
        read_recording(path)
    assert equal(read_recording(path, sort=True).events, late[np.array([0, 1, 3, 2, 4, 5])])


def test_a_clock_that_begins_with_a_zero_has_not_wrapped() -> None:
    events = Events.make([0, 3 << 30, (3 << 30) + 5, (1 << 32) + 7], range(4), range(4), [0] * 4)
    assert decode_dat(writers.dat(events)).events.t.tolist() == events.t.tolist()


@pytest.mark.parametrize("name", HEADERS)
def test_headers_of_others(name) -> None:
    """Without a version it is 2, as for expelliarmus 1.1.12, evio 0.1.0 and OpenEB 5.1.1; the size may be missing."""
    fallback = SENSOR if name == "N-CARS" else None
    recording = decode_dat(writers.dat(SMALL, HEADERS[name], kind=0), fallback)
    assert recording.sensor == SENSOR and equal(recording.events, SMALL)


@pytest.mark.parametrize("kind", ["00", "0c"])
def test_bytes_of_an_event(kind) -> None:
    """t, then polarity 1, y 239 and x 303, as expelliarmus 1.1.12, evio 0.1.0 and evutils 0.3.18 read them."""
    data = writers.text(HEADERS["end"]) + bytes.fromhex(f"{kind} 08 04030201 2fc13b10")
    events = decode_dat(data).events
    assert (events.t, events.x, events.y, events.p) == ([0x01020304], [303], [239], [1])


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (writers.dat(SMALL, ("% Version 1",)), "version '1'"),
        (writers.dat(SMALL, kind=14), "kind 14 and 8 bytes.*0 or 12"),
        (writers.dat(SMALL).replace(b"\x0c\x08", b"\x0c\x10", 1), "kind 12 and 16 bytes"),
        (writers.dat(SMALL)[:-3], "cut.* event of 8 bytes.* last 5 "),
        (writers.text(writers.DAT_LINES) + b"\x0c", "cut.*header"),
        (b"% Version 2", "inside its header"),
        (writers.dat(SMALL, HEADERS["N-CARS"]), "--sensor-size"),
        (writers.dat(SMALL, ("% Height 99999", "% Width 640")), "99999"),
        (b"", "cut"),
    ],
)
def test_what_cannot_be_read_is_named(data, named) -> None:
    with pytest.raises(ValueError, match=named):
        decode_dat(data)
