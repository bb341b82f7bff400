"""Header in Prophesee's files (DAT and EVT): lines beginning with '%', each a name and a value."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megasnn.data.events.frames import LARGEST_SIDE, NO_SIZE, SensorSize

# The data may begin with a '%', too. A header line continues with a blank, has no control characters, and ends.
_LINE = re.compile(rb"%(?: ([^\x00-\x08\x0a-\x1f]*))?(\r?\n|\Z)")
_LAST_LINE = "end"
_HEADER_BYTES = 1 << 20
_SIDE = re.compile(r"\s*\d{1,5}\s*", re.ASCII)


@dataclass(frozen=True)
class Header:
    """A header's fields.

    Attributes:
        fields: values by lower-case name; the last of equal names.
        end: first byte after the header.
    """

    fields: dict[str, str]
    end: int

    def format_options(self) -> dict[str, str]:
        """Options in `format` (`EVT3;height=720;width=1280`), its name under ``""``."""
        name, *options = self.fields.get("format", "").split(";")
        found = {"": name.strip().upper()}
        for option in options:
            key, _, value = option.partition("=")
            found[key.strip().lower()] = value.strip()
        return found

    def sensor(self, fallback: SensorSize | None) -> SensorSize:
        """Sensor size in `format`, `geometry` (WIDTHxHEIGHT), or `height` and `width`. Raises ValueError."""
        width, _, height = self.fields.get("geometry", "").lower().partition("x")
        for source in (self.format_options(), {"height": height, "width": width}, self.fields):
            if source.get("height") and source.get("width"):
                return SensorSize(_side(source["height"]), _side(source["width"]))
        if fallback is None:
            raise ValueError(NO_SIZE)
        return fallback


def read_header(data: bytes) -> Header:
    """Reads a header, which may be empty or lack `% end`. Raises ValueError if cut, or larger than 1 MB."""
    fields: dict[str, str] = {}
    position = 0
    while line := _LINE.match(data, position):
        if not line[2]:
            raise ValueError(f"ends inside its header, in the line at byte {position}")
        if line.end() > _HEADER_BYTES:
            raise ValueError(f"has a header of more than {_HEADER_BYTES} bytes")
        position = line.end()
        name, _, value = (line[1] or b"").decode("latin-1").strip().partition(" ")
        if name.lower() == _LAST_LINE:
            break
        fields[name.lower()] = value.strip()
    return Header(fields, position)


def _side(text: str) -> int:
    side = int(text) if _SIDE.fullmatch(text) else 0
    if not 0 < side <= LARGEST_SIDE:
        raise ValueError(f"has a header with the invalid sensor height or width {text!r}")
    return side
