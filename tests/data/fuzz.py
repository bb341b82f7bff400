"""Damages shards, recordings and indexes in ways that hypothesis thinks of, and watches what their readers do.

It is a program of its own: its address space is limited, and whatever it opens is watched.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import resource
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from megasnn.data.dataset import ShardDataset
from megasnn.data.event_files import FrameSettings
from megasnn.data.event_frames import EventFormat
from megasnn.data.images import ImageFormat
from megasnn.data.index import read_index, verify
from megasnn.data.open import _KINDS
from megasnn.data.shards import open_shard
from megasnn.events import read_recording
from tests.data import hostile
from tests.data.shard_files import image_file, write_shard
from tests.events import files

ROOM = 160 << 20
EXAMPLES = 80
EXTREMES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF, 1 << 62, (1 << 64) - 1)
VALUES = (None, True, -1, 0, 1.5, 1 << 70, "", "../decoy", "/dev/zero", "x" * 9999, [], {}, [[[]]], float("nan"))
EVENTS = files.random_events(40, 34, 34)


@st.composite
def damage(draw: Callable, whole: bytes) -> bytes:
    """The bytes with some places overwritten, cut out, repeated, or filled with a number that is the end of a range."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        kind = draw(st.sampled_from(("bytes", "number", "cut", "repeat")))
        if kind == "bytes":
            data[start : start + draw(st.integers(0, 9))] = draw(st.binary(max_size=9))
        elif kind == "number":
            size, order = draw(st.sampled_from((1, 2, 4, 8))), draw(st.sampled_from(("little", "big")))
            number = draw(st.sampled_from(EXTREMES)) % (1 << 8 * size)
            data[start : start + size] = number.to_bytes(size, order)
        elif kind == "cut":
            del data[start : draw(st.sampled_from((start + 1, start + 512, len(data))))]
        else:
            data[start:start] = data[start : start + 600]
    return bytes(data)


@st.composite
def damaged_tar(draw: Callable, whole: bytes) -> bytes:
    """A tar with damage in fields of its headers, whose checksums are right again."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 3))):
        start = 512 * draw(st.integers(0, len(data) // 512 - 1))
        place, size = draw(st.sampled_from(((0, 100), (124, 12), (156, 1), (257, 8), (345, 155))))
        data[start + place : start + place + size] = draw(damage(bytes(data[start + place : start + place + size])))[
            :size
        ].ljust(size, b"\0")
        data[start + 148 : start + 156] = b" " * 8
        data[start + 148 : start + 156] = b"%06o\0 " % (sum(data[start : start + 512]) % 8**6)
    return bytes(data)


@st.composite
def damaged_npz(draw: Callable, whole: bytes) -> bytes:
    """An .npz that is a sound zip file, with damage inside its arrays."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(whole)) as before, zipfile.ZipFile(buffer, "w") as after:
        for name in before.namelist():
            content = before.read(name)
            after.writestr(name, draw(damage(content)) if draw(st.booleans()) else content)
    return buffer.getvalue()


@st.composite
def damaged_json(draw: Callable, whole: bytes) -> bytes:
    """JSON of which one value, at any depth, is another."""
    content = json.loads(whole)
    place, key = draw(st.sampled_from(_places(content)))
    if draw(st.booleans()):
        place[key] = draw(st.sampled_from(VALUES))
    elif isinstance(place, dict):
        del place[key]
    return json.dumps(content).encode()


def _places(value: object) -> list[tuple]:
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    found: list[tuple] = [(value, key) for key in keys]
    for key in keys:
        found += _places(value[key])  # type: ignore[index]
    return found


class Watch:
    """Fails where a reader opens, or changes, anything outside a folder; Python's own files aside."""

    def __init__(self, folder: Path) -> None:
        self.outside: list[str] = []
        self._folder, self._on = str(folder), False
        self._own = (sys.prefix, sys.base_prefix, str(Path(__file__).parents[2]), "/proc/self/")
        sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple) -> None:
        if not self._on:
            return
        if event in ("os.system", "subprocess.Popen", "os.exec", "socket.connect", "os.fork", "pickle.find_class"):
            self.outside.append(f"{event} {arguments}")
        if event in ("open", "os.remove", "os.rename", "os.mkdir", "os.symlink", "os.listdir", "os.truncate"):
            path = arguments[0]
            path = os.path.abspath(os.fsdecode(path)) if isinstance(path, str | bytes) else self._folder
            reading = event in ("open", "os.listdir") and not (event == "open" and str(arguments[1] or "r") != "r")
            if not path.startswith(self._folder) and not (reading and path.startswith(self._own)):
                self.outside.append(f"{event} {path}")

    def read(self, action: Callable[[], object], *must_name: str) -> None:
        """Demands that it succeeds, or raises one error that says what is wrong."""
        self._on = True
        try:
            action()
        except ValueError as error:
            assert type(error).__name__ in ("ValueError", "BrokenSample", "RecordingError", "DescriptionError"), error
            assert any(name in str(error) for name in must_name), error
        finally:
            self._on = False
        assert not self.outside, self.outside


