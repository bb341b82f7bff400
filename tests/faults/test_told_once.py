"""An error is told once: in full and with its place by the rank that saw it first, in one line by each other rank."""

from __future__ import annotations

import pytest

from tests.data.shard_files import numbered, write_shard
from tests.faults.launch import PP3, TINY, Ended, Ranks, lines_of

RANKS, SECONDS = 3, 90.0
MODEL = (*TINY, *PP3, "--neuron-backend", "torch")  # nothing has to be compiled


def told_once(ended: Ended, kind: str, text: str, *places: str) -> str:
    """The only occurrence of the text, by a rank that names its stage; the line of the others says kind and place."""
    assert ended.status == [1] * RANKS, ended.output
    tellers = [rank for rank, output in enumerate(ended.output) if text in output]
    assert "".join(ended.output).count(text) == len(tellers) == 1, ended.output
    (teller,) = tellers
    (told,) = [line for line in ended.output[teller].splitlines() if text in line]
    assert len(lines_of(teller, ended.output[teller])) == 1
    for place in (f"pipeline stage {teller}", *places):
        assert place in told, told
    place = told.removeprefix(f"[rank {teller}] ").partition(f": {kind}: ")[0]
    for rank in set(range(RANKS)) - {teller}:
        last = f"[rank {rank}] stopping, because of rank {teller}: {kind} {place}"
        assert lines_of(rank, ended.output[rank]) == [last] and ended.output[rank].endswith(f"{last}\n"), ended.output
        assert rank == 0 or ended.output[rank] == f"{last}\n", "ranks other than 0 print nothing else"
    return told


def test_opening_the_data(tmp_path) -> None:
    argv = [*MODEL, "--data-path", str(tmp_path / "absent.tar")]
    told_once(Ranks(tmp_path, RANKS, *argv).end(SECONDS), "ValueError", "absent.tar", "while opening the data")


def test_loading_a_checkpoint(tmp_path) -> None:
    argv = [*MODEL, "--load", str(tmp_path / "absent")]
    ended, place = Ranks(tmp_path, RANKS, *argv).end(SECONDS), "while looking at the checkpoint of --load"
    told_once(ended, "NoCheckpointError", str(tmp_path / "absent"), place)


@pytest.mark.parametrize(
    ("fault", "text", "places"),
    [
        ("raise_in_step", "RuntimeError: injected fault", ("action 2F1", "micro-batch 1")),
        ("lose_the_gpu", "AcceleratorError: CUDA error: an illegal memory access", ("action 2F1", "micro-batch 1")),
        ("raise_in_save", "RuntimeError: injected fault while saving", ("while saving", "after iteration 2")),
    ],
)
def test_in_a_step_and_while_saving(tmp_path, fault, text, places) -> None:
    argv = [*MODEL, "--save", str(tmp_path / "run"), "--save-interval", "2"]
    ended = Ranks(tmp_path / "ranks", RANKS, *argv, fault=(fault, 2)).end(SECONDS)
    told_once(ended, text.partition(":")[0], text, *places)
    assert ("CUDA_LAUNCH_BLOCKING" in ended.output[2]) == (fault == "lose_the_gpu")
    # What is not a mistake of the user has its traceback above the line with the place.
    assert ended.output[2].startswith("[rank 2] Traceback (most recent call last):\n")


def test_a_broken_image(tmp_path) -> None:
    """Found by a process that reads for the rank; where in that process is of no use to anybody."""
    samples = numbered(range(8))
    samples["s005"]["png"] = b"not an image"
    shard = write_shard(tmp_path / "broken.tar", samples)
    ended = Ranks(tmp_path, RANKS, *MODEL, "--data-path", str(shard), "--no-shuffle").end(SECONDS)
    told_once(ended, "BrokenSample", "sample 's005' of shard", "while reading a batch", "after iteration 1")
