"""Samples that were made to take the machine, or to run code: a small file each."""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np

from tests.data.shard_files import image_file

PIXELS = np.zeros((8, 8, 3), np.uint8)


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array)
    return buffer.getvalue()


def npy_header(shape: object, dtype: str = "<f8") -> bytes:
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\2\0" + struct.pack("<I", len(text)) + text


def npz(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return buffer.getvalue()


def zeros(megabytes: int) -> bytes:
    """A raw deflate stream of zeros, a kilobyte for each megabyte."""
    packer = zlib.compressobj(9, wbits=-15)
    block = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    return block * megabytes + packer.flush()


def zip_bomb(megabytes: int, declared: int) -> bytes:
    """frames.npy of so many zeros, with any size in its headers."""
    content, name = zeros(megabytes), b"frames.npy"
    common = struct.pack("<HHHHHIIIHH", 20, 0, 8, 0, 0, 0, len(content), declared, len(name), 0)
    local = b"PK\3\4" + common + name + content
    central = b"PK\1\2" + struct.pack("<H", 20) + common + struct.pack("<HHHII", 0, 0, 0, 0, 0) + name
    return local + central + b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, 1, 1, len(central), len(local), 0)


def events(**changes: object) -> bytes:
    fields: dict[str, object] = {"t": [1, 2], "x": [0, 1], "y": [0, 1], "p": [0, 1], "height": 34, "width": 34}
    return npz(**{name: npy(np.asarray(value)) for name, value in (fields | changes).items()})


class Runs:
    """Unpickling it makes a folder."""

    def __init__(self, decoy: Path) -> None:
        self.decoy = decoy

    def __reduce__(self):
        return os.mkdir, (str(self.decoy),)


def png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"\x78\x9c" + zeros(1)) + chunk(b"IEND", b"")


def jpeg(width: int, height: int) -> bytes:
    data = bytearray(image_file(PIXELS, "JPEG"))
    struct.pack_into(">HH", data, data.index(b"\xff\xc0") + 5, height, width)
    return bytes(data)


def samples(folder: Path) -> dict[str, tuple[str, bytes]]:
    """Contents of a sample's file that cannot be decoded, by what is wrong with them."""
    buffer = io.BytesIO()
    np.save(buffer, np.array([Runs(folder / "run"), None], object), allow_pickle=True)
    frames = np.zeros((4, 2, 8, 8), np.float32)
    return {
        "npz of 3 GB": ("frames.npz", zip_bomb(3000, 3000 << 20)),
        "npz of 1 GB that declares little": ("frames.npz", zip_bomb(1000, 5000)),
        "npy of 8 TB": ("frames.npz", npz(frames=npy_header((10**12,)))),
        "npy with a deep header": ("frames.npz", npz(frames=npy_header("-" * 9000 + "1"))),
        "objects": ("frames.npz", npz(frames=buffer.getvalue())),
        "frames with NaN": ("frames.npz", npz(frames=npy(frames * np.nan))),
        "frames of an absurd height": ("frames.npz", npz(frames=npy(np.zeros((4, 2, 3_000_000, 1), np.uint8)))),
        "empty frames": ("frames.npz", npz(frames=npy(np.zeros((4, 2, 0, 0), np.uint8)))),
        "sensor of 60,000 x 60,000": ("events.npz", events(height=60_000, width=60_000)),
        "PNG of 13,000 x 13,000": ("png", png(13_000, 13_000)),
        "JPEG of 65,500 x 65,500": ("jpg", jpeg(65_500, 65_500)),
        "PPM of 100,000 x 100,000": ("ppm", b"P6 100000 100000 255\n" + bytes(100)),
        "PNG cut": ("png", image_file(PIXELS)[:45]),
    }
