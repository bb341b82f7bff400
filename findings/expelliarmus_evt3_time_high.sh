#!/usr/bin/env bash
# expelliarmus 1.1.12 makes an EVT 3 recording of steady events about twice as long as it is. TIME_HIGH holds the
# upper 12 bits of the time, TIME_LOW the lower ones. expelliarmus adds 4,096 us wherever TIME_LOW falls, also where a
# new TIME_HIGH has just said so, and keeps what it has added. It makes no difference whether TIME_HIGH is written at
# each change or before each event. Events that are 4,097 us apart are right, since TIME_LOW does not fall. The files
# that it writes have one TIME_HIGH: a pause of 5,000 us comes back as 904 us. evt3 0.4.1 reads by the rule. No error
# is raised.

source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
packages expelliarmus==1.1.12 evt3==0.4.1 numpy==2.4.6
program <<'PY'
import struct

import evt3
import numpy as np
from expelliarmus import Wizard


def write(path, times, repeat):
    """TIME_HIGH (type 8) at a change or, with `repeat`, before each event; TIME_LOW (6), row (0), column (2)."""
    words = []
    high = None
    for time in times:
        if repeat or time >> 12 != high:
            high = time >> 12
            words.append(0x8000 | high)
        words += [0x6000 | time & 0xFFF, 0x0000 | 20, 0x2000 | 1 << 11 | 10]
    header = b"% evt 3.0\n% format EVT3;height=720;width=1280\n% geometry 1280x720\n% end\n"
    with open(path, "wb") as file:
        file.write(header + struct.pack(f"<{len(words)}H", *words))


def read(path):
    events = Wizard(encoding="evt3").read(path)
    return events, evt3.decode_file(path).timestamp.astype(int)


for gap in (1000, 4097):
    times = np.arange(101) * gap
    for repeat in (False, True):
        write("recording.raw", times.tolist(), repeat)
        events, other = read("recording.raw")
        where = "before each event" if repeat else "at each change"
        print(f"101 events, one each {gap} us, TIME_HIGH {where}; the last time:")
        print(f"  written {times[-1]}, expelliarmus {events['t'][-1]}, evt3 {other[-1]}")

events = np.zeros(4, events.dtype)
events["t"] = [0, 100, 5_100, 20_100]
events["y"] = range(4)
Wizard(encoding="evt3").save("own.raw", events)
again, other = read("own.raw")
print("a file that expelliarmus writes:")
print("  written     ", events["t"].tolist())
print("  expelliarmus", again["t"].tolist())
print("  evt3        ", other.tolist())
PY
expected <<'OUT'
101 events, one each 1000 us, TIME_HIGH at each change; the last time:
  written 100000, expelliarmus 198304, evt3 100000
101 events, one each 1000 us, TIME_HIGH before each event; the last time:
  written 100000, expelliarmus 198304, evt3 100000
101 events, one each 4097 us, TIME_HIGH at each change; the last time:
  written 409700, expelliarmus 409700, evt3 409700
101 events, one each 4097 us, TIME_HIGH before each event; the last time:
  written 409700, expelliarmus 409700, evt3 409700
a file that expelliarmus writes:
  written      [0, 100, 5100, 20100]
  expelliarmus [0, 100, 1004, 3716]
  evt3         [0, 100, 1004, 3716]
OUT
