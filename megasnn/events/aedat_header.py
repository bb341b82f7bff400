"""What AEDAT files say of themselves: a version, lines of text that start with '#', and the name of a known sensor."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megasnn.events.recording import RecordingError, SensorSize

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


# jAER and cAER close the header with such a line, after which a '#' is data.
_LAST_LINE = re.compile(rb"#\s*(End Of ASCII Header|!END-HEADER)\s*$|#!END-HEADER\s*$", re.IGNORECASE)
_LARGEST = 1 << 20
_VERSION = re.compile(rb"#!AER-DAT(\d+\.\d+)")


@dataclass(frozen=True)
class Header:
    """The lines of a header without their line ends, and the first byte after them."""

    lines: tuple[str, ...]
    end: int

    def value(self, key: str) -> str | None:
        """What follows "# key:" in the first line that has it."""
        pattern = re.compile(rf"#\s*{re.escape(key)}\s*:\s*(.*)", re.IGNORECASE)
        return next((match[1].strip() for line in self.lines if (match := pattern.match(line))), None)


def version_of(data: bytes) -> str | None:
    """The version in the first line of an AEDAT file, such as "2.0"; None where there is none."""
    match = _VERSION.match(data)
    return match[1].decode() if match else None


def read_header(data: bytes, name: str, version: str) -> Header:
    """Reads lines while they start with '#', or up to the line that says that it is the last one.

    Raises:
        RecordingError: no version or another one, or a file that ends inside the header.
    """
    found = version_of(data)
    if found != version:
        has = f"is AEDAT {found}" if found else "does not begin with a version (#!AER-DAT...)"
        raise RecordingError(name, f"{has}, not AEDAT {version}" if data else "is empty (0 bytes)")
    lines, position = [], 0
    while data[position : position + 1] == b"#":
        end = data.find(b"\n", position, _LARGEST)
        if end < 0:
            problem = "ends inside its header" if len(data) <= _LARGEST else f"has a header above {_LARGEST} bytes"
            raise RecordingError(name, f"{problem}, in the line at byte {position}")
        line = data[position:end].rstrip()
        lines.append(line.decode("latin-1"))
        position = end + 1
        if _LAST_LINE.match(line):
            break
    return Header(tuple(lines), position)
