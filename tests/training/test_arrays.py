"""Runs of models with their own inputs or target, on shards with several files a sample."""

from __future__ import annotations

import io
import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from megasnn import MODELS, ArraySpec, Engine
from megasnn.config import ConfigError, parse
from megasnn.data.arrays import ArrayFile, ArrayFormat
from megasnn.data.formats import FormatMismatch
from megasnn.models.model import Model, run_config
from megasnn.pretraining import refuse_unbuildable
from tests.data.shard_files import image_file, write_shard
from tests.parity.test_tasks import Language, Segments
from tests.training.runs import train_model, without_trial

SAMPLES = 10
FLAGS = "--micro-batch-size 4 --global-batch-size 7 --train-iters 2 --lr 1e-2 --precision fp64 --no-shuffle".split()


@dataclass(frozen=True, kw_only=True)
class SegmentsOfShards(Segments):
    @property
    def target(self) -> ArraySpec:
        return ArraySpec((8, 8), "int", below=3, file="seg.png")


@dataclass(frozen=True, kw_only=True)
class LanguageOfShards(Language):
    @property
    def inputs(self) -> dict[str, ArraySpec]:
        return {"tokens": ArraySpec((12,), "int", below=128, file="npy")}


def npy(values: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, values)
    return buffer.getvalue()


def written(folder: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images, their classes of pixels, and tokens, in two shards."""
    draws = np.random.default_rng(0)
    images = draws.integers(0, 256, (SAMPLES, 8, 8, 3), np.uint8)
    classes, tokens = draws.integers(0, 3, (SAMPLES, 8, 8), np.uint8), draws.integers(0, 128, (SAMPLES, 12), np.uint8)
    samples = {
        f"s{n}": {"png": image_file(images[n]), "seg.png": image_file(classes[n]), "npy": npy(tokens[n])}
        for n in range(SAMPLES)
    }
    write_shard(folder / "a-0.tar", dict([*samples.items()][:6]))
    write_shard(folder / "a-1.tar", dict([*samples.items()][6:]))
    pixels = (torch.from_numpy(images).movedim(-1, 1).float() / 255 - 0.5) / 0.25
    return pixels, torch.from_numpy(classes), torch.from_numpy(tokens)


def train_all(cache: str, folder: str, *flags: str) -> None:
    os.environ["MEGASNN_CACHE"] = cache
    for model in (SegmentsOfShards, LanguageOfShards):
        MODELS[model.name] = model
        data = ["--data-path", f"{folder}/a-*.tar", "--valid-data-path", f"{folder}/a-1.tar"]
        with without_trial():
            train_model(model.name, [*FLAGS, *data, "--save", f"{folder}/{model.name}", "--log-interval", "1", *flags])


@pytest.mark.parametrize(("world", "flags"), [(1, ()), (2, ("--pipeline-model-parallel-size", "2"))])
def test_a_run_computes_what_an_engine_does_on_the_same_arrays(ranks, tmp_path, world: int, flags) -> None:
    pixels, classes, tokens = written(tmp_path)
    ranks(world, train_all, str(tmp_path / "cache"), str(tmp_path), *flags)
    order = [*range(SAMPLES)] * 2
    for model, inputs, targets in ((Segments(), pixels, classes), (Language(), tokens, None)):
        lines = (tmp_path / f"{model.name}_of_shards" / "log.jsonl").read_text().splitlines()
        log = [json.loads(line) for line in lines]
        with Engine(model, micro_batch_size=4, global_batch_size=7, lr=1e-2, train_iters=2, precision="fp64") as engine:
            for line in (each for each in log if each["kind"] == "iteration"):
                part = order[7 * engine.iteration : 7 * engine.iteration + 7]
                result = engine.train_step(inputs[part], None if targets is None else targets[part])
                assert line["loss"] == pytest.approx(result.loss, rel=1e-9)
                assert {name: line[name] for name in result.metrics} == pytest.approx(result.metrics, rel=1e-9)
            assert engine.iteration == 2
            record = engine.evaluate(inputs[6:], None if targets is None else targets[6:])
        (line,) = (each for each in log if each["kind"] == "validation")
        assert {"loss": line["loss"], **{name: line[name] for name in record.metrics}} == pytest.approx(
            {"loss": record.loss, **record.metrics}, rel=1e-9
        )


@dataclass(frozen=True, kw_only=True)
class Elsewhere(SegmentsOfShards):
    @property
    def target(self) -> ArraySpec:
        return ArraySpec((8, 8), "int", below=2, file="seg.png")


@dataclass(frozen=True, kw_only=True)
class Nowhere(SegmentsOfShards):
    @property
    def target(self) -> ArraySpec:
        return ArraySpec((8, 8), "int", file="depth.npy")


def test_pixels_of_no_class_go_with_a_bound(tmp_path) -> None:
    """The numbers of classes stay checked; from Python and from shards alike."""
    spec = ArraySpec((2, 2), "int", below=3, void=255)
    assert spec.problem("target", torch.tensor([[[0, 255], [2, 1]]]), 1, True) is None
    assert spec.problem("target", torch.full((1, 2, 2), 255), 1, True) is None
    assert "from 0 to 254, and must be below 3" in str(spec.problem("t", torch.tensor([[[0, 255], [254, 1]]]), 1, True))
    format = ArrayFormat((ArrayFile("t", "npy", (4,), "int", 3, 255),), ("t",))
    found = []
    for number, last in enumerate((255, 3)):
        write_shard(tmp_path / f"{number}.tar", {"s": {"npy": npy(np.array([0, 255, 2, last], np.uint8))}})
        found.append((tmp_path / f"{number}.tar").read_bytes())
    assert format.decode(found[0])["t"].tolist() == [0, 255, 2, 255]
    with pytest.raises(FormatMismatch, match=r"has 0 to 3 in .npy, and 't' is below 3 or 255 .*void"):
        format.decode(found[1])


@pytest.mark.parametrize(("model", "named"), [(Elsewhere, "below 2"), (Nowhere, "depth.npy")])
def test_a_sample_that_does_not_fit_is_named(tmp_path, monkeypatch, model: type[Model], named: str) -> None:
    written(tmp_path)
    monkeypatch.setitem(MODELS, model.name, model)  # other tests see the table as it is
    with pytest.raises(ValueError, match=rf"sample 's\d'.*{named}"), without_trial():
        train_model(model.name, [*FLAGS, "--data-path", f"{tmp_path}/a-0.tar", "--num-workers", "0"])


@pytest.mark.parametrize(
    ("model", "flags", "named"),
    [
        (Language, (), "'tokens'"),
        (SegmentsOfShards, (), "--data-path sample"),
        (SegmentsOfShards, ("--data-path", "a.tar", "--augment", "cifar"), "--augment"),
    ],
)
def test_runs_that_cannot_be_are_refused(model: type[Model], flags: tuple[str, ...], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        refuse_unbuildable(parse(run_config(model), [*FLAGS, *flags]))
