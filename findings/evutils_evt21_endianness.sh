#!/usr/bin/env bash
# evutils 0.3.18 reads an EVT 2.1 recording of a GenX320 as other events, ten times as many here, and raises no error.
# EVT 2.1 has two orders of words: an IMX636 sends the upper half of 64 bits first ("legacy"), a GenX320 the lower one
# ("little"). Prophesee's software writes the order into the line `% format`. evutils knows only the first order. It
# looks for a line `% endianness`, where it refuses the second one, and not into `% format`.

source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
packages evutils==0.3.18 numpy==2.4.6
program <<'PY'
import numpy as np
from evutils.io import EventReader

TIMES = (1000, 1010, 1100, 1200)
HEADERS = {
    "% format": "% evt 2.1\n% format EVT21;height=320;width=320;endianness={}\n% geometry 320x320\n% end\n",
    "% endianness": "% evt 2.1\n% endianness {}\n% format EVT21;height=320;width=320\n% geometry 320x320\n% end\n",
}


def words(order):
    """TIME_HIGH (type 8, the time in 64 us) where it changes, then pixel (64, 100) with polarity 1 (type 1)."""
    high = None
    values = []
    for time in TIMES:
        if time >> 6 != high:
            high = time >> 6
            values.append(8 << 60 | high << 32)
        values.append(1 << 60 | (time & 63) << 54 | 64 << 43 | 100 << 32 | 1)
    whole = np.array(values, "<u8")
    return (whole << 32 | whole >> 32 if order == "legacy" else whole).tobytes()


print(f"written: {len(TIMES)} events, t {list(TIMES)}, x 64, y 100")
for line, header in HEADERS.items():
    for order in ("legacy", "little"):
        with open("recording.raw", "wb") as file:
            file.write(header.format(order).encode() + words(order))
        try:
            with EventReader("recording.raw") as reader:
                parts = [(part.t, part.x, part.y, part.p) for part in reader]
        except NotImplementedError as error:
            print(f"{order} in `{line}`: {type(error).__name__}")
            continue
        t, x, y, p = (np.concatenate(column).tolist() for column in zip(*parts))
        print(f"{order} in `{line}`: {len(t)} events, t {t[:4]}, x {x[:4]}, y {y[:4]}")
PY
expected <<'OUT'
written: 4 events, t [1000, 1010, 1100, 1200], x 64, y 100
legacy in `% format`: 4 events, t [1000, 1010, 1100, 1200], x [64, 64, 64, 64], y [100, 100, 100, 100]
little in `% format`: 40 events, t [0, 0, 0, 0], x [0, 1, 2, 3], y [0, 0, 0, 0]
legacy in `% endianness`: 4 events, t [1000, 1010, 1100, 1200], x [64, 64, 64, 64], y [100, 100, 100, 100]
little in `% endianness`: NotImplementedError
OUT
