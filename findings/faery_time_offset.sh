#!/usr/bin/env bash
# faery 0.7.1 writes DAT and EVT 3 files whose first event is at time 0, and keeps the first time in a header line that
# other readers do not know ("% T0" and "% t0"). faery gets its times back; expelliarmus, evio and evt3 get all times
# earlier by it. Two recordings of one clock, such as both halves of a stereo pair, lose their offset that way.
# evt3 and expelliarmus both read the same EVT 3 file, evio and expelliarmus the same DAT file.

source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
packages faery==0.7.1 expelliarmus==1.1.12 evio==0.1.0 evt3==0.4.1 numpy==2.4.6
program <<'PY'
import evio
import evt3
import faery
import numpy as np
from expelliarmus import Wizard

events = np.zeros(3, faery.EVENTS_DTYPE)
events["t"] = [1_000_000, 1_000_010, 1_000_025]
events["x"] = [1, 2, 3]
events["y"] = [4, 5, 6]
print("written:", events["t"].tolist())
for name in ("recording.dat", "recording.raw"):
    faery.events_stream_from_array(events, dimensions=(16, 16)).to_file(name)
    with open(name, "rb") as file:
        lines = [line.decode().strip() for line in file.read().split(b"\n") if line[:4].lower() == b"% t0"]
    print(f"{name}, header line {lines}")
    print("  faery:", np.concatenate([packet["t"] for packet in faery.events_stream_from_file(name)]).tolist())
    encoding = "dat" if name.endswith("dat") else "evt3"
    print("  expelliarmus:", Wizard(encoding=encoding).read(name)["t"].tolist())
    if encoding == "dat":
        print("  evio:", evio.read(name)["t"].tolist())
    else:
        print("  evt3:", evt3.decode_file(name).timestamp.tolist())
PY
expected <<'OUT'
written: [1000000, 1000010, 1000025]
recording.dat, header line ['% T0 1000000']
  faery: [1000000, 1000010, 1000025]
  expelliarmus: [0, 10, 25]
  evio: [0, 10, 25]
recording.raw, header line ['% t0 1000000']
  faery: [1000000, 1000010, 1000025]
  expelliarmus: [0, 10, 25]
  evt3: [0, 10, 25]
OUT
