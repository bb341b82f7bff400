#!/usr/bin/env bash
# tonic 1.7: ToFrame(n_time_bins=N) leaves out the end of a recording. A bin's length is the duration divided by N and
# rounded down to a whole unit of time, so that up to N - 1 units behind the last bin are in no frame, and the last
# event never is. 307 events in 307 ms, with times in ms, lose 51 events in 256 bins. Times in us lose less. The same
# transform with one polarity writes 0 into the polarities of the recording that it is given.

source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
packages tonic==1.7.0 numpy==2.4.6
program <<'PY'
import numpy as np
from tonic.transforms import ToFrame


def recording(unit):
    events = np.zeros(307, [("t", int), ("x", int), ("y", int), ("p", int)])
    events["t"] = np.arange(307) * unit
    events["p"] = 1
    return events


for name, unit in (("ms", 1), ("us", 1000)):
    for bins in (10, 50, 256):
        frames = ToFrame(sensor_size=(1, 1, 2), n_time_bins=bins)(recording(unit))
        print(f"307 events, one a ms, times in {name}, {bins} bins: frames hold {int(frames.sum())}")
events = recording(1)
ToFrame(sensor_size=(1, 1, 1), n_time_bins=10)(events)
print("sum of the recording's polarities before 307, after a transform with one polarity", events["p"].sum())
PY
expected <<'OUT'
307 events, one a ms, times in ms, 10 bins: frames hold 300
307 events, one a ms, times in ms, 50 bins: frames hold 300
307 events, one a ms, times in ms, 256 bins: frames hold 256
307 events, one a ms, times in us, 10 bins: frames hold 306
307 events, one a ms, times in us, 50 bins: frames hold 306
307 events, one a ms, times in us, 256 bins: frames hold 306
sum of the recording's polarities before 307, after a transform with one polarity 0
OUT
