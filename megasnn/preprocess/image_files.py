"""Which image files are read: the same ones when shards are made and when a model is trained on them."""

from __future__ import annotations

import io

from PIL import Image


def open_image(data: bytes) -> Image.Image:
    """An image file that is opened, not decoded yet.

    Raises:
        ValueError: more than 8 bits a channel; and Pillow whatever damaged bytes or another format make it raise.
    """
    file = Image.open(io.BytesIO(data), formats=("JPEG", "PNG", "WEBP", "PPM"))
    if file.mode == "F" or file.mode.startswith("I"):
        raise ValueError(f"more than 8 bits a channel (mode {file.mode})")
    return file
