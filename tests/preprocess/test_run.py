"""Runs that are repeated, killed, run out of disk, or meet something else in their folder."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megasnn.commands import preprocess_data
from megasnn.data.event_files import EVENTS, FRAMES
from megasnn.data.index import read_index, verify
from megasnn.data.shards import open_shard
from megasnn.preprocess.run import preprocess
from tests.preprocess.jobs import dying, job, sleepy
from tests.preprocess.recordings import cifar10_dvs

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MEGASNN_CACHE", str(tmp_path / "cache"))


def bytes_of(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


def test_the_index_says_what_is_there(tmp_path) -> None:
    index = preprocess(job(tmp_path))
    names = [f"train-{n:05d}.tar" for n in range(6)] + [f"test-{n:05d}.tar" for n in range(2)]
    assert sorted(bytes_of(tmp_path)) == sorted([*names, "index.json"])
    assert [shard.samples for shard in index.shards] == [4, 4, 4, 4, 4, 3, 4, 1]
    assert index == read_index(tmp_path)
    for shard in index.shards:
        data = (tmp_path / shard.file).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (shard.size, shard.sha256)
    keys = [key for shard in index.of_split("train") for key in open_shard(tmp_path / shard.file, ("txt",)).keys]
    assert sorted(keys) == sorted(f"s{n}".encode() for n in range(23)) and keys != sorted(keys)


def test_the_same_shards_for_any_number_of_processes_and_others_for_another_seed(tmp_path) -> None:
    for name, workers in (("one", 1), ("three", 3)):
        preprocess(job(tmp_path / name), workers)
    preprocess(job(tmp_path / "seed", seed=5), 1)
    preprocess(job(tmp_path / "order", seed=None), 1)
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "three")
    assert bytes_of(tmp_path / "seed") != bytes_of(tmp_path / "one")
    ordered = open_shard(tmp_path / "order" / "train-00000.tar", ("txt",))
    assert ordered.keys.tolist() == [b"s0", b"s1", b"s2", b"s3"]


def test_what_is_finished_is_not_made_again(tmp_path) -> None:
    before = preprocess(job(tmp_path))
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.tar")}
    (tmp_path / "train-00002.tar").unlink()
    (tmp_path / "train-00004.tar").write_bytes(b"cut")
    assert preprocess(job(tmp_path)) == before
    changed = {path.name for path, then in written.items() if path.stat().st_mtime_ns != then}
    assert changed == {"train-00002.tar", "train-00004.tar"}


def test_another_job_is_refused_and_says_what_differs(tmp_path) -> None:
    preprocess(job(tmp_path))
    before = bytes_of(tmp_path)
    with pytest.raises(ValueError, match="other options .*seed 1234 then, 7 now"):
        preprocess(job(tmp_path, seed=7))
    with pytest.raises(ValueError, match="listing .*samples {'train': 23, 'test': 5} then, {'train': 22"):
        preprocess(job(tmp_path, samples=22))
    assert bytes_of(tmp_path) == before and not (tmp_path / ".preprocess").exists()


def test_a_folder_with_something_else_in_it_is_refused(tmp_path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty"):
        preprocess(job(tmp_path))
    with pytest.raises(ValueError, match="is a file"):
        preprocess(job(tmp_path / "thesis.txt"))
    assert list(bytes_of(tmp_path)) == ["thesis.txt"]


def test_one_broken_sample_stops_the_run_or_is_left_out_and_recorded(tmp_path) -> None:
    for workers in (1, 2):
        with pytest.raises(ValueError, match="bad9 is broken; .*--skip-broken"):
            preprocess(job(tmp_path / str(workers), bad=(9,)), workers)
        assert not list((tmp_path / str(workers)).glob("*.partial"))
    index = preprocess(job(tmp_path / "skip", bad=(9, 14), skip_broken=True), 2)
    assert sum(shard.samples for shard in index.of_split("train")) == 21
    assert sorted(reason for shard in index.shards for reason in shard.broken) == ["bad14 is broken", "bad9 is broken"]
    with pytest.raises(ValueError, match="none of the 4 samples of .*tar can be used; the first: bad"):
        preprocess(job(tmp_path / "all", bad=tuple(range(23)), skip_broken=True))


def test_a_run_that_stopped_at_a_broken_sample_goes_on_without_it(tmp_path) -> None:
    with pytest.raises(ValueError, match="bad9 is broken; .*--skip-broken"):
        preprocess(job(tmp_path / "out", bad=(9,), seed=None))
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.tar")}
    assert len(written) == 2, "samples 0 to 7"
    preprocess(job(tmp_path / "out", bad=(9,), seed=None, skip_broken=True))
    assert all(path.stat().st_mtime_ns == then for path, then in written.items())
    with pytest.raises(ValueError, match="bad9 is broken"):
        preprocess(job(tmp_path / "out", bad=(9,), seed=None))


def test_other_options_are_fine_as_long_as_there_is_no_shard(tmp_path) -> None:
    with pytest.raises(ValueError, match="bad0 is broken"):
        preprocess(job(tmp_path, bad=(0,), seed=None))
    assert len(preprocess(job(tmp_path, seed=3)).shards) == 8


def test_a_worker_that_dies_ends_the_run(tmp_path) -> None:
    with pytest.raises(ValueError, match="a worker process ended without a word"):
        preprocess(job(tmp_path, encode=dying), 2)
    assert not (tmp_path / "index.json").exists() and not list(tmp_path.glob("*.partial"))


def test_two_runs_in_one_folder(tmp_path) -> None:
    code = (
        "from pathlib import Path; from megasnn.preprocess.run import preprocess\n"
        "from tests.preprocess.jobs import job, sleepy\n"
        f"preprocess(job(Path({str(tmp_path)!r}), encode=sleepy))"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as other:
        wait_for(tmp_path, 1)
        with pytest.raises(ValueError, match="another run is writing into"):
            preprocess(job(tmp_path, encode=sleepy))
        assert other.wait(30) == 0
    assert read_index(tmp_path) is not None


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_run_continues_to_the_same_bytes(tmp_path, workers) -> None:
    """Killed as the operating system does it: nothing can be tidied up, and the workers lose their parent."""
    code = (
        "from pathlib import Path; from megasnn.preprocess.run import preprocess\n"
        "from tests.preprocess.jobs import job, sleepy\n"
        f"if __name__ == '__main__': preprocess(job(Path({str(tmp_path / 'out')!r}), encode=sleepy), {workers})"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.Popen([sys.executable, str(script)], cwd=ROOT, env=environment)
    wait_for(tmp_path / "out", 2)
    run.send_signal(signal.SIGKILL)
    run.wait()
    out = tmp_path / "out"
    time.sleep(0.3)  # the workers notice
    finished = {path: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    assert 2 <= len(finished) < 8 and not (out / "index.json").exists()
    with pytest.raises(ValueError, match=f"shards in {out} are not complete"):
        open_shard(next(iter(finished)), ("txt",))
    recorded = [out / record.name.removesuffix(".json") for record in (out / ".preprocess").glob("*.tar.json")]
    preprocess(job(out), workers)
    assert len(recorded) >= 2 and all(path.stat().st_mtime_ns == finished[path] for path in recorded), "made again"
    preprocess(job(tmp_path / "straight"))
    assert bytes_of(out) == bytes_of(tmp_path / "straight")


def wait_for(folder: Path, shards: int) -> None:
    deadline = time.monotonic() + 30
    while len(list((folder / ".preprocess").glob("*.tar.json"))) < shards:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_names_the_shard_and_leaves_no_part_of_it(tmp_path, workers) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("no small disk can be mounted here")
    try:
        with pytest.raises(
            ValueError, match=r"cannot write (shard )?.*disk/out/.*\.tar(\.json)?: No space left on device"
        ):
            preprocess(job(disk / "out"), workers)
        left = list((disk / "out").glob("*.tar*"))
        assert left, "some shards fit"
        assert not [path for path in left if path.suffix != ".tar"] and not (disk / "out" / "index.json").exists()
        subprocess.run(["mount", "-o", "remount,size=2m", str(disk)], check=True)
        preprocess(job(disk / "out"), workers)
        preprocess(job(tmp_path / "straight"))
        assert bytes_of(disk / "out") == bytes_of(tmp_path / "straight")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_file_size_limit_is_an_error_that_names_the_shard(tmp_path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limit[1]))
        with pytest.raises(ValueError, match=r"cannot write shard .*train-00000\.tar: File too large"):
            preprocess(job(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not list(tmp_path.glob("*.tar*"))


def test_verify_finds_what_training_would_not(tmp_path, capsys) -> None:
    cifar10_dvs(tmp_path / "in")
    make = ["cifar10-dvs", "--input", str(tmp_path / "in"), "--output", str(tmp_path / "out"), "--workers", "1"]
    assert preprocess_data.main([*make, "--samples-per-shard", "6", "--time-steps", "2"]) == 0
    assert "18 samples" in capsys.readouterr().out
    assert preprocess_data.main(["verify", str(tmp_path / "out")]) == 0
    shard = tmp_path / "out" / "train-00001.tar"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:600] + bytes([whole[600] ^ 1]) + whole[601:])
    assert preprocess_data.main(["verify", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert f"{shard} has changed" in error and "train-00000" not in error
    shard.write_bytes(whole + bytes(10240))
    with pytest.raises(
        ValueError, match=f"shard {shard} has {len(whole) + 10240} bytes, index.json .* says {len(whole)}"
    ):
        open_shard(shard, (FRAMES, EVENTS))
    shard.unlink()
    assert preprocess_data.main(["verify", str(tmp_path / "out")]) == 1
    assert f"{shard} is missing" in capsys.readouterr().err


def test_verify_reads_linked_shards_as_training_does(tmp_path) -> None:
    preprocess(job(tmp_path))
    shard = tmp_path / "train-00001.tar"
    elsewhere = shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(elsewhere)
    assert verify(tmp_path) == []
    elsewhere.write_bytes(bytes(elsewhere.stat().st_size))
    (wrong,) = verify(tmp_path)
    assert wrong.startswith(f"{shard} has changed")


def test_training_refuses_a_shard_with_another_number_of_samples(tmp_path) -> None:
    preprocess(job(tmp_path))
    index = json.loads((tmp_path / "index.json").read_text())
    index["shards"][0]["samples"] = 5
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="train-00000.tar holds 4 samples, index.json beside it says 5"):
        open_shard(tmp_path / "train-00000.tar", ("txt",))
    (tmp_path / "index.json").write_text("{")
    with pytest.raises(ValueError, match="index.json: .* it is no index of shards: make the shards again"):
        open_shard(tmp_path / "train-00000.tar", ("txt",))
