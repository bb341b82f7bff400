"""EVT 2, 2.1 and 3: Prophesee's raw files, words of which each has its type in the upper four bits.

A time has an upper part in a word of its own (TIME_HIGH), which holds for all words behind it. Words before the first
one have no time and are left out: a recording begins anywhere in a camera's stream.

Source: Prophesee's pages on the formats EVT 2.0, 2.1 and 3.0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megasnn.common.files import require_size
from megasnn.data.events.clock import unwrap
from megasnn.data.events.frames import EVENT_BYTES, LARGEST_SIDE, Events, Recording, SensorSize
from megasnn.data.events.header import Header, read_header

_VERSIONS = {"2.0": "EVT2", "2.1": "EVT21", "3.0": "EVT3"}
_WORD_BYTES = {"EVT2": 4, "EVT21": 8, "EVT3": 2}

_TIME_HIGH = 8  # in every version
_HIGH_BITS = 28  # of EVT 2 and 2.1; the lower six of the time are in the event

# Types of EVT 3.
_ROW = 0
_COLUMN = 2
_BASE = 3
_VECTOR_12 = 4
_VECTOR_8 = 5
_TIME_LOW = 6
_PIXELS = np.zeros(16, np.uint32)
"""Pixels of a vector, by its type."""
_PIXELS[_VECTOR_12] = 12
_PIXELS[_VECTOR_8] = 8
_PART_BITS = 12
"""Bits of TIME_HIGH, and of TIME_LOW."""
_HALF = 1 << (_PART_BITS - 1)


def decode_evt(data: bytes, sensor: SensorSize | None = None) -> Recording:
    """Decodes EVT of the version that the header says, in `format` (EVT2, EVT21, EVT3) or in `evt` (2.0, 2.1, 3.0).

    Args:
        sensor: for files whose header does not say its size.

    Raises:
        ValueError: cut, another version, no size of the sensor, too many events, or times that cannot be known.
    """
    header = read_header(data)
    name = header.format_options()[""] or _VERSIONS.get(header.fields.get("evt", ""), "")
    if name not in _WORD_BYTES:
        said = header.fields.get("format") or header.fields.get("evt")
        found = f"is EVT of version {said!r}" if said else "has no line `% format` or `% evt` with its version"
        raise ValueError(f"{found}; read are `% format {', '.join(_WORD_BYTES)}` and `% evt {', '.join(_VERSIONS)}`")
    size = _WORD_BYTES[name]
    if rest := (len(data) - header.end) % size:
        raise ValueError(f"is cut: it ends inside a word of {size} bytes; without its last {rest} it is read")
    shape = header.sensor(sensor)
    if name == "EVT3":
        return Recording(_decode_evt3(np.frombuffer(data, "<u2", offset=header.end), header.end), shape)
    words = np.frombuffer(data, "<u4", offset=header.end)
    if name == "EVT2":
        return Recording(_decode_evt2(words, np.ones(len(words), np.uint8)), shape)
    first, second = words.reshape(-1, 2).T
    if _halves_are_swapped(header, first, second):
        return Recording(_decode_evt2(first, second), shape)
    return Recording(_decode_evt2(second, first), shape)


def _halves_are_swapped(header: Header, first: NDArray[np.uint32], second: NDArray[np.uint32]) -> bool:
    """Whether the upper half of a 64-bit word comes first: `endianness=legacy`, as the IMX636 sends them.

    Where the header does not say it, the order is that in which there are more words TIME_HIGH, whose lower half is 0.
    """
    said = header.format_options().get("endianness") or header.fields.get("endianness", "")
    if said not in ("", "little", "legacy"):
        raise ValueError(f"has words of endianness {said!r}; little and legacy are read")
    if said:
        return said == "legacy"
    swapped = np.count_nonzero((first >> 28 == _TIME_HIGH) & (second == 0))
    whole = np.count_nonzero((second >> 28 == _TIME_HIGH) & (first == 0))
    return bool(swapped > whole)


def _decode_evt2(words: NDArray[np.uint32], pixels: NDArray[np.unsignedinteger]) -> Events:
    """Events of EVT 2 and 2.1.

    Types 0 and 1 are events of that polarity: 6 bits of the time, x (11 bits), y (11). Bit i of `pixels` says whether
    the pixel i columns to the right of x sent one. TIME_HIGH counts 64 us, and wraps after 4.8 hours.
    """
    kind = words >> 28
    highs = _require_times(np.flatnonzero(kind == _TIME_HIGH))
    time_high = unwrap(words[highs] & ((1 << _HIGH_BITS) - 1), _HIGH_BITS)
    at = np.flatnonzero((kind <= 1) & (pixels != 0))
    at = at[at > highs[0]]
    time = time_high[_latest(highs, at)] << 6 | words[at] >> 22 & 0x3F
    which, offset = _set_bits(pixels[at])
    word = words[at][which]
    return Events.make(time[which], (word >> 11 & 0x7FF) + offset, word & 0x7FF, word >> 28)


def _decode_evt3(words: NDArray[np.uint16], start: int) -> Events:
    """Events of EVT 3, where each word changes one part of what is known: the row, the column, the time.

    A word COLUMN is an event. A word VECTOR_12 or VECTOR_8 has one for each set bit, from the column of the last BASE
    on, which it moves by 12 or 8. Columns before the first row, and vectors before the first base, have no place and
    are left out.

    Args:
        start: byte of the first word, for errors.
    """
    kind: NDArray[np.uint16] = words >> np.uint16(12)
    value: NDArray[np.uint16] = words & np.uint16(0xFFF)
    highs = _require_times(np.flatnonzero(kind == _TIME_HIGH))
    rows = np.flatnonzero(kind == _ROW)
    bases = np.flatnonzero(kind == _BASE)

    columns = np.flatnonzero(kind == _COLUMN)
    vectors = np.flatnonzero((kind == _VECTOR_12) | (kind == _VECTOR_8))
    vectors = vectors[vectors > (bases[0] if len(bases) else len(words))]
    at = np.sort(np.concatenate([columns, vectors]), kind="stable")
    at = at[at > max(highs[0], rows[0] if len(rows) else len(words))]

    # The word that says polarity and column of the first pixel: the event's own, or a base.
    is_vector = kind[at] != _COLUMN
    source = at.copy()
    source[is_vector] = bases[_latest(bases, at[is_vector])]
    pixels = _PIXELS[kind]
    moved = np.cumsum(pixels, dtype=np.uint32) - pixels  # by all vectors before a word
    column = (value[source] & 0x7FF) + moved[at] - moved[source]
    mask = np.where(is_vector, value[at] & ((1 << pixels[at]) - 1), 1).astype(np.uint16)

    which, offset = _set_bits(mask)
    time = _times_of_evt3(kind, value, highs, at, start)
    row = value[rows[_latest(rows, at)]] & 0x7FF
    # Vectors without a base between them may go on beyond 16 bits: a column that no sensor has stays one.
    x = np.minimum(column[which] + offset, LARGEST_SIDE - 1)
    return Events.make(time[which], x, row[which], value[source][which] >> 11)


def _times_of_evt3(
    kind: NDArray[np.uint16], value: NDArray[np.uint16], highs: NDArray[np.intp], at: NDArray[np.intp], start: int
) -> NDArray[np.int64]:
    """Time of the words `at`: 12 bits of the last TIME_HIGH, then 12 of the last TIME_LOW.

    A TIME_HIGH that changes sets the lower part to 0.
    """
    time_high = _unwrap_evt3(value[highs].astype(np.int64), start + 2 * highs)
    changed = highs[np.diff(time_high, prepend=-1) != 0]
    is_low = kind == _TIME_LOW
    is_low[: highs[0]] = False
    is_low[changed] = True
    lows = np.flatnonzero(is_low)
    time_low = np.where(kind[lows] == _TIME_LOW, value[lows], 0).astype(np.int64)
    lost = (np.diff(time_low) < -_HALF) & (kind[lows[1:]] == _TIME_LOW)
    if lost.any():
        index = int(lost.argmax())
        raise ValueError(
            f"TIME_LOW falls from {time_low[index]} to {time_low[index + 1]} at byte {start + 2 * lows[index + 1]} "
            "without a new TIME_HIGH, as expelliarmus writes EVT 3: its times cannot be known; write EVT 2 or DAT"
        )
    return time_high[_latest(highs, at)] << _PART_BITS | time_low[_latest(lows, at)]


def _unwrap_evt3(high: NDArray[np.int64], byte: NDArray[np.intp]) -> NDArray[np.int64]:
    """TIME_HIGH without its wraps. The clock turns in 16.8 s, and cannot tell a step back from a long silence."""
    steps = np.diff(high)
    unclear = (steps < 0) & (steps >= -_HALF) | (steps > _HALF)
    if unclear.any():
        index = int(unclear.argmax())
        raise ValueError(
            f"TIME_HIGH goes from {high[index]} to {high[index + 1]} at byte {byte[index + 1]}: a step back, or more "
            "than 8.4 s without a word; EVT 3 cannot tell, since its clock turns in 16.8 s: cut the file there"
        )
    return unwrap(high, _PART_BITS)


def _require_times(highs: NDArray[np.intp]) -> NDArray[np.intp]:
    if not len(highs):
        raise ValueError("has no word TIME_HIGH, so that no event has a time")
    return highs


def _latest(markers: NDArray[np.intp], at: NDArray[np.intp]) -> NDArray[np.intp]:
    """Index of the last of the `markers` before each of the positions `at`; both are in order."""
    return np.searchsorted(markers, at) - 1


def _set_bits(masks: NDArray[np.unsignedinteger]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Index and number of each set bit of the `masks`, from the lowest bit of the first one on.

    Raises:
        ValueError: they are too many events for a sample; memory for them is not taken.
    """
    require_size("its events", EVENT_BYTES * int(np.bitwise_count(masks).sum(dtype=np.int64)))
    octets = masks.astype(masks.dtype.newbyteorder("<")).view(np.uint8).reshape(len(masks), masks.itemsize)
    which, bit = np.nonzero(np.unpackbits(octets, axis=1, bitorder="little"))
    return which, bit
