#!/usr/bin/env bash
# SpikingJelly 2.0.0: a sample of SHD has one label as events and another one as frames. Events have the file's number.
# Frames are stored in folders named by it, and numbered in the order of their names as text: 0, 1, 10, 11, ..., so that
# 18 of the 20 classes change. A network that is trained on frames says 2 for what the data set calls 10.
# The files here hold random spikes in SHD's form.

source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
packages torch==2.13.0 spikingjelly==2.0.0 h5py==3.16.0 numpy==2.4.6
module_shd
program <<'PY'
import os

import h5py
import numpy as np
from shd import SpikingHeidelbergDigits

os.makedirs("shd/events_h5")
draw = np.random.default_rng(0)
for split in ("train", "test"):
    with h5py.File(f"shd/events_h5/shd_{split}.h5", "w") as file:
        times = file.create_dataset("spikes/times", (20,), h5py.vlen_dtype(np.float16))
        units = file.create_dataset("spikes/units", (20,), h5py.vlen_dtype(np.uint16))
        for sample in range(20):
            times[sample] = np.sort(draw.random(200)).astype(np.float16)
            units[sample] = draw.integers(0, 700, 200).astype(np.uint16)
        file["labels"] = np.arange(20, dtype=np.uint8)

events = SpikingHeidelbergDigits("shd", train=True, data_type="event")
frames = SpikingHeidelbergDigits("shd", train=True, data_type="frame", frames_number=4, split_by="number")
of_events = [int(events[sample][1]) for sample in range(20)]
of_frames = {int(os.path.basename(path).split(".")[0]): label for path, label in frames.samples}
print("labels of samples 0 to 19 as events:", *of_events)
print("labels of samples 0 to 19 as frames:", *(of_frames[sample] for sample in range(20)))
print("that differ:", sum(of_frames[sample] != of_events[sample] for sample in range(20)))
PY
expected <<'OUT'
labels of samples 0 to 19 as events: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19
labels of samples 0 to 19 as frames: 0 1 12 13 14 15 16 17 18 19 2 3 4 5 6 7 8 9 10 11
that differ: 18
OUT
