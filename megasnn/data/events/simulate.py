"""A simulated event camera in front of a moving image: recordings without a camera and without downloads.

The pixel is that of Lichtsteiner et al. 2008: it remembers the logarithm of the light at its last event and sends the
next one when the logarithm has risen (polarity 1) or fallen (0) by its threshold. Thresholds differ between pixels.
Crossings between two rendered images are placed in time by linear interpolation, as ESIM does (Rebecq et al. 2018), and
every pixel also sends noise at a constant rate.

The image moves along a path: corners (x, y), x to the right and y down, in units of the sensor's `reach`. Each way
between two corners takes equally long. It begins and ends at rest, with the speed of half a wave of a sine between, as
that of something with a mass that a motor turns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megasnn.common.random import keyed_seed
from megasnn.data.events.frames import Events, Recording, SensorSize

Path = tuple[tuple[float, float], ...]

SACCADES: Path = ((-0.5, -0.5), (0.0, 0.5), (0.5, -0.5), (-0.5, -0.5))
"""N-MNIST: three saccades along the sides of a triangle (Orchard et al. 2015)."""


@dataclass(frozen=True)
class SimulatedSensor:
    """A camera and the stage before it; by default N-MNIST's size, movement and duration."""

    size: SensorSize = SensorSize(34, 34)  # pixels
    image_size: int = 26  # pixels of the sensor that the image's longer side covers
    path: Path = SACCADES  # corners of the way that the image takes
    reach: float = 6.0  # pixels that a path's unit is long
    duration: int = 300_000  # of the recording in microseconds
    frame_time: int = 5_000  # microseconds between two rendered images
    threshold: float = 0.4  # change of the natural logarithm of the light that makes an event
    mismatch: float = 0.03  # standard deviation of the threshold between pixels, as a share of it
    background: float = 0.1  # light where the image is 0; where it is 1 the light is 1
    noise_rate: float = 1.0  # events per second and pixel that nothing causes


def simulate_recording(image: NDArray, *key: int | str, sensor: SimulatedSensor | None = None) -> Recording:
    """Records an image that moves before the camera; there are no events where it neither moves nor makes noise.

    Args:
        image: [h, w], values from 0 (background) to 1.
        key: of this recording's randomness, e.g. ("digits", seed, index); equal keys give equal recordings.
    """
    sensor = sensor or SimulatedSensor()
    random = np.random.default_rng(keyed_seed("simulated recording", *key))
    times = np.arange(0, sensor.duration + 1, sensor.frame_time)
    signal = _threshold_crossings(_log_light(image, times, sensor), times, sensor, random)

    # Noise is a Poisson process on each pixel.
    height, width = sensor.size
    count = random.poisson(sensor.noise_rate * sensor.duration / 1e6 * height * width)
    noise = [random.integers(0, limit, count) for limit in (sensor.duration, width, height, 2)]

    t, x, y, p = (np.concatenate(pair) for pair in zip(signal, noise, strict=True))
    order = np.argsort(t, kind="stable")
    return Recording(Events.make(t[order], x[order], y[order], p[order]), sensor.size)


def _log_light(image: NDArray, times: NDArray, sensor: SimulatedSensor) -> NDArray:
    """Logarithm of the light on each pixel at each time, [times, height * width]."""
    corners = np.array(sensor.path, np.float64)
    way, part = np.divmod(times / sensor.duration * (len(corners) - 1), 1)
    passed = way + (1 - np.cos(np.pi * part)) / 2
    dx, dy = (sensor.reach * np.interp(passed, np.arange(len(corners)), corners[:, axis]) for axis in (0, 1))
    scale = max(image.shape) / sensor.image_size
    rows = _sampling(sensor.size.height, image.shape[0], scale, dy)
    columns = _sampling(sensor.size.width, image.shape[1], scale, dx)
    seen = rows @ np.asarray(image, np.float64) @ columns.transpose(0, 2, 1)
    return np.log(sensor.background + (1 - sensor.background) * seen).reshape(len(times), -1)


def _sampling(pixels: int, image_pixels: int, scale: float, shift: NDArray) -> NDArray:
    """Linear interpolation as matrices [times, pixels, image_pixels]; nothing lies outside the image."""
    place = (np.arange(pixels) - (pixels - 1) / 2 - shift[:, None]) * scale + (image_pixels - 1) / 2
    return np.maximum(1 - np.abs(place[:, :, None] - np.arange(image_pixels)), 0)


def _threshold_crossings(
    light: NDArray, times: NDArray, sensor: SimulatedSensor, random: np.random.Generator
) -> tuple[NDArray, NDArray, NDArray, NDArray]:
    """t, x, y, p of the events that the light causes, pixel by pixel within each time step."""
    of_pixels = np.random.default_rng(keyed_seed("thresholds of a simulated sensor", 0))  # equal in all recordings
    spread = 1 + sensor.mismatch * of_pixels.standard_normal(light.shape[1])
    threshold = sensor.threshold * np.maximum(spread, 0.1)  # no pixel fires without end
    # What came before the recording left each pixel somewhere between two of its levels.
    reference = light[0] + threshold * random.uniform(-1, 1, light.shape[1])
    start = np.empty_like(light[1:])
    steps = np.empty(start.shape, np.int32)
    for now, before, crossed in zip(light[1:], start, steps, strict=True):
        before[:] = reference
        crossed[:] = (now - reference) / threshold  # towards zero: whole thresholds only
        reference = reference + crossed * threshold
    step, pixel = np.nonzero(steps)
    count = np.abs(steps[step, pixel])
    which = np.repeat(np.arange(len(step)), count)
    number = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count) + 1
    step, pixel = step[which], pixel[which]
    rising = steps[step, pixel] > 0
    level = start[step, pixel] + np.where(rising, number, -number) * threshold[pixel]
    past, now = light[step, pixel], light[step + 1, pixel]
    t = times[step] + (level - past) / (now - past) * sensor.frame_time
    y, x = np.divmod(pixel, sensor.size.width)
    return t.astype(np.int64), x, y, rising
