"""Files that were made to take the machine or to run code are refused: at once, by name, and in little memory."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megasnn.data import BrokenSample
from megasnn.data.images import ImageFormat
from megasnn.data.shards import open_shard
from tests.data import hostile
from tests.data.shard_files import numbered, open_all, write_shard
from tests.data.test_loader import sequence

ROOT = Path(__file__).parents[2]
ROOM = 160 << 20  # bytes of addresses above those of the imported libraries: less than one sample may take
KINDS = ("sample", "shard", "recording")


def read_all(folder: Path) -> None:
    """Reads each file with a limit on the address space; prints what came of it."""
    found = hostile.cases(folder)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, size + ROOM))
    for name, (read, path, says) in found.items():
        begun = time.monotonic()
        try:
            read(path)
            outcome = "read"
        except BaseException as error:
            outcome = f"{type(error).__name__}: {error}"
        place = str(path) if str(path) in outcome else ""
        print(json.dumps([name, outcome[:500], bool(place), says in outcome, time.monotonic() - begun]), flush=True)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What came of each file: the error, and whether it names the file and the rest, and its time."""
    folder = tmp_path_factory.mktemp("hostile")
    code = f"from pathlib import Path; from tests.data.test_hostile import read_all; read_all(Path({str(folder)!r}))"
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "MEGASNN_CACHE": str(folder / "cache"),
        "MALLOC_ARENA_MAX": "1",
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (folder / "run").exists(), "something ran code"
    assert sum(file.stat().st_size for file in (folder / "cache").rglob("*") if file.is_file()) < 1 << 20
    return {name: rest for name, *rest in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("kind", KINDS)
def test_each_is_refused_by_name_at_once_and_in_little_memory(outcomes, kind):
    wrong, seen = {}, 0
    for name, (outcome, names_file, says, seconds) in outcomes.items():
        if name.startswith(f"{kind}: "):
            seen += 1
            error = outcome.partition(":")[0]
            if (
                error not in ("ValueError", "BrokenSample", "RecordingError")
                or not names_file
                or not says
                or seconds > 5
            ):
                wrong[name] = outcome, names_file, says, seconds
    assert not wrong
    assert seen >= 8
    if kind == "sample":
        assert all(outcome.startswith("BrokenSample") for name, (outcome, *_) in outcomes.items() if "sample: " in name)


@pytest.mark.parametrize("name", ["PNG of 13,000 x 13,000", "JPEG of 65,500 x 65,500"])
def test_a_sample_that_is_too_large_can_be_skipped(tmp_path, monkeypatch, name):
    monkeypatch.setenv("MEGASNN_CACHE", str(tmp_path / "cache"))
    suffix, data = hostile.samples(tmp_path)[name]
    contents = numbered(range(5))
    contents["s002"] = {suffix: data, "cls": b"2"}
    dataset = open_all([write_shard(tmp_path / "a.tar", contents)])
    (batch,) = sequence(dataset, 1, 1, shuffle=False, skip_broken=True, global_batch_size=5)
    assert [number for *_, numbers, _ in batch for number in numbers] == [0, 1, 3, 3, 4]
    with pytest.raises(
        BrokenSample, match=f"'s002' of shard {tmp_path}/a.tar .*--max-sample-mb.*--skip-broken-samples"
    ):
        sequence(dataset, 1, 1, shuffle=False, global_batch_size=5)


def test_a_flag_raises_the_bounds(tmp_path, monkeypatch):
    """What is refused by default is read with a larger limit, and what is read by default is refused with a smaller."""
    monkeypatch.setenv("MEGASNN_CACHE", str(tmp_path / "cache"))
    large = hostile.png(13_000, 13_000)
    with pytest.raises(ValueError, match="an image of 13000 x 13000 pixels would take 644.7 MB.*--max-sample-mb"):
        ImageFormat(8, 3).decode(large)
    with pytest.raises(ValueError, match="cannot be decoded: .*truncated|cut|broken"):
        ImageFormat(8, 3, limit=1 << 30).decode(large[:200])
    with pytest.raises(ValueError, match="an image of 8 x 8 pixels would take"):
        ImageFormat(8, 3, limit=100).decode(hostile.image_file(hostile.PIXELS))
    packed = tmp_path / "bomb.tar.gz"
    packed.write_bytes(b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + hostile.zeros(3) + bytes(8))
    with pytest.raises(ValueError, match=f"shard {packed} .*unpacks to more than 0.0021 GB.*--max-unpacked-gb"):
        open_shard(packed, unpacked_limit=2 << 20)
    with pytest.raises(ValueError, match="CRC"):
        open_shard(packed, unpacked_limit=4 << 20)
    monkeypatch.setenv("MEGASNN_CACHE_GB", "0.001")
    with pytest.raises(ValueError, match="raise MEGASNN_CACHE_GB"):
        open_shard(packed)
    assert not list((tmp_path / "cache" / "unpacked").glob("[!.]*"))


def test_whatever_is_damaged_is_read_or_refused(tmp_path):
    """Thousands of damaged files, in little memory, and nothing outside their folder is touched."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-m", "tests.data.fuzz", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    tried = dict(line.split() for line in done.stdout.splitlines())
    assert len(tried) == 18 and min(map(int, tried.values())) >= 20, tried
