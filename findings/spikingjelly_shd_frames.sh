#!/usr/bin/env bash
# SpikingJelly 2.0.0: frames of SHD that are split by time lose some spikes and count others twice. The file's times
# are float16, which has steps of 0.5 ms above 0.5 s and of 1 ms above 1 s. The edges of frames are computed in
# float16 as well, and the right edge of a frame is not the left edge of the next one. With the same times as float64
# no spike is lost or counted twice. The files here hold random spikes in SHD's form. Each sample has one spike of
# each of the 700 units, so that the sum over the frames says how often a spike was counted.

source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
packages torch==2.13.0 spikingjelly==2.0.0 h5py==3.16.0 numpy==2.4.6
module_shd
program <<'PY'
import os

import h5py
import numpy as np
from shd import SpikingHeidelbergDigits

SAMPLES = 100
for kind in (np.float16, np.float64):
    root = np.dtype(kind).name
    os.makedirs(f"{root}/events_h5")
    draw = np.random.default_rng(0)
    for split in ("train", "test"):
        with h5py.File(f"{root}/events_h5/shd_{split}.h5", "w") as file:
            times = file.create_dataset("spikes/times", (SAMPLES,), h5py.vlen_dtype(kind))
            units = file.create_dataset("spikes/units", (SAMPLES,), h5py.vlen_dtype(np.uint16))
            for sample in range(SAMPLES):
                times[sample] = np.sort(1.2 * draw.random(700)).astype(np.float16).astype(kind)
                units[sample] = draw.permutation(700).astype(np.uint16)
            file["labels"] = np.arange(SAMPLES, dtype=np.uint8) % 20
    for frames in (5, 10, 20):
        data = SpikingHeidelbergDigits(root, train=True, data_type="frame", frames_number=frames, split_by="time")
        counts = np.concatenate([data[sample][0].sum(0) for sample in range(SAMPLES)])
        lost = (counts == 0).sum()
        twice = (counts == 2).sum()
        print(f"the same times as {root}, {frames} frames, {counts.size} spikes: {lost} lost, {twice} counted twice")
PY
expected <<'OUT'
the same times as float16, 5 frames, 70000 spikes: 11 lost, 5 counted twice
the same times as float16, 10 frames, 70000 spikes: 19 lost, 22 counted twice
the same times as float16, 20 frames, 70000 spikes: 102 lost, 44 counted twice
the same times as float64, 5 frames, 70000 spikes: 0 lost, 0 counted twice
the same times as float64, 10 frames, 70000 spikes: 0 lost, 0 counted twice
the same times as float64, 20 frames, 70000 spikes: 0 lost, 0 counted twice
OUT
