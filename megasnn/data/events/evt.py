"""EVT 2, 2.1 and 3, Prophesee's raw formats: words with their type in the upper four bits.

Source: Prophesee's pages on EVT 2.0, 2.1 and 3.0.
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

# In every version, TIME_HIGH is the upper part of the time for all words after it. Events before the first one have no
# time and are left out: a recording may begin anywhere in a camera's stream.
_TIME_HIGH = 8
_HIGH_BITS = 28  # of EVT 2 and 2.1; an event holds the lower six bits of the time
_EVT21_TYPES = (0, 1, _TIME_HIGH, 10, 14, 15)  # polarities, TIME_HIGH, EXT_TRIGGER, OTHERS, CONTINUED

# Types of EVT 3.
_ROW = 0
_COLUMN = 2
_BASE = 3
_VECTOR_12 = 4
_VECTOR_8 = 5
_TIME_LOW = 6
_PIXELS = np.zeros(16, np.uint32)  # pixels of a vector, by type
_PIXELS[_VECTOR_12] = 12
_PIXELS[_VECTOR_8] = 8
_PART_BITS = 12  # of TIME_HIGH and TIME_LOW
_HALF = 1 << (_PART_BITS - 1)


def decode_evt(data: bytes, sensor: SensorSize | None = None) -> Recording:
    """Decodes EVT; the version is in the header, `format` (EVT2, EVT21, EVT3) or `evt` (2.0, 2.1, 3.0).

    Args:
        sensor: for headers without a size.

    Raises:
        ValueError: cut, another version, no sensor size, too many events, or ambiguous times.
    """
    header = read_header(data)
    name = header.format_options()[""] or _VERSIONS.get(header.fields.get("evt", ""), "")
    if name not in _WORD_BYTES:
        version = header.fields.get("format") or header.fields.get("evt")
        problem = f"is EVT of version {version!r}" if version else "has no line `% format` or `% evt` with its version"
        raise ValueError(f"{problem}; supported: `% format {', '.join(_WORD_BYTES)}`, `% evt {', '.join(_VERSIONS)}`")
    size = _WORD_BYTES[name]
    rest = (len(data) - header.end) % size
    if rest:
        raise ValueError(f"is cut: it ends inside a word of {size} bytes; remove its last {rest} bytes to read it")
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
    """Whether a 64-bit word's upper half comes first (`endianness=legacy`, from the IMX636)."""
    endianness = header.format_options().get("endianness") or header.fields.get("endianness", "")
    if endianness.lower() not in ("", "little", "legacy"):
        raise ValueError(f"has words of endianness {endianness!r}; supported: little and legacy")
    if endianness:
        return endianness.lower() == "legacy"
    return _type_evidence(first, second) > _type_evidence(second, first)


def _type_evidence(upper: NDArray[np.uint32], lower: NDArray[np.uint32]) -> tuple[int, int, int]:
    """Evidence for the upper halves, larger for the true ones: compared in this order."""
    # True types are all known. The lower half of TIME_HIGH is unused, mostly 0. Few pixel masks look like TIME_HIGH.
    kind = upper >> 28
    is_time_high = kind == _TIME_HIGH
    known = int(np.isin(kind, _EVT21_TYPES).sum())
    unused = int((is_time_high & (lower == 0)).sum())
    return known, unused, int(is_time_high.sum())


def _decode_evt2(words: NDArray[np.uint32], pixels: NDArray[np.unsignedinteger]) -> Events:
    """Decodes EVT 2 and 2.1. Bit i in `pixels` is an event at column x + i."""
    kind = words >> 28
    highs = _require_times(np.flatnonzero(kind == _TIME_HIGH))
    # TIME_HIGH counts 64 us and wraps after 4.8 hours.
    time_high = unwrap(words[highs] & ((1 << _HIGH_BITS) - 1), _HIGH_BITS)
    # Types 0 and 1 are events with that polarity: 6 bits of time, x (11 bits), y (11).
    at = np.flatnonzero((kind <= 1) & (pixels != 0))
    at = at[at > highs[0]]
    time = time_high[_latest(highs, at)] << 6 | words[at] >> 22 & 0x3F
    which, offset = _set_bits(pixels[at])
    word = words[at][which]
    return Events.make(time[which], (word >> 11 & 0x7FF) + offset, word & 0x7FF, word >> 28)


