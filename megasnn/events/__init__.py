"""Event cameras: recordings of every usual format, checked, as frames for a network; and a simulated camera."""

from megasnn.events.arrays import LARGEST_SIDE
from megasnn.events.events import Events, Recording, RecordingError, SensorSize
from megasnn.events.frames import FrameOptions, count_events, events_to_frames, frame_starts, normalize_frames
from megasnn.events.movement import CLOSED_LOOP, SACCADES, STILL
from megasnn.events.reading import (
    FORMATS,
    SUFFIXES,
    decode_recording,
    detect_format,
    read_recording,
    recording_of_arrays,
)
from megasnn.events.resize import resize_frames
from megasnn.events.simulate import SimulatedSensor, simulate_recording

__all__ = [
    "CLOSED_LOOP",
    "FORMATS",
    "LARGEST_SIDE",
    "SACCADES",
    "STILL",
    "SUFFIXES",
    "Events",
    "FrameOptions",
    "Recording",
    "RecordingError",
    "SensorSize",
    "SimulatedSensor",
    "count_events",
    "decode_recording",
    "detect_format",
    "events_to_frames",
    "frame_starts",
    "normalize_frames",
    "read_recording",
    "recording_of_arrays",
    "resize_frames",
    "simulate_recording",
]
