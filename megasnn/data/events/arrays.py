"""Recordings from NumPy arrays as other programs save them.

t, x, y and p are four arrays, fields in a structured array, or columns in an array [N, 4].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megasnn.common.files import in_message, require_size
from megasnn.data.events.frames import EVENT_BYTES, LARGEST_SIDE, NO_SIZE, Events, Recording, SensorSize

TimeUnit = Literal["s", "ms", "us", "ns"]

_NAMES = {
    "t": ("t", "ts", "timestamp", "timestamps"),
    "x": ("x", "xs"),
    "y": ("y", "ys"),
    "p": ("p", "ps", "pol", "polarity", "polarities", "on"),
}
_ORDERS = ("txyp", "xytp", "xypt")  # column orders in use
_NUMBERS = "iubf"  # kinds of NumPy types
_BOUNDS = {"x": (0, LARGEST_SIDE - 1), "y": (0, LARGEST_SIDE - 1), "p": (-1, 1)}
_LATEST = 1 << 61  # in microseconds, so that no sum of two overflows
_MICROSECONDS: dict[TimeUnit, tuple[int, int]] = {"s": (10**6, 1), "ms": (1000, 1), "us": (1, 1), "ns": (1, 1000)}
_UNITS = "--time-unit s, ms, us or ns"


def recording_of_arrays(
    arrays: Mapping[str, NDArray], sensor: SensorSize | None = None, time_unit: TimeUnit | None = None
) -> Recording:
    """Recording from named arrays, unsorted.

    Takes arrays t, x, y and p (0 and 1, or -1 and 1), or one array with these fields or columns; height and width are
    optional. Floats must be whole numbers.

    Args:
        time_unit: of t; by default whole microseconds.

    Raises:
        ValueError: an array is missing, invalid or ambiguous.
    """
    columns = _columns(arrays, sensor)
    require_size("its events", EVENT_BYTES * columns["t"].size)
    for name, values in columns.items():
        if values.dtype.kind not in _NUMBERS or values.ndim != 1 or len(values) != len(columns["t"]):
            raise ValueError(
                "t, x, y and p must be numbers of one dimension and of equal length; "
                f"{name} is {values.dtype} {list(values.shape)}"
            )
    t = _microseconds(columns["t"], time_unit)
    for name, (least, most) in _BOUNDS.items():
        _require_whole(name, columns[name], least, most)
    sensor = _sensor_of(arrays) or sensor
    if sensor is None:
        raise ValueError(NO_SIZE)
    return Recording(Events.make(t, columns["x"], columns["y"], columns["p"] > 0), sensor)


def _columns(arrays: Mapping[str, NDArray], sensor: SensorSize | None) -> dict[str, NDArray]:
    """Arrays t, x, y and p, however they are laid out."""
    missing = _missing(arrays)
    if not missing:
        return _by_name(arrays)
    # A structured array or an array [N, 4], under any name; height and width may lie beside it.
    tables = []
    for array in arrays.values():
        has_columns = array.ndim == 2 and array.shape[1] == len(_NAMES) and array.dtype.kind in _NUMBERS
        if array.dtype.names or has_columns:
            tables.append(array)
    if len(tables) != 1:
        found = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
        raise ValueError(f"has no array {missing[0]}; it has {found or 'none'}")
    table = tables[0]
    if table.dtype.names is None:
        return dict(zip(_order_of(table, sensor), table.T, strict=True))
    fields = {name: table[name] for name in table.dtype.names}
    missing = _missing(fields)
    if missing:
        raise ValueError(f"has no field {missing[0]} in its structured array; it has {', '.join(fields)}")
    return _by_name(fields)


def _missing(arrays: Mapping[str, NDArray]) -> list[str]:
    return [name for name, names in _NAMES.items() if not arrays.keys() & set(names)]


def _by_name(arrays: Mapping[str, NDArray]) -> dict[str, NDArray]:
    columns = {}
    for name, names in _NAMES.items():
        found = [each for each in names if each in arrays]
        if len(found) > 1:
            raise ValueError(f"has both {found[0]} and {found[1]}; leave one out")
        columns[name] = arrays[found[0]]
    return columns


def _order_of(table: NDArray, sensor: SensorSize | None) -> str:
    """The only order in `_ORDERS` that fits all columns."""
    fitting = []
    for order in _ORDERS:
        columns = dict(zip(order, table.T, strict=True))
        if _fits(columns, sensor):
            fitting.append(order)
    if len(fitting) != 1:
        found = "could be " + " or ".join(fitting) if fitting else f"are none of {', '.join(_ORDERS)}"
        raise ValueError(
            f"has an array [N, 4] whose columns {found}, with t in order of time; save arrays t, x, y and p instead"
        )
    return fitting[0]


def _fits(columns: Mapping[str, NDArray], sensor: SensorSize | None) -> bool:
    height, width = sensor or (LARGEST_SIDE, LARGEST_SIDE)
    bounds = _BOUNDS | {"x": (0, width - 1), "y": (0, height - 1)}
    inside = all(_is_whole(columns[name], *bound).all() for name, bound in bounds.items())
    return inside and bool((columns["t"][1:] >= columns["t"][:-1]).all())


def _is_whole(values: NDArray, least: int, most: int) -> NDArray[np.bool_]:
    """Mask of whole numbers from `least` to `most`."""
    if values.dtype.kind == "f":
        # float16 would turn the bounds into infinity.
        values = values.astype(np.promote_types(values.dtype, np.float32))
    inside = (values >= least) & (values <= most)
    return inside & (values == np.floor(values))


def _require_whole(name: str, values: NDArray, least: int, most: int, advice: str = "") -> None:
    wrong = ~_is_whole(values, least, most)
    if wrong.any():
        index = int(wrong.argmax())
        raise ValueError(
            f"{name} = {values[index]} ({values.dtype}) at event {index} is no whole number in {least}..{most}{advice}"
        )


def _microseconds(t: NDArray, unit: TimeUnit | None) -> NDArray[np.int64]:
    """Times rounded to microseconds; whole numbers without a unit."""
    times, parts = _MICROSECONDS[unit or "us"]
    latest = _LATEST // times
    if t.dtype.kind == "f" and unit is not None:
        _require_whole("t", np.floor(t), -latest, latest)
        return np.rint(t.astype(np.float64) * times / parts).astype(np.int64)
    advice = f"; if t does not count microseconds, give its unit ({_UNITS})" if unit is None else ""
    _require_whole("t", t, -latest, latest, advice)
    # In integers: float64 has 53 bits, and nanoseconds since 1970 need 61.
    whole = t.astype(np.int64)
    return whole * times if parts == 1 else (whole + parts // 2) // parts


def _sensor_of(arrays: Mapping[str, NDArray]) -> SensorSize | None:
    if "height" not in arrays or "width" not in arrays:
        return None
    sides = []
    for name in ("height", "width"):
        side = arrays[name].item() if arrays[name].size == 1 else None
        if not isinstance(side, int) or not 0 < side <= LARGEST_SIDE:
            raise ValueError(f"{name} must be one integer from 1 to {LARGEST_SIDE}, not {in_message(arrays[name])}")
        sides.append(side)
    return SensorSize(*sides)
