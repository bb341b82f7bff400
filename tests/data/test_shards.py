from __future__ import annotations

import os
import tarfile

import numpy as np
import pytest

from megasnn.data.event_files import FRAMES, encode_frames
from megasnn.data.shards import open_shard
from tests.data.shard_files import numbered, open_all, sample_files, write_shard, write_shards


def test_samples_are_found_across_shards(tmp_path):
    dataset = open_all(write_shards(tmp_path, samples=7, per_shard=3))
    assert [dataset.key(index) for index in range(7)] == [f"s{number:03d}" for number in range(7)]
    assert [int(np.unique(dataset.sample(index)).item()) for index in range(7)] == list(range(7))
    assert dataset.labels.tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_a_packed_shard_reads_like_the_plain_one(tmp_path):
    plain = open_all([write_shard(tmp_path / "a.tar", numbered(range(5)))])
    packed = open_all([write_shard(tmp_path / "b.tar.gz", numbered(range(5)))])
    assert [int(np.unique(packed.sample(index)).item()) for index in range(5)] == list(range(5))
    assert packed.fingerprint() == plain.fingerprint()


def test_more_shards_than_a_thread_keeps_open(tmp_path):
    dataset = open_all(write_shards(tmp_path, samples=40, per_shard=1))
    before = len(os.listdir("/proc/self/fd"))
    assert [int(dataset.sample(index)[0, 0, 0]) for index in range(40)] == list(range(40))
    assert len(os.listdir("/proc/self/fd")) - before <= 16


def test_files_of_a_sample_need_not_be_neighbours_and_folders_are_part_of_the_key(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        for suffix in ("png", "cls", "json"):
            for number in (4, 5):
                data = tmp_path / "data"
                data.write_bytes(sample_files(number).get(suffix, b"{}"))
                archive.add(data, f"images/s{number}.{suffix.upper()}")
    dataset = open_all([path])
    assert [dataset.key(index) for index in range(2)] == ["images/s4", "images/s5"]
    assert [int(np.unique(dataset.sample(index)).item()) for index in range(2)] == [4, 5]


def test_the_index_is_scanned_once_and_again_when_the_shard_changes(tmp_path, monkeypatch):
    import megasnn.data.shards as shards

    scans = []
    scan = shards._scan
    monkeypatch.setattr(shards, "_scan", lambda *args: scans.append(args) or scan(*args))
    path = write_shard(tmp_path / "a.tar", numbered(range(2)))
    assert len(open_shard(path)) == len(open_shard(path)) == 2
    assert len(scans) == 1
    write_shard(path, numbered(range(30)))
    assert len(open_shard(path)) == 30
    assert len(scans) == 2


def test_the_index_of_a_small_bound_is_not_that_of_a_larger_one(tmp_path):
    """No sample within the small bound shows the shape of the frames."""
    frames = encode_frames(np.ones((4, 2, 8, 8), np.uint8))
    path = write_shard(tmp_path / "a.tar", {"a": {FRAMES: frames, "cls": b"0"}})
    assert open_shard(path, (FRAMES,), limit=10).frames.tolist() == []
    assert open_shard(path, (FRAMES,)).frames.tolist() == [4, 2, 8, 8]


def test_a_damaged_index_does_no_harm(tmp_path, cache):
    path = write_shard(tmp_path / "a.tar", numbered(range(4)))
    expected = open_shard(path)
    (index,) = (cache / "index").glob("*.npz")
    for damage in (b"", index.read_bytes()[:100]):
        index.write_bytes(damage)
        assert np.array_equal(open_shard(path).offsets, expected.offsets)


def test_every_cut_of_a_tar_is_noticed(tmp_path):
    whole = write_shard(tmp_path / "whole.tar", numbered(range(2))).read_bytes()
    end = len(whole.rstrip(b"\0")) // 512 * 512 + 512  # of the last file, rounded up to blocks
    cuts = [*range(0, end + 1, 512), *range(100, end, 700), end + 100]
    for cut in cuts:
        path = tmp_path / f"cut-{cut}.tar"
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=f"shard {path} is cut"):
            open_shard(path)
    assert len(cuts) > 12


