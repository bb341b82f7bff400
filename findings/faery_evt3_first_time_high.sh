#!/usr/bin/env bash
# faery 0.7.1: in an EVT 3 recording whose first TIME_HIGH is 4095, time stands still once the clock has turned over.
# The camera's clock of 24 bits turns over every 16.8 s, so that a recording may begin there by chance. faery takes the
# first word for a turn, leaves it out of the time, and gives all events behind the real turn the time of the one before
# it. A recording that begins at 4000 is right. evt3 0.4.1 reads both as they were written. No error is raised.

source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
packages faery==0.7.1 evt3==0.4.1 numpy==2.4.6
program <<'PY'
import struct

import evt3
import faery
import numpy as np


def write(path, times):
    """TIME_HIGH (type 8) where it changes, then TIME_LOW (6), row (0) and column with polarity (2) of each event."""
    words = []
    high = None
    for time in times:
        if time >> 12 != high:
            high = time >> 12
            words.append(0x8000 | high & 0xFFF)
        words += [0x6000 | time & 0xFFF, 0x0000 | 20, 0x2000 | 1 << 11 | 10]
    header = b"% evt 3.0\n% format EVT3;height=720;width=1280\n% geometry 1280x720\n% end\n"
    with open(path, "wb") as file:
        file.write(header + struct.pack(f"<{len(words)}H", *words))


for first_high in (4000, 4095):
    times = [(first_high << 12) + 3950 + 50 * number for number in range(6)]
    write("recording.raw", times)
    read = np.concatenate([packet["t"] for packet in faery.events_stream_from_file("recording.raw")])
    print(f"TIME_HIGH {first_high}, events every 50 us, after the first event:")
    print("  written", [time - times[0] for time in times])
    print("  faery  ", (read.astype(int) - int(read[0])).tolist())
    other = evt3.decode_file("recording.raw").timestamp.astype(int)
    print("  evt3   ", (other - other[0]).tolist())
PY
expected <<'OUT'
TIME_HIGH 4000, events every 50 us, after the first event:
  written [0, 50, 100, 150, 200, 250]
  faery   [0, 50, 100, 150, 200, 250]
  evt3    [0, 50, 100, 150, 200, 250]
TIME_HIGH 4095, events every 50 us, after the first event:
  written [0, 50, 100, 150, 200, 250]
  faery   [0, 50, 100, 100, 100, 100]
  evt3    [0, 50, 100, 150, 200, 250]
OUT
