"""Event cameras: recordings of the usual formats, checked, as frames for a network; and a simulated camera."""

from megasnn.events.frames import FrameOptions as FrameOptions
from megasnn.events.frames import make_frames as make_frames
from megasnn.events.frames import resize_frames as resize_frames
from megasnn.events.reading import SUFFIXES as SUFFIXES
from megasnn.events.reading import read_recording as read_recording
from megasnn.events.reading import recording_of_arrays as recording_of_arrays
from megasnn.events.recording import Events as Events
from megasnn.events.recording import Recording as Recording
from megasnn.events.recording import RecordingError as RecordingError
from megasnn.events.recording import SensorSize as SensorSize
from megasnn.events.recording import check_recording as check_recording
from megasnn.events.simulate import SACCADES as SACCADES
from megasnn.events.simulate import SimulatedSensor as SimulatedSensor
from megasnn.events.simulate import simulate_recording as simulate_recording
