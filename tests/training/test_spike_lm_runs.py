"""Runs of SpikeLM go on on another layout, in the midst of an epoch, as if nothing had happened."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.training.runs import close, log_of, saved, train_model, without_trial

SIZES = (
    "--embed-dim 16 --depth 2 --num-heads 4 --time-steps 2 --seq-length 13 --vocab-size 259 --micro-batch-size 2 "
    "--global-batch-size 8 --num-workers 0 --lr 1e-2 --precision fp64 --log-interval 1 --eval-interval 3 "
    "--eval-iters 2 --train-iters 6 --save-interval 1"
).split()
MODELS = {
    "tied, calibrated": "--tied --amplitude first-batch",
    "spiking": "--attention spiking --positions learned --v-threshold 1.3",
}
CHAIN = {
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "cp2 tokens": (2, "--context-parallel-size 2 --context-parallel-cut tokens"),
    "pp2": (2, "--pipeline-model-parallel-size 2 --pipeline-schedule zbv --use-distributed-optimizer"),
    "pp2 zero 1": (4, "--pipeline-model-parallel-size 2 --use-distributed-optimizer"),
    "weights 2": (2, "--weight-parallel-size 2"),
    "one": (1, ""),
}
"""Each goes on one step behind the start of the one before."""


def trained(cache: str, flags: str) -> None:
    os.environ["MEGASNN_CACHE"] = cache
    with without_trial():
        train_model("spike_lm", [*SIZES, *flags.split()])


@pytest.mark.parametrize("model", MODELS)
def test_a_run_goes_on_from_layout_to_layout(ranks, cache: str, tmp_path: Path, model: str) -> None:
    whole = tmp_path / "whole"
    ranks(1, trained, cache, f"{MODELS[model]} --save {whole}")
    wanted = saved(whole)
    losses = {line["iteration"]: line["loss"] for line in log_of(whole, "iteration")}
    validation = {line["iteration"]: line["loss"] for line in log_of(whole, "validation")}
    source = ""
    for step, (name, (size, flags)) in enumerate(CHAIN.items()):
        folder = tmp_path / name.replace(" ", "_")
        ranks(size, trained, cache, f"{MODELS[model]} {source} --save {folder} {flags}")
        assert close(saved(folder), wanted), name
        for line in log_of(folder, "iteration"):
            assert line["loss"] == pytest.approx(losses[line["iteration"]], rel=1e-9), name
        for line in log_of(folder, "validation"):
            assert line["loss"] == pytest.approx(validation[line["iteration"]], rel=1e-9), name
        source = f"--load {folder} --ckpt-step {step + 1}"
