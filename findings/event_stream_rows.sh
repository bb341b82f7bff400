#!/usr/bin/env bash
# faery 0.7.1 and event_stream 1.6.3 both read and write .es files, and count rows from opposite ends. Row 2 of 16 that
# one writes is row 13 for the other, both ways, while each reads its own files as it wrote them. A network that was
# trained on recordings read by one sees those read by the other upside down.

source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
packages faery==0.7.1 event_stream==1.6.3 numpy==2.4.6
program <<'PY'
import event_stream
import faery
import numpy as np

events = np.zeros(1, faery.EVENTS_DTYPE)
events["x"] = 1
events["y"] = 2
faery.events_stream_from_array(events, dimensions=(16, 16)).to_file("faery.es")
with event_stream.Decoder("faery.es") as decoder:
    read = np.concatenate(list(decoder))
print("faery writes     x 1, y 2; event_stream reads x", read["x"][0], "y", read["y"][0])

other = np.zeros(1, event_stream.dvs_dtype)
other["x"] = 1
other["y"] = 2
with event_stream.Encoder("other.es", "dvs", 16, 16) as encoder:
    encoder.write(other)
(packet,) = faery.events_stream_from_file("other.es")
print("event_stream writes x 1, y 2; faery reads     x", packet["x"][0], "y", packet["y"][0])
PY
expected <<'OUT'
faery writes     x 1, y 2; event_stream reads x 1 y 13
event_stream writes x 1, y 2; faery reads     x 1 y 13
OUT
