"""N-MNIST's .bin (also .bs2 and N-Caltech101): 5 bytes an event, big-endian: x 8 bits, y 8, polarity 1, time 23.

Rows that no sensor has, y = 240, mark an overflow of the time: everything after such an event is 2^13 us later, as in
the data set's own reader (Orchard et al. 2015). Coordinates, polarity and time are otherwise those of SpikingJelly's
`load_ATIS_bin`.
"""

from __future__ import annotations

import numpy as np

from megasnn.events.recording import Decoded, Events, RecordingError, SensorSize

EVENT_BYTES = 5
N_MNIST = SensorSize(34, 34)
OVERFLOW_ROW = 240
OVERFLOW_TIME = 1 << 13

_EVENT = np.dtype([("x", "u1"), ("y", "u1"), ("high", "u1"), ("low", ">u2")])


def decode_atis(data: bytes, name: str, sensor: SensorSize | None = None) -> Decoded:
    """Decodes the bytes of such a file, which has no header.

    Args:
        data: the whole file.
        name: of the file, for messages.
        sensor: by default N-MNIST's, 34 x 34.

    Raises:
        RecordingError: cut.
    """
    if len(data) % EVENT_BYTES:
        raise RecordingError(
            name,
            f"is cut: {len(data)} bytes are not a multiple of {EVENT_BYTES}; "
            f"the event at byte {len(data) // EVENT_BYTES * EVENT_BYTES} is not complete",
        )
    raw = np.frombuffer(data, _EVENT)
    t = (raw["high"] & np.int64(0x7F)) << 16 | raw["low"]
    kept = None
    overflows = raw["y"] == OVERFLOW_ROW
    if overflows.any():
        t += np.cumsum(overflows) * np.int64(OVERFLOW_TIME)
        kept = np.flatnonzero(~overflows)
        raw, t = raw[kept], t[kept]
    events = Events(t, raw["x"].astype(np.uint16), raw["y"].astype(np.uint16), raw["high"] >> np.uint8(7))

    def place(index: int) -> str:
        number = index if kept is None else int(kept[index])
        return f"event {number} (byte {EVENT_BYTES * number})"

    sensor = sensor or N_MNIST
    return Decoded(events, sensor, "atis", skipped=len(overflows) - len(events), place=place)
