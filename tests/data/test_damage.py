"""Samples that are damaged or made to take the machine: broken samples, by name."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megasnn.data.datasets import BrokenSample, ShardDataset
from megasnn.data.events import FrameOptions
from megasnn.data.formats import EventFormat
from megasnn.data.images import ImageFormat
from megasnn.data.shards import open_shard
from tests.data.shard_files import image_file, loader, numbered, open_all, write_shard

IMAGE, EVENTS = ImageFormat(8, 3), EventFormat(FrameOptions(4, size=8))
PIXELS = np.zeros((8, 8, 3), np.uint8)


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array)
    return buffer.getvalue()


def npy_header(shape: object) -> bytes:
    text = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\2\0" + struct.pack("<I", len(text)) + text


def npz(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return buffer.getvalue()


def events(**changes: object) -> bytes:
    fields: dict[str, object] = {"t": [1, 2], "x": [0, 1], "y": [0, 1], "p": [0, 1], "height": 34, "width": 34}
    return npz(**{name: npy(np.asarray(value)) for name, value in (fields | changes).items()})


def png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(1 << 20)))
        + chunk(b"IEND", b"")
    )


HOSTILE = {  # small files that were made to take the machine
    "npy of 8 TB": (EVENTS, npz(frames=npy_header((10**12,)))),
    "sensor of 60,000 x 60,000": (EVENTS, events(height=60_000, width=60_000)),
    "PNG of 13,000 x 13,000": (IMAGE, png(13_000, 13_000)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_would_take_the_machine_is_refused_before_it_does(name):
    format, content = HOSTILE[name]
    assert len(content) < 1 << 20
    with pytest.raises(ValueError, match="Unable to allocate 7.28 TiB" if "npy" in name else "--max-sample-mb"):
        format.decode(content)


def test_a_flag_bounds_file_and_decoded_sample_and_too_large_ones_can_be_skipped(tmp_path, limits):
    large = png(13_000, 13_000)
    with pytest.raises(ValueError, match="13000 x 13000 .*--max-sample-mb"):
        IMAGE.decode(large)
    limits(1 << 30)
    with pytest.raises(ValueError, match="truncated|cut|broken"):
        IMAGE.decode(large[:200])
    path = tmp_path / "a.tar"
    shard = open_shard(write_shard(path, {"a": {"png": image_file(PIXELS) + bytes(300), "cls": b"0"}}))
    limits(200)
    with pytest.raises(BrokenSample, match="'a' of shard .*its file.*--max-sample-mb"):
        ShardDataset([shard], IMAGE, 3).sample(0)
    limits(1 << 20)
    dataset = open_all([write_shard(path, numbered(range(5)) | {"s002": {"png": large, "cls": b"2"}})])
    (batch,) = loader(dataset, shuffle=False, skip_broken_samples=True, global_batch_size=5).batches(limit=1)
    assert [part.skipped for part in batch.micro_batches] == [1, 0]


PICTURE = np.arange(192, dtype=np.uint8).reshape(8, 8, 3)
SOUND = {
    **{suffix: image_file(PICTURE, kind) for suffix, kind in (("png", "PNG"), ("jpg", "JPEG"), ("webp", "WEBP"))},
    "frames.npz": npz(frames=npy(np.zeros((4, 2, 8, 8), np.uint8))),
    "events.npz": events(t=list(range(9)), x=[1] * 9, y=[2] * 9, p=[0] * 9),
}


@pytest.mark.parametrize("suffix", SOUND)
@settings(max_examples=50, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_whatever_is_damaged_is_decoded_or_a_value_error(suffix, data):
    content = bytearray(SOUND[suffix])
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(len(content) // 2, len(content)))]
    try:
        (EVENTS if suffix.endswith("npz") else IMAGE).decode(bytes(content))
    except ValueError:
        pass
