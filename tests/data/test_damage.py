"""Samples that are damaged or made to take the machine: broken samples, at once, by name, and in little memory."""

from __future__ import annotations

import io
import json
import os
import resource
import struct
import subprocess
import sys
import time
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megasnn.data.dataset import BrokenSample, ShardDataset
from megasnn.data.formats import EventFormat
from megasnn.data.images import ImageFormat
from megasnn.data.shards import open_shard
from megasnn.events import FrameOptions
from tests.data.shard_files import image_file, loader, numbered, open_all, write_shard

ROOT = Path(__file__).parents[2]
SPACE = 160 << 20
"""Bytes of addresses above those of the imported libraries: less than one sample may take."""
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


def hostile() -> dict[str, tuple[str, bytes]]:
    """Contents of small files that were made to take the machine, by what is wrong with them."""
    return {
        "npy of 8 TB": ("frames.npz", npz(frames=npy_header((10**12,)))),
        "sensor of 60,000 x 60,000": ("events.npz", events(height=60_000, width=60_000)),
        "PNG of 13,000 x 13,000": ("png", png(13_000, 13_000)),
    }


def read_all(folder: Path) -> None:
    """Reads each sample with a limit on the address space; prints the outcomes."""
    datasets = {}
    for number, (name, (suffix, data)) in enumerate(hostile().items()):
        shard = open_shard(write_shard(folder / f"{number}.tar", {"victim": {suffix: data, "cls": b"1"}}))
        datasets[name] = ShardDataset([shard], EVENTS if suffix.endswith("npz") else IMAGE, 10)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + SPACE, size + SPACE))
    for name, dataset in datasets.items():
        begun = time.monotonic()
        try:
            dataset.sample(0)
            outcome = "read"
        except BaseException as error:
            outcome = f"{type(error).__name__}: {error}"
        print(json.dumps([name, outcome[:500], time.monotonic() - begun]), flush=True)


def test_each_is_refused_by_name_at_once_and_in_little_memory(tmp_path):
    code = f"from pathlib import Path; from tests.data.test_damage import read_all; read_all(Path({str(tmp_path)!r}))"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = list(map(json.loads, done.stdout.splitlines()))
    wrong = [each for each in outcomes if not each[1].startswith("BrokenSample: sample 'victim' of") or each[2] > 5]
    assert len(outcomes) == 3 and not wrong, wrong


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
