#!/usr/bin/env bash
# tonic 1.7: four of the five readers of AEDAT 2 and 3.1 in tonic.io raise for every file. The function that reads the
# header has three results since it also returns the time of the start, and only read_davis_346 takes three. Of the
# other readers, read_dvs_128 is for the DVS128 and read_dvs_ibm for the files of DVS128 Gesture.

source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
packages tonic==1.7.0 numpy==2.4.6
program <<'PY'
import struct

import tonic.io

EVENTS = 3

# AEDAT 2.0: big-endian pairs of address and time. AEDAT 3.1: a packet's header of 28 bytes, then little-endian pairs.
with open("aedat2.aedat", "wb") as file:
    file.write(b"#!AER-DAT2.0\r\n# This is a raw AE data file - do not edit\r\n# Timestamps tick is 1 us\r\n")
    file.write(struct.pack(">II", 5 << 8 | 3 << 1 | 1, 1000) * EVENTS)
with open("aedat3.aedat", "wb") as file:
    file.write(b"#!AER-DAT3.1\r\n#Format: RAW\r\n#Source 1: DVS128\r\n#!END-HEADER\r\n")
    file.write(struct.pack("<HHIIIIII", 1, 1, 8, 4, 0, EVENTS, EVENTS, EVENTS))
    file.write(struct.pack("<II", 5 << 17 | 3 << 2 | 1 << 1 | 1, 1000) * EVENTS)

for name, path in (
    ("read_dvs_128", "aedat2.aedat"),
    ("read_dvs_red", "aedat2.aedat"),
    ("read_dvs_346mini", "aedat2.aedat"),
    ("read_dvs_ibm", "aedat3.aedat"),
    ("read_davis_346", "aedat2.aedat"),
):
    try:
        print(f"{name}, {path}: {len(getattr(tonic.io, name)(path)[-1])} events")
    except ValueError as error:
        print(f"{name}, {path}: ValueError, {str(error).split(' (')[0]}")
PY
expected <<'OUT'
read_dvs_128, aedat2.aedat: ValueError, too many values to unpack
read_dvs_red, aedat2.aedat: ValueError, too many values to unpack
read_dvs_346mini, aedat2.aedat: ValueError, too many values to unpack
read_dvs_ibm, aedat3.aedat: ValueError, too many values to unpack
read_davis_346, aedat2.aedat: 3 events
OUT
