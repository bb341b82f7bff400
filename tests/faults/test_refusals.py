"""Flags that cannot work are refused with status 2, and data that cannot be used by the rank that reads them."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import megasnn
import pretrain_spikformer
from tests.data.shard_files import numbered, write_shard
from tests.faults.launch import PP2, TINY, Ranks, lines_of, refused

REFUSED = [
    ("--tensor-model-parallel-size 8 --embed-dim 64", ["--num-heads 4", "--tensor-model-parallel-size 8"]),
    ("--tensor-model-parallel-size 8 --num-heads 8", ["out_channels 4", "--tensor-model-parallel-size 8"]),
]


@pytest.mark.parametrize(("flags", "expected"), REFUSED)
def test_refused_with_values_and_flags_once(flags, expected, tmp_path, monkeypatch, capsys) -> None:
    folder, told = tmp_path / "run", []
    monkeypatch.setenv("WORLD_SIZE", "8")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        argv = [*TINY, *flags.split(), "--save", str(folder), "--tensorboard-dir", str(folder)]
        assert pretrain_spikformer.main(argv) == 2 and not folder.exists()
        told.append(capsys.readouterr().err)
    assert len(lines_of(0, told[0])) == 1 and all(part in told[0] for part in expected) and told[1] == "", told


def test_each_machine_hears_of_its_command_line_and_other_ranks_wait_for_that(tmp_path, monkeypatch, capsys) -> None:
    """Rank 0 may have been given flags that are right. torchrun ends all ranks as soon as one has ended."""
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "1"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    assert pretrain_spikformer.main([*TINY, "--num-heads", "3"]) == 2
    assert "[rank 1] " in (text := capsys.readouterr().err) and "--num-heads 3" in text
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert pretrain_spikformer.main([*TINY, "--num-heads", "3"]) == 2 and capsys.readouterr().err == ""
    assert "--num-heads 3" in shown_by_torchrun(tmp_path / "error.json")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    started = time.monotonic()
    assert pretrain_spikformer.main([*TINY, "--num-heads", "3"]) == 2 and capsys.readouterr().err == ""
    assert time.monotonic() - started > 2


def shown_by_torchrun(error_file: Path) -> str:
    return str(ChildFailedError("megasnn", {0: ProcessFailure(0, 1, 1, str(error_file))}))


LANGUAGE = (
    "--embed-dim 8 --depth 1 --num-heads 2 --time-steps 2 --seq-length 32 --train-iters 1 "
    "--global-batch-size 2 --micro-batch-size 2"
)
TEXTS = {
    "--data-path empty.txt": "--data-path empty.txt: there is no text",
    "--data-path missing.txt": "--data-path missing.txt: missing.txt does not exist",
    "--data-path short.txt": "13 tokens, and one sample is 32 and the next one (--seq-length)",
    "--data-path sample --vocab-size 50": "raise --vocab-size to 257",
}


@pytest.mark.parametrize("flags", TEXTS)
def test_torchrun_prints_a_mistake_in_the_data_as_one_sentence(flags, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEGASNN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    Path("empty.txt").touch()
    Path("short.txt").write_text("Twelve bytes")
    assert megasnn.pretrain("spike_lm", [*LANGUAGE.split(), *flags.split()]) == 1
    shown = shown_by_torchrun(tmp_path / "error.json")
    sentence = shown[shown.index("traceback : ") :].splitlines()[0]
    assert sentence.startswith("traceback : while opening the data, on pipeline stage 0: ValueError: --data-path ")
    assert TEXTS[flags] in sentence and "Traceback" not in shown and capsys.readouterr().err == "", shown


def test_a_broken_image_is_named_on_every_rank_or_skipped_and_counted(tmp_path) -> None:
    """Rank 1 reads labels only; it hears of it from rank 0."""
    samples = numbered(range(12))
    samples["s009"]["png"] = b"not an image"
    broken, board = write_shard(tmp_path / "broken.tar", samples), tmp_path / "board"
    argv = [*TINY, *PP2, "--no-shuffle", "--data-path", str(broken)]
    ended = Ranks(tmp_path / "refused", 2, *argv, "--save", str(tmp_path / "saved")).end(90)
    refused(ended, f"sample 's009' of shard {broken}", "--skip-broken-samples")
    assert not (tmp_path / "saved" / "latest_checkpointed_iteration.txt").exists()
    argv += ["--skip-broken-samples", "--tensorboard-dir", str(board), "--valid-data-path", str(broken)]
    ended = Ranks(tmp_path / "skipped", 2, *argv, "--eval-iters", "none", "--train-iters", "6").end(90)
    assert ended.status == [0, 0], ended.output
    # Sample 9 of 12 comes in the third and in the sixth global batch of 4, and once when all are evaluated at the end.
    assert re.findall(r"number of skipped samples: (\d+)", ended.output[0]) == ["1", "1", "1", "2", "1"]
    events = EventAccumulator(str(board)).Reload()
    for tag, counts in (("skipped_samples", [1, 1, 1, 2]), ("skipped_validation_samples", [1])):
        assert [event.value for event in events.Scalars(f"8_data/{tag}")] == counts
