"""Header of Prophesee's files (DAT and EVT): lines of text that begin with '%', each a name and a value."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megasnn.data.events.frames import LARGEST_SIDE, SensorSize

NO_SIZE = "does not say the size of its sensor; pass it (--sensor-size HEIGHT WIDTH)"

_HEADER_BYTES = 1 << 20
_LAST_LINE = "end"


@dataclass(frozen=True)
class Header:
    """Fields of a header.

    Attributes:
        fields: values by name in lower case; of equal names the last one.
        end: first byte behind the header.
    """

    fields: dict[str, str]
    end: int

    def format_options(self) -> dict[str, str]:
        """Options of the field `format`, such as `EVT3;height=720;width=1280`; the name is under ``""``."""
        name, *options = self.fields.get("format", "").split(";")
        pairs = (option.partition("=") for option in options)
        return {"": name.strip().upper()} | {key.strip().lower(): value.strip() for key, _, value in pairs}

    def sensor(self, fallback: SensorSize | None) -> SensorSize:
        """Size of the sensor: of the `format`, of `geometry` (WIDTHxHEIGHT), or of `height` and `width`.

        Raises:
            ValueError: the header does not say it and there is no fallback, or it is none.
        """
        options = self.format_options()
        width, _, height = self.fields.get("geometry", "").lower().partition("x")
        for source in (options, {"width": width, "height": height}, self.fields):
            sides = [source.get(side, "") for side in ("height", "width")]
            if all(sides):
                break
        else:
            if fallback is None:
                raise ValueError(NO_SIZE)
            return fallback
        if not all(re.fullmatch(r"\s*\d{1,5}\s*", side, re.ASCII) and 0 < int(side) <= LARGEST_SIDE for side in sides):
            raise ValueError(f"its header says height {sides[0]!r} and width {sides[1]!r}, which is no size of a sensor")
        return SensorSize(*map(int, sides))


def read_header(data: bytes) -> Header:
    """Reads the lines at the beginning of a file. It needs none, and the line `% end` need not be there.

    Raises:
        ValueError: the file ends inside a line.
    """
    fields: dict[str, str] = {}
    position = 0
    while data.startswith(b"%", position):
        end = data.find(b"\n", position, _HEADER_BYTES)
        if end < 0:
            raise ValueError(f"ends inside its header, in the line at byte {position}")
        line = data[position + 1 : end].decode("latin-1").strip()
        position = end + 1
        name, _, value = line.partition(" ")
        if name.lower() == _LAST_LINE:
            break
        fields[name.lower()] = value.strip()
    return Header(fields, position)
