"""Samples as pictures: event frames in two colours, images as they are, several on a sheet with captions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

_SMALLEST, _LARGEST = 64, 256  # pixels of a picture's longer side
_GAP = 4
_CAPTION = 14
_BACKGROUND, _INK = 225, 20  # levels of grey
EVENT_LEGEND = "red: pixels that became brighter; blue: darker; black: both; a frame for each time step, left to right"

Picture = NDArray[np.uint8]


def frames_to_rgb(frames: NDArray[Any]) -> Picture:
    """Event frames `[T, 2, H, W]` -> pictures uint8 `[T, H, W, 3]`: on white, red where it became brighter
    (polarity 1), blue where darker (polarity 0).

    The darkest shade stands for the 99.5th percentile of what is not zero in the sample, so that one hot pixel does
    not make all others pale.

    Raises:
        ValueError: another shape.
    """
    if frames.ndim != 4 or frames.shape[1] != 2:
        raise ValueError(f"event frames are [T, 2, H, W], not {list(frames.shape)}")
    values = frames.astype(np.float32)
    seen = values[values > 0]
    shade = np.clip(values / np.percentile(seen, 99.5), 0, 1) if len(seen) else values
    darker, brighter = shade[:, 0], shade[:, 1]
    light = np.stack([1 - darker, 1 - np.maximum(darker, brighter), 1 - brighter], axis=-1)
    return np.rint(255 * light).astype(np.uint8)


def image_to_rgb(image: NDArray[Any]) -> Picture:
    """An image, uint8 `[H, W]`, `[H, W, 1]` or `[H, W, 3]`, or normalised floats `[C, H, W]` -> uint8 `[H, W, 3]`.

    Floats are stretched from black to white.

    Raises:
        ValueError: another shape.
    """
    if image.dtype != np.uint8 and image.ndim == 3:
        low, high = float(image.min()), float(image.max())
        image = np.rint((image - low) * (255 / max(high - low, 1e-12))).astype(np.uint8).transpose(1, 2, 0)
    if image.ndim == 2:
        image = image[..., None]
    if image.ndim != 3 or image.shape[2] not in (1, 3):
        raise ValueError(f"images are [H, W, C] or floats [C, H, W] with 1 or 3 channels, not {list(image.shape)}")
    return np.broadcast_to(image, (*image.shape[:2], 3)).astype(np.uint8)


def to_rgb(sample: NDArray[Any]) -> Picture:
    """A sample as the loader has it -> the pictures of a row, uint8 `[T, H, W, 3]`; an image is a row of one.

    Raises:
        ValueError: neither event frames nor an image.
    """
    return frames_to_rgb(sample) if sample.ndim == 4 else image_to_rgb(sample)[None]


def sample_sheet(
    samples: Sequence[NDArray[Any]], captions: Sequence[str], width: int = 1280, title: str = ""
) -> Picture:
    """Samples (as `to_rgb` takes them) on a sheet, uint8 `[height, width, 3]`, each row of frames below its caption.

    Small ones are magnified, large ones reduced. What does not fit beside the one before goes below; the sheet is
    wider than `width` pixels only where one row of frames or the title is.

    Args:
        title: what the whole sheet shows, above everything; event frames get a legend of their colours when not given.

    Raises:
        ValueError: no samples, another number of captions, or a sample that is no picture.
    """
    if not samples or len(samples) != len(captions):
        raise ValueError(
            f"a sheet needs samples and a caption for each: {len(samples)} samples, {len(captions)} captions"
        )
    cells = [_cell(to_rgb(sample), caption) for sample, caption in zip(samples, captions, strict=True)]
    if not title and any(sample.ndim == 4 for sample in samples):
        title = EVENT_LEGEND
    places, (right, bottom) = _flow([cell.size for cell in cells], width)
    head = _text(title)
    sheet = Image.new("RGB", (max(right, head.width + 2 * _GAP), bottom + head.height), (_BACKGROUND,) * 3)
    sheet.paste(head, (_GAP, _GAP))
    for cell, (x, y) in zip(cells, places, strict=True):
        sheet.paste(cell, (x, y + head.height))
    return np.asarray(sheet)


def _text(text: str) -> Image.Image:
    """A line of text; nothing for an empty one."""
    font = ImageFont.load_default()
    size = (int(font.getlength(text)) + 1, _CAPTION) if text else (0, 0)
    line = Image.new("RGB", size, (_BACKGROUND,) * 3)
    ImageDraw.Draw(line).text((0, 0), text, (_INK,) * 3, font)
    return line


def _cell(pictures: Picture, caption: str) -> Image.Image:
    """The pictures of one sample side by side, below the caption."""
    scaled = [_scaled(Image.fromarray(picture)) for picture in pictures]
    font = ImageFont.load_default()
    text = int(font.getlength(caption)) + 1
    row = sum(picture.width + _GAP for picture in scaled) - _GAP
    cell = Image.new("RGB", (max(row, text), _CAPTION + scaled[0].height), (_BACKGROUND,) * 3)
    ImageDraw.Draw(cell).text((0, 0), caption, (_INK,) * 3, font)
    for index, picture in enumerate(scaled):
        cell.paste(picture, (index * (picture.width + _GAP), _CAPTION))
    return cell


def _scaled(picture: Image.Image) -> Image.Image:
    longer = max(picture.size)
    if longer > _LARGEST:
        picture.thumbnail((_LARGEST, _LARGEST))
        return picture
    times = -(-_SMALLEST // longer)
    return picture.resize((times * picture.width, times * picture.height), Image.Resampling.NEAREST)


def _flow(sizes: Sequence[tuple[int, int]], width: int) -> tuple[list[tuple[int, int]], tuple[int, int]]:
    """Places of boxes from left to right and top to bottom, and the size of it all."""
    places = []
    x = y = _GAP
    row = right = 0
    for box_width, box_height in sizes:
        if x > _GAP and x + box_width + _GAP > width:
            x, y, row = _GAP, y + row + _GAP, 0
        places.append((x, y))
        x += box_width + _GAP
        row, right = max(row, box_height), max(right, x)
    return places, (right, y + row + _GAP)
