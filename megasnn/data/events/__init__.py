"""Event cameras: recordings in the usual formats, their frames for a network, and a simulated camera."""

from megasnn.data.events.arrays import TimeUnit as TimeUnit
from megasnn.data.events.arrays import recording_of_arrays as recording_of_arrays
from megasnn.data.events.frames import Events as Events
from megasnn.data.events.frames import FrameOptions as FrameOptions
from megasnn.data.events.frames import Recording as Recording
from megasnn.data.events.frames import RecordingError as RecordingError
from megasnn.data.events.frames import SensorSize as SensorSize
from megasnn.data.events.frames import check_recording as check_recording
from megasnn.data.events.frames import make_frames as make_frames
from megasnn.data.events.frames import resize_frames as resize_frames
from megasnn.data.events.reading import RECORDING_SUFFIXES as RECORDING_SUFFIXES
from megasnn.data.events.reading import read_recording as read_recording
from megasnn.data.events.simulate import SACCADES as SACCADES
from megasnn.data.events.simulate import SimulatedSensor as SimulatedSensor
from megasnn.data.events.simulate import simulate_recording as simulate_recording
