"""A problem of a value that no flag gives says what gives it: a recipe, a file, a variant or a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megasnn.commands import plan
from megasnn.config import ConfigError, parse
from megasnn.config.defaults import sources_of, with_sources
from megasnn.models.model import run_config
from megasnn.models.spikformer.dimensions import Spikformer
from megasnn.pretraining import pretrain

CLASS = run_config(Spikformer)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--config spikformer/digits --train-iters 2",
            "--lr-warmup-iters 10 is more than --train-iters 2 (--config spikformer/digits gives --lr-warmup-iters 10)",
        ),
        (
            "--config spikformer/imagenet --train-epochs 2",
            "--lr-warmup-epochs 20 and --lr-cooldown-epochs 10 are together more than --train-epochs 2 "
            "(--config spikformer/imagenet gives --lr-warmup-epochs 20 --lr-cooldown-epochs 10)",
        ),
        (
            "--variant spikformer_ti --num-heads 7 --train-iters 2",
            "--embed-dim 256 must be a multiple of --num-heads 7 (--variant spikformer_ti gives --embed-dim 256)",
        ),
        (
            "--config spikformer/digits --eval-iters 0",
            "--eval-interval 50 has no meaning with --eval-iters 0 "
            "(--config spikformer/digits gives --eval-interval 50; --eval-interval none takes it back)",
        ),
        (
            "--config spikformer/digits --data-path x",
            "--eval-interval 50 needs --valid-data-path "
            "(--config spikformer/digits gives --eval-interval 50; --eval-interval none takes it back)",
        ),
        ("--train-iters 2 --lr-warmup-iters 10", "--lr-warmup-iters 10 is more than --train-iters 2"),
        (
            "--config spikformer/digits --train-iters 2 --lr-warmup-iters 20",
            "--lr-warmup-iters 20 is more than --train-iters 2",
        ),
    ],
)
def test_a_run_says_what_gives_the_value(flags, message, capsys) -> None:
    assert pretrain("spikformer", flags.split()) == 2
    assert capsys.readouterr().err == f"[rank 0] 1 problem in the configuration:\n  - {message}\n"


def test_a_plan_says_it_too() -> None:
    words = "--gpus 2 spikformer --config spikformer/digits --num-heads 3"
    with pytest.raises(ConfigError, match=r"--num-heads 3 \(--config spikformer/digits gives --embed-dim 64\)"):
        plan.main(words.split())


def test_the_last_source_counts_and_paths_are_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "given.json"
    path.write_text(
        json.dumps({"model": {"variant": "spikformer_s"}, "data": {"data_path": "https://a:secret@b/c.tar"}})
    )
    argv, saved = ["--config", str(path)], {"model": {"embed_dim": 64, "time_steps": 7}}
    config, sources = parse(CLASS, argv, saved=saved), sources_of(CLASS, argv, {}, saved)
    problems = "--embed-dim 384 or --time-steps 7", "--data-path", "--lr 0.001 or --valid-data-path"
    assert with_sources(problems, config, sources) == [
        f"{problems[0]} (--config {path} gives --embed-dim 384; --load gives --time-steps 7)",
        f"{problems[1]} (--config {path} gives --data-path)",
        problems[2],
    ]