def wholes(folder: Path) -> dict[str, tuple[Callable, bytes]]:
    """What is damaged: how, and the sound bytes, by the name of the file."""
    pixels = np.arange(192, dtype=np.uint8).reshape(8, 8, 3)
    frames = hostile.npz(frames=hostile.npy(np.zeros((4, 2, 8, 8), np.uint8)))
    recording = hostile.events(t=EVENTS.t, x=EVENTS.x, y=EVENTS.y, p=EVENTS.p)
    shard = write_shard(
        folder / "whole.tar", {key: {"png": image_file(pixels), "cls": b"1"} for key in "ab"}
    ).read_bytes()
    record = {"file": "a.tar", "split": "train", "samples": 2, "size": 10, "sha256": "0" * 64, "broken": ["x"]}
    index = {"version": 1, "options": {"size": 3}, "classes": ["a", "b"], "shards": [record]}
    lines = files.dvs128_address(EVENTS)
    return {
        "headers.tar": (damaged_tar, shard),
        "any.tar": (damage, shard),
        "packed.tar.gz": (damage, gzip.compress(shard, mtime=0)),
        "sample.png": (damage, image_file(pixels)),
        "sample.jpg": (damage, image_file(pixels, "JPEG")),
        "sample.webp": (damage, image_file(pixels, "WEBP")),
        "sample.ppm": (damage, image_file(pixels, "PPM")),
        "sample.frames.npz": (damage, frames),
        "inside.frames.npz": (damaged_npz, frames),
        "inside.events.npz": (damaged_npz, recording),
        "a.npz": (damage, recording),
        "a.npy": (damage, hostile.npy(np.zeros(9, [("t", "i8"), ("x", "u2"), ("y", "u2"), ("p", "u1")]))),
        "a.aedat": (damage, files.aedat2(lines, EVENTS.t)),
        "b.aedat": (damage, files.aedat3([files.aedat3_packet(part) for part in (EVENTS[:20], EVENTS[20:])])),
        "a.aedat4": (damage, files.aedat4([EVENTS[:20], EVENTS[20:]], 34, 34)),
        "a.bin": (damage, files.atis(EVENTS)),
        "one/index.json": (damaged_json, json.dumps(index).encode()),
        "cut/index.json": (damage, json.dumps(index).encode()),
    }


def read(path: Path) -> None:
    """What reads such a file."""
    if path.name == "index.json":
        index = read_index(path.parent)
        assert index is None or verify(path.parent) is not None
    elif not path.name.endswith((".tar", ".tar.gz")):
        read_recording(path, sensor_size=(34, 34) if path.suffix == ".npy" else None)
    else:
        shard = open_shard(path, tuple(_KINDS))
        events = any(suffix.endswith(b"npz") for suffix in shard.suffixes.tolist())
        format = EventFormat(FrameSettings(4, size=8)) if events else ImageFormat(8, 3)
        dataset = ShardDataset([shard], format, 2**31)
        for number in range(len(dataset)):
            dataset.sample(number)


def main(folder: Path) -> None:
    """Raises AssertionError for whatever is not as it should be; prints how many files of each kind were tried."""
    inside, decoy = folder / "inside", folder / "decoy"
    for name in ("one", "cut"):
        (inside / name).mkdir(parents=True)
    os.mkfifo(decoy)  # whoever opens it waits for ever
    os.environ["MEGASNN_CACHE"] = str(inside / "cache")
    found = wholes(inside)
    for name, (_, data) in found.items():  # also imports all that will be needed
        _check(inside, name, data, lambda action, *names: action())
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, size + ROOM))
    watch = Watch(inside)
    for name, (strategy, whole) in found.items():
        tried = _try(inside, name, strategy(whole), watch)
        print(name, tried, flush=True)
    assert sorted(os.listdir(folder)) == ["decoy", "inside"], os.listdir(folder)


def _try(inside: Path, name: str, data: st.SearchStrategy[bytes], watch: Watch) -> int:
    count = 0

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(data)
    def one(content: bytes) -> None:
        nonlocal count
        count += 1
        _check(inside, name, content, watch.read)

    one()
    return count


def _check(inside: Path, name: str, content: bytes, run: Callable) -> None:
    if "sample." in name or "inside." in name:
        suffix = name.partition(".")[2]
        path = write_shard(inside / f"sample-{suffix}.tar", {"victim": {suffix: content, "cls": b"1"}})
        run(lambda: read(path), f"'victim' of shard {path}")
    else:
        path = inside / name
        path.write_bytes(content)
        run(lambda: read(path), str(path))


if __name__ == "__main__":
    random.seed(0)
    main(Path(sys.argv[1]))
