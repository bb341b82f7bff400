#!/usr/bin/env bash
# evio 0.1.0 lets time fall back by 71.6 minutes in a DAT recording whose 32-bit clock turns over. Its documentation
# says that every reader returns events in order of time, and its functions count on it: 300 us have a duration of
# 71.6 minutes, and the first 1,000 us hold no event. Times beyond 32 bits lose their upper bits when evio writes a
# DAT file. evutils 0.3.18 lets time go on. No error is raised.

source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
packages evio==0.1.0 evutils==0.3.18 numpy==2.4.6
program <<'PY'
import evio
import numpy as np
from evutils.io import EventReader

times = 2**32 + np.array([-150, -50, 50, 150])
header = b"% Data file containing CD events.\n% Version 2\n% Date 2020-01-01 00:00:00\n% Height 240\n% Width 304\n"
# The kind of an event (12), its bytes (8), then time and x | y << 14 | polarity << 28.
words = np.stack([times % 2**32, np.full(4, 3 | 5 << 14 | 1 << 28)], axis=1).astype("<u4")
with open("recording.dat", "wb") as file:
    file.write(header + bytes([12, 8]) + words.tobytes())

print("written:", times.tolist())
with EventReader("recording.dat") as reader:
    print("evutils:", np.concatenate([part.t for part in reader]).tolist())
events = evio.read("recording.dat")
print("evio:   ", events["t"].tolist())
print("  duration", evio.duration(events))
print("  events in the first 1,000 us:", len(evio.first(events, 1000)))

evio.write("own.dat", evio.from_arrays([3] * 4, [5] * 4, times, [1] * 4))
print("evio writes these times and reads", evio.read("own.dat")["t"].tolist())
PY
expected <<'OUT'
written: [4294967146, 4294967246, 4294967346, 4294967446]
evutils: [4294967146, 4294967246, 4294967346, 4294967446]
evio:    [4294967146, 4294967246, 50, 150]
  duration 4294967196
  events in the first 1,000 us: 0
evio writes these times and reads [4294967146, 4294967246, 50, 150]
OUT
