"""From HDF5 files of the published layout to a recurrent network that tells words apart, by the example's model."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from examples.spiking_audio import RecurrentAudio
from megasnn.config import parse, validate
from megasnn.models.model import run_config
from megasnn.models.registry import MODELS
from megasnn.pretraining import refuse_unbuildable
from tests.data.preprocess.test_sets import run
from tests.data.preprocess.test_spiking_audio import Spikes, write_h5
from tests.training.runs import log_of, without_trial

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "spiking_audio.py")
CLASSES = 4
STEPS = 20


def word(label: int, random: np.random.Generator) -> tuple[NDArray, NDArray]:
    """Spikes that run up or down through the lower or the upper units: two classes differ by their order alone."""
    times = np.sort(random.uniform(0, 1.2, 300))
    part = times / 1.2 if label % 2 else 1 - times / 1.2
    units = 350 * (label // 2) + 300 * part + random.normal(0, 8, 300)
    return times.astype(np.float16), np.clip(units, 0, 699).astype(np.uint16)


def words(samples: int, seed: int) -> tuple[Spikes, list[int]]:
    random = np.random.default_rng(seed)
    numbers = [row % CLASSES for row in range(samples)]
    return [word(label, random) for label in numbers], numbers


def made_shards(folder: Path) -> None:
    for name, samples in (("train", 200), ("test", 40)):
        write_h5(folder / "shd" / f"shd_{name}.h5", *words(samples, seed=samples), speakers=[0] * samples)
    flags = ("--time-steps", STEPS, "--channels", 35)
    assert run("shd", "--input", folder / "shd", "--output", folder / "shards", *flags) == 0


@pytest.mark.parametrize(("cell", "norm"), [("radlif", "--norm"), ("se_adlif", "--no-norm")])
def test_the_example_learns_from_files_of_shds_layout(tmp_path, monkeypatch, cell: str, norm: str) -> None:
    made_shards(tmp_path)
    flags = f"--in-channels 35 --time-steps {STEPS} --num-classes {CLASSES} --width 32 --depth 1 --cell {cell} {norm}"
    training = (
        "--micro-batch-size 20 --global-batch-size 20 --train-iters 60 --lr 1e-2 --weight-decay 0 --num-workers 0"
    )
    data = f"--data-path {tmp_path}/shards/train-00000.tar --valid-data-path {tmp_path}/shards/val-00000.tar"
    monkeypatch.setattr(sys, "argv", ["spiking_audio.py", *f"{flags} {training} {data} --save {tmp_path}/run".split()])
    # The script adds its class to the table, and other tests see the table as it was.
    monkeypatch.setitem(MODELS, RecurrentAudio.name, RecurrentAudio)
    monkeypatch.delitem(MODELS, RecurrentAudio.name)
    with without_trial(), pytest.raises(SystemExit) as ended:
        runpy.run_path(EXAMPLE, run_name="__main__")
    assert not ended.value.code
    losses = [line["loss"] for line in log_of(tmp_path / "run", "iteration")]
    (validation,) = log_of(tmp_path / "run", "validation")
    assert losses[-1] < 0.5 * losses[0]
    assert validation["top1"] > 0.9 and validation["samples"] == 40


@pytest.mark.parametrize("recipe", RecurrentAudio.recipes())
def test_recipes_are_whole(recipe: str) -> None:
    flags = ["--config", recipe, "--data-path", "train.tar"]
    config = parse(run_config(RecurrentAudio), flags, recipes=RecurrentAudio.recipes())
    validate(config, world_size=1)
    refuse_unbuildable(config)
