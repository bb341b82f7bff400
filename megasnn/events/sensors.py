"""Event cameras that AEDAT files name, and their sizes."""

from __future__ import annotations

from megasnn.events.events import SensorSize

DVS128 = SensorSize(128, 128)

SENSORS = {
    "DVS128": DVS128,
    "DAVIS240": SensorSize(180, 240),
    "DAVIS346": SensorSize(260, 346),
    "DAVIS640": SensorSize(480, 640),
}
KNOWN = ", ".join(f"{name} ({size.height} x {size.width})" for name, size in SENSORS.items())


def sensor_named(text: str) -> SensorSize | None:
    """The size of the sensor whose name is in `text`, such as "eu.seebetter.ini.chips.davis.DAVIS346B"."""
    return next((size for name, size in SENSORS.items() if name in text.upper()), None)
