"""What a run must not do behind its user's back: keep a nan, start anew by mistake, pack what does not fit."""

from __future__ import annotations

import threading
from itertools import count

import pytest
import torch

import megasnn
from megasnn.checkpoint.folder import list_checkpoints
from megasnn.data import GlobalBatch
from megasnn.engine.batch import Batches
from megasnn.files import CheckpointError, NoCheckpointError
from megasnn.parallel_state import destroy_model_parallel, initialize_model_parallel
from megasnn.pipeline.microbatch_state import MicroBatchInput
from tests.gradients import forward_backward, merge_statistics
from tests.parity import spikingjelly_reference as reference
from tests.parity.ranks import build_engine
from tests.training.runs import TINY, train, whole


def test_a_step_that_is_not_merged_leaves_the_running_statistics_alone() -> None:
    """A nan in the data: the step is skipped, and the next good one gives what it would have given without it."""
    state = initialize_model_parallel()
    try:
        images, labels = reference.data(4)
        good = [MicroBatchInput(images, labels, 4)]
        bad = [MicroBatchInput(images * float("nan"), labels, 4)]
        engine, untouched = (build_engine(state, "1f1b", torch.float64) for _ in range(2))
        forward_backward(engine, bad, 4)
        assert not engine.norm < float("inf")
        for each in (engine, untouched):
            forward_backward(each, good, 4)
            merge_statistics(each, 1)
        for ours, theirs in zip(engine.tensors, untouched.tensors, strict=True):
            assert torch.equal(ours.tensor, theirs.tensor), ours.name
    finally:
        destroy_model_parallel()


def test_a_run_with_a_broken_step_ends_with_finite_tensors(tmp_path_factory, monkeypatch) -> None:
    inputs = Batches.inputs
    batches = count()

    def with_nan(made_of: Batches, batch: GlobalBatch, trains: bool) -> list[MicroBatchInput]:
        made = inputs(made_of, batch, trains)
        if next(batches) == 1:
            made[0].images[0, 0, 0, 0] = float("nan")
        return made

    monkeypatch.setattr(Batches, "inputs", with_nan)
    outcome = train(str(tmp_path_factory.mktemp("cache")), "--train-iters", "3", "--eval-iters", "0")
    tensors = whole([outcome])
    assert all(torch.isfinite(value).all() for value in tensors.values())
    assert tensors["patch_embed.stages.0.norm.num_batches_tracked"] == 2


def test_a_folder_named_by_mistake_is_refused_and_a_first_start_is_not(tmp_path_factory, tmp_path) -> None:
    cache = str(tmp_path_factory.mktemp("cache"))
    with pytest.raises(NoCheckpointError, match="typo"):
        train(cache, "--train-iters", "1", "--load", str(tmp_path / "typo"))
    folder = str(tmp_path / "job")
    first = train(cache, "--train-iters", "2", "--exit-interval", "1", "--load", f"{folder}/", "--save", folder)
    second = train(cache, "--train-iters", "2", "--load", folder, "--save", folder)
    assert (first.iteration, second.iteration) == (1, 2)


def test_what_a_resumed_run_does_otherwise_is_told_or_refused(tmp_path_factory, tmp_path, capsys) -> None:
    cache, folder = str(tmp_path_factory.mktemp("cache")), str(tmp_path)
    train(cache, "--train-iters", "2", "--exit-interval", "1", "--eval-iters", "0", "--save", folder)
    capsys.readouterr()
    again = ("--train-iters", "2", "--eval-iters", "0", "--load", folder)
    train(cache, *again)
    assert "changed since" not in capsys.readouterr().out
    train(cache, *again, "--loss", "mse", "--augment", "cifar")
    printed = capsys.readouterr().out
    assert "WARNING: changed since the checkpoint was saved: --loss from cross-entropy to mse, --augment" in printed
    with pytest.raises(CheckpointError, match="last_batch: continue when it was saved, drop now"):
        train(cache, *again, "--last-batch", "drop")


def test_a_program_goes_on_after_a_run_that_failed(tmp_path_factory, tmp_path, monkeypatch) -> None:
    """What it was saving is saved, nothing works on beside it, and folder and grid are free for the next run."""
    monkeypatch.setenv("MEGASNN_CACHE", str(tmp_path_factory.mktemp("cache")))
    folders = ("--save", str(tmp_path), "--load", str(tmp_path), "--async-save", "--save-interval", "1")
    flags = [*TINY, "--train-iters", "3", *folders, "--num-workers", "0"]
    with monkeypatch.context() as patch:
        inputs, steps = Batches.inputs, count()

        def failing(made_of: Batches, batch: GlobalBatch, trains: bool) -> list[MicroBatchInput]:
            if next(steps) == 2:
                raise RuntimeError("injected")
            return inputs(made_of, batch, trains)

        patch.setattr(Batches, "inputs", failing)
        assert megasnn.pretrain("spikformer", flags) == 1
    assert list_checkpoints(tmp_path) == [1, 2]
    assert not [thread for thread in threading.enumerate() if thread.name == "megasnn-save"]
    assert megasnn.pretrain("spikformer", flags) == 0
    assert list_checkpoints(tmp_path) == [1, 2, 3]
