"""AEDAT 4, as DV writes it: compressed packets of several streams, decoded by the optional package aedat."""

from __future__ import annotations

from typing import Any

import numpy as np

from megasnn.events.aedat4_layout import check_layout
from megasnn.events.checks import Decoded
from megasnn.events.events import Events, RecordingError, SensorSize
from megasnn.files.sample_size import SAMPLE_BYTES


def read_aedat4(data: bytes, path: str, sensor: SensorSize | None = None, limit: int = SAMPLE_BYTES) -> Decoded:
    """Reads the event stream of an AEDAT 4 file; frames, triggers and the motion sensor's data are left out.

    Args:
        data: the whole file, for the checks.
        path: of the file, for the decoder, which takes nothing else and reads the file again: it must not change.
        sensor: by default what the file says.
        limit: bytes that its packets may unpack to.

    Raises:
        RecordingError: cut, damaged, empty, too large, another format, no event stream or more than one.
        ModuleNotFoundError: the package aedat is not installed.
    """
    try:
        import aedat
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{path}: AEDAT 4 files are read with the package aedat: pip install megasnn[events]", name="aedat"
        ) from error
    check_layout(data, path, limit)
    packets: list[np.ndarray] = []
    try:
        decoder = aedat.Decoder(path)
        stream = _event_stream(decoder.id_to_stream(), path)
        packets.extend(packet["events"] for packet in decoder if "events" in packet)
    except RecordingError:
        raise
    except BaseException as error:
        # What its Rust code panics about is no Exception.
        if not isinstance(error, RuntimeError) and type(error).__name__ != "PanicException":
            raise
        done = sum(len(packet) for packet in packets)
        raise RecordingError(path, f"cannot be decoded after event {done} ({error})") from error
    if not packets:
        raise RecordingError(path, "has no events")
    raw = np.concatenate(packets)
    events = Events.make(raw["t"], raw["x"], raw["y"], raw["on"])
    return Decoded(events, sensor or SensorSize(stream["height"], stream["width"]), "aedat4")


def _event_stream(streams: dict[int, dict[str, Any]], path: str) -> dict[str, Any]:
    found = [stream for stream in streams.values() if stream["type"] == "events"]
    if len(found) != 1:
        raise RecordingError(path, f"has {len(found)} event streams; exactly one can be read")
    return found[0]
