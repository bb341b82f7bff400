"""--micro-batch-size auto: the largest that fits, the same on every rank, and kept."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import pytest
import torch

import megasnn
from megasnn.common.memory import available_memory_mb, resident_memory_mb
from megasnn.config import ConfigError, parse, validate
from megasnn.config.validate import micro_batch_candidates
from megasnn.models.model import run_config
from megasnn.models.spikformer.model import Spikformer
from megasnn.training import micro_batch
from tests.training.runs import TINY, log_of, train, without_trial

AUTO = ("--micro-batch-size", "auto", "--global-batch-size", "12", "--train-iters", "1", "--eval-iters", "0")
CPU = torch.device("cpu")


def config_of(*flags: str):
    return parse(run_config(Spikformer), [*TINY, *AUTO, *flags])


def sizes_of(folder: Path) -> tuple[int, int, str]:
    """Size in config.json, in the first checkpoint, and the line in the log."""
    config = json.loads((folder / "config.json").read_text())
    saved = json.loads((folder / "iter_0000001" / "metadata.json").read_text())["extra"]["recipe"]
    lines = [line["text"] for line in log_of(folder, "message") if line["text"].startswith("--micro-batch-size auto: ")]
    return config["training"]["micro_batch_size"], saved["--micro-batch-size"], lines[-1]


def test_sizes_share_the_batch_evenly_and_give_every_stage_a_micro_batch() -> None:
    assert micro_batch_candidates(config_of(), 1) == [1, 2, 3, 4, 6, 12]
    assert micro_batch_candidates(config_of(), 2) == [1, 2, 3, 6]
    assert micro_batch_candidates(config_of("--pipeline-model-parallel-size", "2"), 2) == [1, 2, 3, 4, 6]
    validate(config_of(), 2)
    with pytest.raises(ConfigError, match="multiple of 5"):
        validate(config_of(), 5)


def test_what_contradicts_it_is_refused() -> None:
    for flags, named in (
        (("--memory-budget", "100"), "--memory-budget 100"),
        (("--context-parallel-size", "2"), "--context-parallel-size 2"),
    ):
        with pytest.raises(ConfigError, match=f"--micro-batch-size auto.*{named}"):
            validate(config_of(*flags), 2)
    with pytest.raises(ConfigError, match="number"):
        megasnn.Engine(Spikformer(), micro_batch_size="auto", train_iters=1)
    for wrong in ("0", "most"):
        with pytest.raises(ConfigError, match="--micro-batch-size"):
            config_of("--micro-batch-size", wrong)
    assert repr(config_of().training.micro_batch_size) == "auto" and asdict(config_of())["training"]


def with_room(megabytes: float) -> mock._patch:
    """The machine has this much memory beside the process's own."""
    return mock.patch.object(micro_batch, "available_memory_mb", lambda device: megabytes)


def test_the_number_follows_the_memory_and_is_kept(cache, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    with with_room(1e6):
        train(cache, *AUTO, "--save", folder)
    size, saved, line = sizes_of(tmp_path / "run")
    assert size == saved == 12 and "12, the largest part of 12 that fits" in line
    # With less memory the run goes on with its own size, since another one would be another function.
    with with_room(0.0):
        train(cache, *AUTO, "--train-iters", "2", "--save", folder, "--load", folder)
    assert sizes_of(tmp_path / "run")[2].endswith("12, that of the checkpoint")
    with pytest.raises(ConfigError, match="auto keeps the checkpoint's 12: --micro-batch-size 12 is larger than"):
        train(cache, *AUTO, "--global-batch-size", "8", "--train-iters", "3", "--load", folder)


@pytest.mark.parametrize(("room", "found"), [(450.0, 4), (1000.0, 6), (101.0, 1)])
def test_the_largest_size_below_the_limit_is_taken(cache, tmp_path: Path, room: float, found: int) -> None:
    need = mock.Mock(side_effect=lambda config, engine: 100.0 * config.training.micro_batch_size)
    limit = mock.patch.multiple(micro_batch, predicted_mb=need, SHARE=1.0, resident_memory_mb=lambda device: room)
    with limit, with_room(0.0), without_trial():
        train(cache, *AUTO, "--save", str(tmp_path / "run"))
    assert sizes_of(tmp_path / "run")[0] == found


def test_memory_that_is_too_small_is_told(cache, tmp_path: Path) -> None:
    with with_room(-1e6), pytest.raises(ValueError, match="a micro-batch of 1 needs .* MB a rank"):
        train(cache, *AUTO, "--save", str(tmp_path / "run"))


def on_ranks(cache: str, folder: str) -> None:
    train(cache, *AUTO, "--save", folder, "--pipeline-model-parallel-size", "2")


def test_all_ranks_take_the_same_number(ranks, cache, tmp_path: Path) -> None:
    ranks(2, on_ranks, cache, str(tmp_path / "run"))
    assert sizes_of(tmp_path / "run")[0] == 6


def test_steps_are_tried_until_the_memory_is_exhausted() -> None:
    tried = list[int]()

    def step(config: object, size: int) -> None:
        tried.append(size)
        if size > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")

    found, _ = micro_batch.largest_tried(config_of(), [1, 2, 3, 4, 6, 12], step)
    assert found == 3 and tried == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="a micro-batch of 4 exhausts the memory"):
        micro_batch.largest_tried(config_of(), [4, 6], step)


def test_a_tried_step_trains_a_replica() -> None:
    micro_batch.try_step(config_of(), 3)


def test_memory_of_the_machine_is_read_and_a_container_has_its_limit(tmp_path: Path) -> None:
    assert resident_memory_mb(CPU) < available_memory_mb(CPU)
    (tmp_path / "memory.max").write_text("300000000\n")
    (tmp_path / "memory.current").write_text("100000000\n")
    with mock.patch("megasnn.common.memory.CGROUP", tmp_path):
        assert available_memory_mb(CPU) == 200.0
