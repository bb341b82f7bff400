"""What any layout has saved, in the middle of a run, any other continues, to the same end.

Each layout trains three steps without a stop and saves after two. Then each layout goes on from what each layout saved:
to the very bits of its own uninterrupted run where it is the same layout, and otherwise to what float64 promises. The
samples, their order, dropout and the learning rate's schedule must go on with it, or the ends could not agree. The
suite takes five layouts, each from itself and from the one after it; `pytest -m matrix` takes all from all.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from megasnn.data.formats import FRAMES, encode_frames
from megasnn.preprocess.writing import write_shard
from tests.training.runs import Outcome, train_vgg, whole, without_trial

STEPS, SAVED_AT = 3, 2
TENSOR, PIPELINE = "--tensor-model-parallel-size {}".format, "--pipeline-model-parallel-size {}".format
LAYOUTS = {
    "one": (1, ""),
    "dp3": (3, ""),
    "tp4": (4, TENSOR(4)),
    "dp2pp2": (4, f"{PIPELINE(2)} --pipeline-schedule gpipe"),
    "tp2pp2v": (4, f"{TENSOR(2)} {PIPELINE(2)} --pipeline-schedule zbv"),
    "dp2": (2, ""),
    "tp2": (2, TENSOR(2)),
    "pp4": (4, f"{PIPELINE(4)} --pipeline-schedule 1f1b"),
    "pp2v2": (2, f"{PIPELINE(2)} --pipeline-schedule interleaved"),
}
USUAL = 5  # of these, in the suite
COMMON = f"--precision fp64 --train-iters {STEPS} --global-batch-size 8 --micro-batch-size 2 --eval-iters 0".split()


def straight(data: str, flags: str, save: str) -> Outcome:
    """On a rank: a run that saves on its way."""
    return run(data, [*flags.split(), "--save", save, "--save-interval", str(SAVED_AT)])


def continued(data: str, flags: str, saves: list[str]) -> list[Outcome]:
    """On a rank: a run from each of the checkpoints."""
    return [run(data, [*flags.split(), "--load", saved, "--ckpt-step", str(SAVED_AT)]) for saved in saves]


def run(data: str, flags: list[str]) -> Outcome:
    with without_trial():
        return train_vgg(*COMMON, "--data-path", data, *flags)


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


def relative_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(((a[n].double() - b[n].double()).norm() / b[n].double().norm().clamp_min(1e-30)).item() for n in a)


@pytest.mark.parametrize(
    ("layouts", "sources_of_each"), [(USUAL, 2), pytest.param(len(LAYOUTS), len(LAYOUTS), marks=pytest.mark.matrix)]
)
def test_every_layout_goes_on_from_others(ranks, frames, tmp_path: Path, layouts: int, sources_of_each: int) -> None:
    names, ends = list(LAYOUTS)[:layouts], dict[str, dict[str, Tensor]]()
    for name in names:
        size, flags = LAYOUTS[name]
        ends[name] = whole(ranks(size, straight, frames, flags, str(tmp_path / name)))
    for number, name in enumerate(names):
        size, flags = LAYOUTS[name]
        sources = [*names[number:], *names[:number]][:sources_of_each]
        of_ranks = ranks(size, continued, frames, flags, [str(tmp_path / source) for source in sources])
        for source, outcomes in zip(sources, zip(*of_ranks, strict=True), strict=True):
            assert {(one.iteration, one.consumed_samples) for one in outcomes} == {(STEPS, 8 * STEPS)}
            end = whole(list(outcomes))
            assert relative_difference(end, ends["one"]) < 1e-9, (source, name)
            if source == name:
                assert all(torch.equal(value, ends[name][tensor]) for tensor, value in end.items()), name
