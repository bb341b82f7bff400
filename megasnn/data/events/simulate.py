"""A simulated event camera before a moving image: recordings without a camera or a download.

A pixel sends an event when the logarithm of its light has risen (polarity 1) or fallen (0) by its threshold
(Lichtsteiner et al. 2008). Times between two rendered images are interpolated (ESIM, Rebecq et al. 2018). Every pixel
also sends noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megasnn.common.random import keyed_seed
from megasnn.data.events.frames import Events, Recording, SensorSize

Path = tuple[tuple[float, float], ...]
"""Corners (x, y) of a motion, x to the right and y down, in units of `SimulatedSensor.reach`."""

SACCADES: Path = ((-0.5, -0.5), (0.0, 0.5), (0.5, -0.5), (-0.5, -0.5))
"""Three saccades of N-MNIST, along a triangle (Orchard et al. 2015)."""


@dataclass(frozen=True)
class SimulatedSensor:
    """A camera and the image's motion; by default as in N-MNIST."""

    size: SensorSize = SensorSize(34, 34)  # pixels
    image_size: int = 26  # pixels covered by the image's longer side
    path: Path = SACCADES  # corners of the motion
    reach: float = 6.0  # pixels per unit of the path
    duration: int = 300_000  # us
    frame_time: int = 5_000  # us between rendered images
    threshold: float = 0.4  # change of the light's natural logarithm per event
    mismatch: float = 0.03  # standard deviation of the threshold between pixels, relative to it
    background: float = 0.1  # light for the image's value 0; its value 1 has light 1
    noise_rate: float = 1.0  # noise events per second and pixel


def simulate_recording(image: NDArray, *key: int | str, sensor: SimulatedSensor | None = None) -> Recording:
    """Records a moving image; without motion and noise there are no events.

    Args:
        image: [h, w], values from 0 (background) to 1.
        key: of the randomness, e.g. ("digits", seed, index); equal keys give equal recordings.
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
    """Logarithm of the light, [times, height * width]."""
    corners = np.array(sensor.path, np.float64)
    numbers = np.arange(len(corners))
    # Each side takes equally long, at the speed of half a sine wave, like a motor that starts and stops.
    side, part = np.divmod(times / sensor.duration * (len(corners) - 1), 1)
    passed = side + (1 - np.cos(np.pi * part)) / 2
    dx = sensor.reach * np.interp(passed, numbers, corners[:, 0])
    dy = sensor.reach * np.interp(passed, numbers, corners[:, 1])
    scale = max(image.shape) / sensor.image_size
    rows = _sampling(sensor.size.height, image.shape[0], scale, dy)
    columns = _sampling(sensor.size.width, image.shape[1], scale, dx)
    seen = rows @ np.asarray(image, np.float64) @ columns.transpose(0, 2, 1)
    return np.log(sensor.background + (1 - sensor.background) * seen).reshape(len(times), -1)


def _sampling(pixels: int, image_pixels: int, scale: float, shift: NDArray) -> NDArray:
    """Linear interpolation as matrices [times, pixels, image_pixels]; zero outside the image."""
    position = (np.arange(pixels) - (pixels - 1) / 2 - shift[:, None]) * scale + (image_pixels - 1) / 2
    return np.maximum(1 - np.abs(position[:, :, None] - np.arange(image_pixels)), 0)


def _threshold_crossings(
    light: NDArray, times: NDArray, sensor: SimulatedSensor, random: np.random.Generator
) -> tuple[NDArray, NDArray, NDArray, NDArray]:
    """t, x, y, p of events from light, pixel by pixel in each time step."""
    pixel_random = np.random.default_rng(keyed_seed("thresholds of a simulated sensor", 0))  # equal in all recordings
    spread = 1 + sensor.mismatch * pixel_random.standard_normal(light.shape[1])
    # A threshold near 0 would fire endlessly.
    threshold = sensor.threshold * np.maximum(spread, 0.1)
    # Each pixel starts anywhere between two of its levels, from light before the recording.
    reference = light[0] + threshold * random.uniform(-1, 1, light.shape[1])
    start = np.empty_like(light[1:])
    steps = np.empty(start.shape, np.int32)
    for now, before, crossed in zip(light[1:], start, steps, strict=True):
        before[:] = reference
        crossed[:] = (now - reference) / threshold  # towards zero: whole thresholds only
        reference = reference + crossed * threshold
    step, pixel = np.nonzero(steps)
    count = np.abs(steps[step, pixel])
    # One entry for each event: a pixel may cross several thresholds in a step.
    which = np.repeat(np.arange(len(step)), count)
    number = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count) + 1
    step = step[which]
    pixel = pixel[which]
    rising = steps[step, pixel] > 0
    level = start[step, pixel] + np.where(rising, number, -number) * threshold[pixel]
    past = light[step, pixel]
    now = light[step + 1, pixel]
    # The light changes linearly between two rendered images.
    t = times[step] + (level - past) / (now - past) * sensor.frame_time
    y, x = np.divmod(pixel, sensor.size.width)
    return t.astype(np.int64), x, y, rising