def _decode_evt3(words: NDArray[np.uint16], start: int) -> Events:
    """Decodes EVT 3, whose words change row, column or time. `start`: first byte, for errors."""
    kind: NDArray[np.uint16] = words >> np.uint16(12)
    value: NDArray[np.uint16] = words & np.uint16(0xFFF)
    highs = _require_times(np.flatnonzero(kind == _TIME_HIGH))
    rows = np.flatnonzero(kind == _ROW)
    bases = np.flatnonzero(kind == _BASE)

    # COLUMN is an event. VECTOR_12 and VECTOR_8 have an event for each set bit, from the last BASE on, which they
    # move by 12 or 8. Columns before the first row and vectors before the first base are left out.
    columns = np.flatnonzero(kind == _COLUMN)
    vectors = np.flatnonzero((kind == _VECTOR_12) | (kind == _VECTOR_8))
    vectors = vectors[vectors > (bases[0] if len(bases) else len(words))]
    at = np.sort(np.concatenate([columns, vectors]), kind="stable")
    at = at[at > max(highs[0], rows[0] if len(rows) else len(words))]

    # The word with polarity and column of the first pixel: the event itself, or a base.
    is_vector = kind[at] != _COLUMN
    source = at.copy()
    source[is_vector] = bases[_latest(bases, at[is_vector])]
    pixels = _PIXELS[kind]
    # Columns, by all vectors before a word.
    moved = np.cumsum(pixels, dtype=np.uint32) - pixels
    column = (value[source] & 0x7FF) + moved[at] - moved[source]
    mask = np.where(is_vector, value[at] & ((1 << pixels[at]) - 1), 1).astype(np.uint16)

    which, offset = _set_bits(mask)
    time = _times_of_evt3(kind, value, highs, at, start)
    row = value[rows[_latest(rows, at)]] & 0x7FF
    # Vectors without a base between them may pass 16 bits: an impossible column must stay impossible.
    x = np.minimum(column[which] + offset, LARGEST_SIDE - 1)
    return Events.make(time[which], x, row[which], value[source][which] >> 11)


def _times_of_evt3(
    kind: NDArray[np.uint16], value: NDArray[np.uint16], highs: NDArray[np.intp], at: NDArray[np.intp], start: int
) -> NDArray[np.int64]:
    """Times of the words `at`: 12 bits from the last TIME_HIGH, 12 from the last TIME_LOW."""
    time_high = _unwrap_evt3(value[highs].astype(np.int64), start + 2 * highs)
    # The lower part is 0 after a new TIME_HIGH.
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
    """TIME_HIGH without its wraps. Raises ValueError for a step back that could be a long silence."""
    steps = np.diff(high)
    unclear = (steps < 0) & (steps >= -_HALF) | (steps > _HALF)
    if unclear.any():
        index = int(unclear.argmax())
        raise ValueError(
            f"TIME_HIGH goes from {high[index]} to {high[index + 1]} at byte {byte[index + 1]}: a step back, or more "
            "than 8.4 s of silence; EVT 3 cannot tell, since its clock wraps every 16.8 s: cut the file there"
        )
    return unwrap(high, _PART_BITS)


def _require_times(highs: NDArray[np.intp]) -> NDArray[np.intp]:
    if not len(highs):
        raise ValueError("has no word TIME_HIGH, so no event has a time")
    return highs


def _latest(markers: NDArray[np.intp], at: NDArray[np.intp]) -> NDArray[np.intp]:
    """Index of the last marker before each position; both sorted."""
    return np.searchsorted(markers, at) - 1


def _set_bits(masks: NDArray[np.unsignedinteger]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Mask index and bit number for each set bit, in order. Raises ValueError for too many."""
    require_size("its events", EVENT_BYTES * int(np.bitwise_count(masks).sum(dtype=np.int64)))
    octets = masks.astype(masks.dtype.newbyteorder("<")).view(np.uint8).reshape(len(masks), masks.itemsize)
    which, bit = np.nonzero(np.unpackbits(octets, axis=1, bitorder="little"))
    return which, bit
