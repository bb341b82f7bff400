"""AEDAT 4, as DV writes it: compressed packets of several streams, decoded by the optional package aedat."""

from __future__ import annotations

import numpy as np

from megasnn.events.events import Events, Recording, RecordingError, SensorSize, check_events


def read_aedat4(path: str, sensor: SensorSize | None = None) -> Recording:
    """Reads the event stream of an AEDAT 4 file; frames, triggers and the motion sensor's data are left out.

    Args:
        path: of the file.
        sensor: by default what the file says.

    Raises:
        RecordingError: cut, empty, another format, no event stream or more than one, coordinates outside the sensor, or
            time that runs backwards.
        ModuleNotFoundError: the package aedat is not installed.
    """
    try:
        import aedat
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{path}: AEDAT 4 files are read with the package aedat: pip install megasnn[events]", name="aedat"
        ) from error
    packets: list[np.ndarray] = []
    try:
        decoder = aedat.Decoder(path)
        streams = [stream for stream in decoder.id_to_stream().values() if stream["type"] == "events"]
        packets.extend(packet["events"] for packet in decoder if "events" in packet)
    except RuntimeError as error:
        done = sum(len(packet) for packet in packets)
        raise RecordingError(path, f"cannot be decoded after event {done} ({error})") from error
    if len(streams) != 1:
        raise RecordingError(path, f"has {len(streams)} event streams; one is read")
    sensor = sensor or SensorSize(streams[0]["height"], streams[0]["width"])
    if not packets:
        raise RecordingError(path, "has no events")
    raw = np.concatenate(packets)
    events = Events.make(raw["t"], raw["x"], raw["y"], raw["on"])
    check_events(path, events, sensor)
    return Recording(events, sensor, "aedat4")
