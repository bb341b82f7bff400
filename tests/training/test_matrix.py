"""A checkpoint that any layout saves in the middle of a run is continued by any other, to the same end.

Each layout trains three steps without a stop and saves after two. Each goes on from what it and the next one saved: to
the very bits of its own uninterrupted run where it is the same layout, and otherwise to what float64 promises. The
samples, their order, dropout and the learning rate's schedule must go on with it, or the ends could not agree.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from megasnn.data.formats import FRAMES, encode_frames
from megasnn.data.preprocess.writing import write_shard
from tests.training.runs import Outcome, close, same, saved, train_vgg, without_trial

STEPS, SAVED_AT = 3, 2
TENSOR, PIPELINE = "--tensor-model-parallel-size {}".format, "--pipeline-model-parallel-size {}".format
CONTEXT, WEIGHT = "--context-parallel-size {}".format, "--weight-parallel-size {}".format
OWNED_ROWS = "--use-distributed-optimizer"
LAYOUTS = {
    "one": (1, ""),
    "tp4": (4, TENSOR(4)),
    "dp3": (3, ""),
    "wp2pp2v": (4, f"{WEIGHT(2)} --weight-gradients scattered {PIPELINE(2)} --pipeline-schedule zbv --async-save"),
    "cp2zero1": (2, f"{CONTEXT(2)} {OWNED_ROWS}"),
    "tp2pp2v": (4, f"{TENSOR(2)} {PIPELINE(2)} --pipeline-schedule zbv"),
}
COMMON = (
    f"--precision fp64 --train-iters {STEPS} --global-batch-size 8 --micro-batch-size 2 --neuron plif "
    "--eval-interval 2 --eval-iters 1 --optimizer lamb --weight-decay 0.05 --ema-decay 0.5 --clip-grad 0.05"
).split()


def straight(data: str, flags: str, save: str) -> None:
    """On a rank: a run that saves on its way."""
    run(data, [*flags.split(), "--save", save, "--save-interval", str(SAVED_AT)])


def continued(data: str, flags: str, folders: list[tuple[str, str]]) -> list[tuple[int, int]]:
    """On a rank: a run from each checkpoint, saved elsewhere; how far each came."""
    ends = []
    for load, save in folders:
        end = run(data, [*flags.split(), "--load", load, "--ckpt-step", str(SAVED_AT), "--save", save])
        ends.append((end.iteration, end.consumed_samples))
    return ends


def run(data: str, flags: list[str]) -> Outcome:
    with without_trial():
        return train_vgg(*COMMON, "--data-path", data, "--valid-data-path", data, *flags)


@pytest.fixture(scope="module")
def frames(tmp_path_factory) -> str:
    """A shard of event frames with a class-dependent pattern in noise."""
    path = tmp_path_factory.mktemp("frames") / "train-000.tar"
    random = np.random.default_rng(0)
    samples = []
    for index in range(24):
        counts = random.poisson(0.5, (3, 2, 16, 16))
        counts[:, :, 2 * (index % 5)] += 3
        samples.append((f"{index:04d}", {FRAMES: encode_frames(counts), "cls": str(index % 5).encode()}))
    write_shard(path, iter(samples))
    return str(path)


def test_every_layout_goes_on_from_others(ranks, frames, tmp_path: Path) -> None:
    """Weights, statistics, their average, and the optimizer's state."""
    names, ends = list(LAYOUTS), dict[str, dict[str, Tensor]]()
    for name in names:
        size, flags = LAYOUTS[name]
        ranks(size, straight, frames, flags, str(tmp_path / name))
        ends[name] = saved(tmp_path / name)
    assert {each.partition(".")[0] for each in ends["one"]} >= {"optimizer", "ema"}
    for name, files in (("dp3", 1), ("cp2zero1", 2), ("wp2pp2v", 4)):  # every rank writes what it owns
        assert len(list((tmp_path / name).glob(f"iter_*{STEPS}/*.safetensors"))) == files, name
    for number, name in enumerate(names):
        size, flags = LAYOUTS[name]
        sources = [name, names[(number + 1) % len(names)]]
        folders = [(str(tmp_path / source), str(tmp_path / f"{name}-from-{source}")) for source in sources]
        for each in ranks(size, continued, frames, flags, folders):
            assert each == [(STEPS, 8 * STEPS)] * len(sources)
        for source, (_, folder) in zip(sources, folders, strict=True):
            end = saved(Path(folder))
            assert close(end, ends["one"]), (source, name)
            assert source != name or same(end, ends[name]), name
