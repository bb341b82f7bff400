#!/usr/bin/env bash
# One AEDAT 2.0 recording of a DVS128 has another image in SpikingJelly 2.0.0 than in tonic 1.7. SpikingJelly's reader of
# CIFAR10-DVS takes the bits that the address calls y for x and turns both, and turns the polarity; tonic's reader hands
# the bits on. The same event is at (127 - y, 127 - x) with the other polarity: frames and trained weights do not carry
# over. What SpikingJelly imports beside and does not use here is replaced by an empty module.

source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
packages torch==2.13.0 spikingjelly==2.0.0 tonic==1.7.0 numpy==2.4.6
program <<'PY'
import struct
import sys
import types
from importlib.machinery import ModuleSpec

import torch
from tonic.io import read_dvs_128

torchaudio = types.ModuleType("torchaudio")
torchaudio.__spec__ = ModuleSpec("torchaudio", None)
sys.modules["torchaudio"] = torchaudio
register = torch.library.register_fake
torch.library.register_fake = lambda name, *args, **kwargs: (
    (lambda function: function) if str(name).startswith("torchvision::") else register(name, *args, **kwargs)
)

from spikingjelly.datasets.cifar10_dvs import _load_origin_data

with open("recording.aedat", "wb") as file:
    file.write(b"#!AER-DAT2.0\r\n# This is a raw AE data file - do not edit\r\n")
    for time, y, x, bit in ((100, 0, 0, 1), (200, 10, 3, 0), (300, 10, 4, 1)):
        file.write(struct.pack(">II", y << 8 | x << 1 | bit, time))

_, events = read_dvs_128("recording.aedat")
print("address: y bits 10, x bits 3, polarity bit 0, at 200 us")
print("tonic, its second event:       ", {name: int(events[name][1]) for name in "xytp"})
events = _load_origin_data("recording.aedat")
print("SpikingJelly, its second event:", {name: int(events[name][1]) for name in "xytp"})
PY
expected <<'OUT'
OUT
