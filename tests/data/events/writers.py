"""Writers of Prophesee's formats, independent of the readers: DAT, EVT 2, 2.1 and 3. Clocks wrap as a camera's do.

Sources: Prophesee's pages on the formats DAT, EVT 2.0, EVT 2.1 and EVT 3.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from megasnn.data.events import Events

DAT_LINES = ("% Data file containing CD events.", "% Version 2", "% Height 480", "% Width 640")
EVT2_LINES = ("% evt 2.0", "% format EVT2;height=480;width=640", "% end")
EVT21_LINES = ("% evt 2.1", "% format EVT21;endianness=little;height=480;width=640", "% end")
EVT21_SWAPPED_LINES = ("% evt 2.1", "% format EVT21;endianness=legacy;height=480;width=640", "% end")
EVT3_LINES = ("% evt 3.0", "% format EVT3;height=480;width=640", "% end")

WRAPS = {"dat": 1 << 32, "evt2": 1 << 34, "evt21": 1 << 34, "evt21 swapped": 1 << 34, "evt3": 1 << 24}
"""Microseconds after which the clock of each format begins anew."""

Row = tuple[int, int, int, int]


def text(lines: Sequence[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def dat(events: Events, lines: Sequence[str] = DAT_LINES, kind: int = 12) -> bytes:
    """A word of 32 bits for the time, then x in 14 bits, y in 14 and polarity in 4."""
    words = []
    for t, x, y, p in _rows(events):
        words += [t % (1 << 32), p << 28 | y << 14 | x]
    return text(lines) + bytes([kind, 8]) + np.array(words, "<u4").tobytes()


def evt2(events: Events, lines: Sequence[str] = EVT2_LINES) -> bytes:
    """A word TIME_HIGH only where the upper 28 bits of the time change, as other programs write it."""
    words = []
    high = -1
    for t, x, y, p in _rows(events):
        if t >> 6 != high:
            high = t >> 6
            words.append(8 << 28 | high % (1 << 28))
        words.append(p << 28 | t % 64 << 22 | x << 11 | y)
    return text(lines) + np.array(words, "<u4").tobytes()


def evt21(events: Events, lines: Sequence[str] = EVT21_LINES, swapped: bool = False, unused: int = 0) -> bytes:
    """Words of 64 bits, whose upper half is one of EVT 2; an event word has up to 32 pixels of a row in its lower half.

    Args:
        swapped: the upper half comes first (`endianness=legacy`).
        unused: lower half of a TIME_HIGH.
    """
    halves = []
    high = -1
    for group in _groups(events, 32):
        t, x, y, p = group[0]
        if t >> 6 != high:
            high = t >> 6
            halves.append((unused, 8 << 28 | high % (1 << 28)))
        halves.append((_mask(group, x), p << 28 | t % 64 << 22 | x << 11 | y))
    words = np.array(halves, "<u4")
    return text(lines) + (words[:, ::-1] if swapped else words).tobytes()


def evt3(events: Events, lines: Sequence[str] = EVT3_LINES) -> bytes:
    """Words of 16 bits, only for what changes; neighbours of a row become vectors of 12, 12 and 8 pixels."""
    words = []
    high, low, row = -1, -1, -1
    for group in _groups(events, 32):
        t, x, y, p = group[0]
        if t >> 12 != high:
            high, low = t >> 12, 0
            words.append(8 << 12 | high % (1 << 12))
        if t % (1 << 12) != low:
            low = t % (1 << 12)
            words.append(6 << 12 | low)
        if y != row:
            row = y
            words.append(row)
        if len(group) == 1:
            words.append(2 << 12 | p << 11 | x)
            continue
        mask = _mask(group, x)
        words += [3 << 12 | p << 11 | x, 4 << 12 | mask & 0xFFF, 4 << 12 | mask >> 12 & 0xFFF, 5 << 12 | mask >> 24]
    return text(lines) + np.array(words, "<u2").tobytes()


def evt21_swapped(events: Events) -> bytes:
    return evt21(events, EVT21_SWAPPED_LINES, swapped=True)


WRITERS = {"dat": dat, "evt2": evt2, "evt21": evt21, "evt21 swapped": evt21_swapped, "evt3": evt3}


def neighbours(count: int, start: int, longest_gap: int, seed: int = 0) -> Events:
    """Events of a sensor of 480 x 640, many of which lie beside the one before, at its time and with its polarity."""
    random = np.random.default_rng(seed)
    rows: list[Row] = []
    t = start
    while len(rows) < count:
        t += int(random.integers(0, longest_gap + 1))
        x, y, p = (int(random.integers(0, limit)) for limit in (640, 480, 2))
        length = int(random.choice([1, 1, 2, 5, 40]))
        columns = np.flatnonzero(random.random(length) < 0.7)
        rows += [(t, x + int(column), y, p) for column in columns if x + column < 640]
    return Events.make(*np.array(rows[:count]).T)


def _rows(events: Events) -> Iterator[Row]:
    columns = (getattr(events, name).tolist() for name in "txyp")
    return zip(*columns, strict=True)


def _groups(events: Events, width: int) -> list[list[Row]]:
    """Runs of events of one time, row and polarity whose columns rise, all less than `width` right of the first."""
    groups: list[list[Row]] = []
    for t, x, y, p in _rows(events):
        if groups:
            first, last = groups[-1][0], groups[-1][-1]
            if (t, y, p) == (first[0], *first[2:]) and last[1] < x < first[1] + width:
                groups[-1].append((t, x, y, p))
                continue
        groups.append([(t, x, y, p)])
    return groups


def _mask(group: list[Row], x: int) -> int:
    return sum(1 << (column - x) for _, column, _, _ in group)
