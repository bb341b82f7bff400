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

from megasnn.common.files import read_array
from megasnn.data.arrays import ArrayFile, ArrayFormat
from megasnn.data.datasets import ShardDataset
from megasnn.data.events import FrameOptions
from megasnn.data.formats import EventFormat
from megasnn.data.images import ImageFormat
from megasnn.data.samples import BrokenSample
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
    with pytest.raises(ValueError, match="header says 8,000,000,000,000 bytes" if "npy" in name else "--max-sample-mb"):
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


def array_format(**changes: object) -> ArrayFormat:
    """An input `x` of two numbers, and classes a pixel as target."""
    x = ArrayFile("x", "npy", (2,), **{"dtype": "float"} | changes)
    return ArrayFormat((x, ArrayFile("y", "seg.png", (8, 8), "int", 4)), ("x",), "y")


def array_sample(x: bytes, classes: bytes | None = None) -> dict[str, bytes]:
    return {"npy": x, "seg.png": classes or image_file(np.zeros((8, 8), np.uint8))}


BROKEN_ARRAYS = {
    "empty": (b"", "float", "npy"),
    "text": (b"1.0 2.0", "float", "npy"),
    "header of 8 TB": (npy_header((10**12,)), "float", "header"),
    "header of ten elements": (npy_header((10,)) + bytes(16), "float", "header"),
    "header of -2 elements": (npy_header((-2,)) + bytes(16), "float", "header"),
    "header that is no Python": (npy(np.zeros(2)).replace(b"'shape'", b"'sh(pe'"), "float", "npy"),
    "object": (npy(np.zeros(2)).replace(b"'<f8'", b"'|O' "), "float", "Python objects"),
    "nan": (npy(np.array([0, np.nan])), "float", "nan or infinite"),
    "infinity": (npy(np.array([np.inf, 0], np.float32)), "float", "nan or infinite"),
    "float64 beyond float32": (npy(np.array([1e300, 0])), "float", "nan or infinite.*float32"),
    "2^63": (npy(np.array([2**63, 0], np.uint64)), "int", "9223372036854775808.*int64"),
}


@pytest.mark.parametrize("name", BROKEN_ARRAYS)
def test_an_array_that_cannot_be_decoded_is_a_broken_sample(tmp_path, name):
    content, dtype, reason = BROKEN_ARRAYS[name]
    sound = npy(np.arange(2.0 if dtype == "float" else 2))
    shard = write_shard(tmp_path / "a.tar", {"a": array_sample(sound), "b": array_sample(content)})
    dataset = ShardDataset([open_shard(shard)], array_format(dtype=dtype), 0)
    assert dataset.sample(0)["x"].tolist() == [0, 1]
    with pytest.raises(BrokenSample, match=f"'b' of shard {shard} cannot be decoded.*{reason}.*--skip-broken-samples"):
        dataset.sample(1)


@pytest.mark.parametrize("suffix", ["frames.npz", "events.npz"])
def test_an_npy_under_the_name_of_an_npz_is_named(tmp_path, suffix):
    shard = write_shard(tmp_path / "a.tar", {"a": {suffix: npy(np.zeros((4, 2, 8, 8))), "cls": b"0"}})
    with pytest.raises(BrokenSample, match=rf"'a' of shard .*\.npy array under the name .*\.{suffix}"):
        ShardDataset([open_shard(shard)], EVENTS, 3).sample(0)


def test_a_mask_that_is_cut_is_a_broken_sample_too(tmp_path):
    picture = image_file(np.arange(64, dtype=np.uint8).reshape(8, 8) % 4)
    shard = write_shard(tmp_path / "a.tar", {"a": array_sample(npy(np.arange(2.0)), picture[:-30])})
    with pytest.raises(BrokenSample, match="'a' of shard .*cannot be decoded"):
        ShardDataset([open_shard(shard)], array_format(), 0).sample(0)


def test_arrays_are_bounded_before_memory_is_taken(limits):
    content = npy(np.zeros(300))
    assert read_array(content).shape == (300,)
    limits(2000)
    with pytest.raises(ValueError, match="--max-sample-mb"):
        read_array(content)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
def test_frames_that_are_not_finite_are_refused(value):
    frames = np.ones((4, 2, 8, 8))
    frames[3, 1, 7, 7] = value
    with pytest.raises(ValueError, match="nan or infinite"):
        EVENTS.decode(npz(frames=npy(frames)))
    larger = EventFormat(FrameOptions(4, size=4))
    with pytest.raises(ValueError, match="nan or infinite"):
        larger.decode(npz(frames=npy(frames)))


def test_broken_arrays_are_skipped_and_counted(tmp_path):
    samples = {f"s{n}": array_sample(npy(np.full(2, n, float))) for n in range(5)}
    samples["s2"]["npy"] = npy(np.array([np.nan, 0]))
    dataset = ShardDataset([open_shard(write_shard(tmp_path / "a.tar", samples))], array_format(), 0)
    (batch,) = loader(dataset, shuffle=False, skip_broken_samples=True, global_batch_size=5).batches(limit=1)
    assert [part.skipped for part in batch.micro_batches] == [1, 0]
    assert batch.micro_batches[0].inputs["x"][:, 0].tolist() == [0, 1, 3]
