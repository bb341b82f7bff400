"""Which image files are read: the same ones when shards are made and when a model is trained on them."""

from __future__ import annotations

import io

from PIL import Image, UnidentifiedImageError

from megasnn.files.sample_size import SAMPLE_BYTES, require_size

_FORMATS = ("JPEG", "PNG", "WEBP", "PPM")
_ONE_BYTE_MODES = ("1", "L", "P")  # Pillow keeps four bytes for a pixel of all others


def open_image(data: bytes, limit: int = SAMPLE_BYTES) -> Image.Image:
    """An image file that is opened, not decoded yet.

    Args:
        data: the whole file.
        limit: bytes that the decoded image may take.

    Raises:
        ValueError: too large, or more than 8 bits a channel; and Pillow whatever damaged bytes or another format make
            it raise.
    """
    # Pillow's own bound counts pixels; without this it would refuse what a raised limit allows.
    Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS or 0, limit)
    if size := _webp_size(data):
        _require_pixels(*size, 4, limit)  # opening one allocates all its pixels
    try:
        file = Image.open(io.BytesIO(data), formats=_FORMATS)
    except UnidentifiedImageError:
        raise ValueError(f"it is not an image of {', '.join(_FORMATS)}") from None
    except Image.DecompressionBombError as error:
        raise ValueError(f"{error} If it is sound, raise --max-sample-mb") from None
    if file.mode == "F" or file.mode.startswith("I"):
        raise ValueError(f"more than 8 bits a channel (mode {file.mode})")
    _require_pixels(*file.size, 1 if file.mode in _ONE_BYTE_MODES else 4, limit)
    return file


def _require_pixels(width: int, height: int, pixel_bytes: int, limit: int) -> None:
    require_size(f"an image of {width} x {height} pixels", width * height * pixel_bytes, limit)


def _webp_size(data: bytes) -> tuple[int, int] | None:
    """Width and height of a WebP file, from its first chunk; None where it is no such file.

    Source: the WebP container specification; RFC 6386, section 9.1; the WebP lossless bitstream specification.
    """
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        return None
    kind, first = data[12:16], data[20:30].ljust(10, b"\0")
    if kind == b"VP8X":
        return 1 + int.from_bytes(first[4:7], "little"), 1 + int.from_bytes(first[7:10], "little")
    if kind == b"VP8L":
        bits = int.from_bytes(first[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    return int.from_bytes(first[6:8], "little") & 0x3FFF, int.from_bytes(first[8:10], "little") & 0x3FFF