def test_every_cut_of_a_packed_tar_is_noticed_and_leaves_nothing(tmp_path, cache):
    whole = write_shard(tmp_path / "whole.tar.gz", numbered(range(20))).read_bytes()
    for cut in (0, 5, len(whole) // 2, len(whole) - 9, len(whole) - 4):
        path = tmp_path / f"cut-{cut}.tar.gz"
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=f"(shard {path} is cut)|(is not a tar)"):
            open_shard(path)
    assert not [found for found in cache.glob("unpacked/.*") if not found.name.endswith(".lock")]


def test_a_flipped_byte_in_a_packed_shard_is_noticed(tmp_path):
    path = write_shard(tmp_path / "a.tar.gz", numbered(range(20)))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"shard {path} is cut or damaged"):
        open_shard(path)


def test_archives_joined_end_to_end_are_refused(tmp_path):
    path = write_shard(tmp_path / "a.tar", numbered(range(2)))
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(ValueError, match=f"shard {path} goes on after its end mark"):
        open_shard(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda files: files.pop("cls"), "'s001' of shard .*a.tar has the files png; it needs a label"),
        (lambda files: files.pop("png"), "'s001' of shard .*a.tar has the files cls; it needs"),
        (lambda files: files.update(jpg=b"1"), "'s001' of shard .*a.tar has the files cls, jpg, png"),
        (lambda files: files.update(cls=b"cat"), "label b'cat' of sample 's001' in shard .*a.tar"),
        (lambda files: files.update(cls=b""), "label b'' of sample 's001' in shard .*a.tar"),
    ],
)
def test_an_incomplete_sample_is_named(tmp_path, change, message):
    samples = numbered(range(3))
    change(samples["s001"])
    with pytest.raises(ValueError, match=message):
        open_shard(write_shard(tmp_path / "a.tar", samples))


def test_an_empty_shard_and_a_file_that_is_no_tar(tmp_path):
    with pytest.raises(ValueError, match="a.tar holds no samples"):
        open_shard(write_shard(tmp_path / "a.tar", {}))
    (tmp_path / "b.tar").write_bytes(b"something else" * 100)
    with pytest.raises(ValueError, match="b.tar is cut or is not a tar file"):
        open_shard(tmp_path / "b.tar")


@pytest.mark.parametrize("label", [3, -1])
def test_a_label_out_of_range_is_named_before_anything_is_read(tmp_path, label):
    paths = write_shards(tmp_path, samples=4, per_shard=2)
    samples = numbered(range(2, 4))
    samples["s003"]["cls"] = str(label).encode()
    write_shard(paths[1], samples)
    with pytest.raises(ValueError, match=rf"{label} of sample 's003' of shard {paths[1]}.*--num-classes \(now 3\)"):
        open_all(paths)


def test_the_fingerprint_tells_data_sets_apart(tmp_path):
    prints = {open_all(write_shards(tmp_path, samples=6, per_shard=3)).fingerprint()}
    assert open_all(write_shards(tmp_path, samples=6, per_shard=6)[:1]).fingerprint() in prints
    samples = numbered(range(6))
    samples["s002"]["cls"] = b"0"
    prints.add(open_all([write_shard(tmp_path / "label.tar", samples)]).fingerprint())
    prints.add(open_all([write_shard(tmp_path / "fewer.tar", numbered(range(5)))]).fingerprint())
    prints.add(open_all([write_shard(tmp_path / "other.tar", numbered(range(1, 7)))]).fingerprint())
    assert len(prints) == 4


def test_a_shard_cut_while_in_use_is_named(tmp_path):
    paths = write_shards(tmp_path, samples=4, per_shard=4)
    dataset = open_all(paths)
    with open(paths[0], "r+b") as file:
        file.truncate(600)
    with pytest.raises(ValueError, match=f"sample 's003' of shard {paths[0]} ends early"):
        dataset.sample(3)


def test_a_cache_that_cannot_be_written_says_which_variable_helps(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("MEGASNN_CACHE", str(tmp_path / "file"))
    with pytest.raises(ValueError, match="MEGASNN_CACHE"):
        open_shard(write_shard(tmp_path / "a.tar", numbered(range(2))))
