"""Inputs of a trained model from files: decoded, cropped, scaled and normalised as evaluations do."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megasnn.common.files import read_file
from megasnn.data.events import FrameOptions, Recording, make_frames, read_recording
from megasnn.data.formats import FRAMES, EventFormat
from megasnn.data.images import NORMALISATIONS, ImageFormat

Sample = str | os.PathLike[str] | Recording
"""A file, or a recording that was read with other options than the usual ones."""


def preprocess(shape: Sequence[int], samples: Mapping[str, Any], sources: Sequence[Sample]) -> Tensor:
    """Inputs float32 `[N, *shape]`.

    Args:
        shape: of one input: (C, H, W) for images, (T, 2, H, W) for event frames.
        samples: how the training made its inputs (`About.samples`).
    Raises:
        ValueError: the training does not say how, or a file cannot be decoded.
        OSError: a file cannot be opened.
    """
    if not sources:
        raise ValueError("give preprocess one file or more")
    if len(shape) == 4:
        events = _event_format(shape, samples)
        return torch.from_numpy(events.batch([_frames(events, source) for source in sources]))
    images = _image_format(shape, samples)
    return torch.from_numpy(images.batch([_image(images, source) for source in sources]))


def _image_format(shape: Sequence[int], samples: Mapping[str, Any]) -> ImageFormat:
    channels, height, width = shape
    constants = samples.get("normalize_images")
    center = samples.get("center_crop")
    if height != width or constants not in NORMALISATIONS or not isinstance(center, float):
        raise ValueError(_unknown(samples))
    # Without random changes, as in an evaluation.
    return ImageFormat(height, channels, constants, center=center)


def _event_format(shape: Sequence[int], samples: Mapping[str, Any]) -> EventFormat:
    time_steps, _, height, width = shape
    split_by = samples.get("split_by")
    if height != width or split_by not in ("number", "time"):
        raise ValueError(_unknown(samples))
    return EventFormat(FrameOptions(time_steps, split_by, height))


def _unknown(samples: Mapping[str, Any]) -> str:
    advice = "make the inputs as the training did and give them to the model"
    if "data" in samples:
        return f"the training's samples came from a data set in Python ({samples['data']}): {advice}"
    return f"the checkpoint does not say how its inputs are made from files, as those of runs on shards do: {advice}"


def _image(format: ImageFormat, source: Sample) -> Any:
    if isinstance(source, Recording):
        raise ValueError("the model takes images, not recordings")
    try:
        return format.decode(read_file(Path(source)))
    except ValueError as error:
        raise ValueError(f"{os.fspath(source)} cannot be decoded: {error}") from error


def _frames(format: EventFormat, source: Sample) -> Any:
    if isinstance(source, Recording):
        return make_frames(source, format.settings)
    if os.fspath(source).endswith(f".{FRAMES}"):
        try:
            return format.decode(read_file(Path(source)))
        except ValueError as error:
            raise ValueError(f"{os.fspath(source)} {error}") from error
    return make_frames(read_recording(source), format.settings)
