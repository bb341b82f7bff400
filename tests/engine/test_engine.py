"""The Engine from Python: what the command line computes, bit for bit, on any layout; checkpoints, rates, refusals."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import megasnn
from megasnn import Engine
from megasnn.checkpoint.load import load_global_tensors
from megasnn.config import ConfigError, DataConfig
from megasnn.data import BatchLoader, BatchShare, open_datasets
from megasnn.data.preprocess.sample import shards_of_sample
from megasnn.models.spikformer.model import Spikformer
from megasnn.parallel_state import (
    destroy_model_parallel,
    get_parallel_state,
    initialize_model_parallel,
    model_parallel_is_initialized,
)
from tests.models.networks import between
from tests.training.runs import train, without_trial

MODEL = Spikformer(
    image_size=8, in_channels=1, num_classes=10, patch_size=4, embed_dim=32, depth=1, num_heads=4, time_steps=2,
    mlp_ratio=2,
)  # fmt: skip
SIZES = {"micro_batch_size": 4, "global_batch_size": 10, "train_iters": 3, "lr": 1e-2}
PP2 = {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "3|5", "pipeline_schedule": "1f1b"}


def images(samples: int = 10) -> Tensor:
    return torch.rand(samples, *MODEL.input_shape, generator=torch.Generator().manual_seed(0))


def test_batches_made_under_inference_mode_train_as_others_do() -> None:
    x, soft = images(), torch.eye(10)
    with torch.inference_mode():
        made = x.clone(), soft.clone()
    losses = []
    for batch in ((x, soft), made):
        with Engine(MODEL, **SIZES) as engine:
            losses.append([engine.train_step(*batch).loss for _ in range(2)])
            engine.evaluate(batch[0], torch.arange(10))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("loss", ["cross-entropy", "tet", "mse"])
def test_an_evaluation_has_no_label_smoothing(loss) -> None:
    """As the logs of published recipes have it; the loss that is trained has it."""
    found = []
    for smoothing in (0.0, 0.2):
        with Engine(MODEL, **SIZES, loss=loss, label_smoothing=smoothing) as engine:
            weights = engine.state_dict()
            engine.load_state_dict(weights | {"head.bias": torch.arange(10.0)})
            evaluated = engine.evaluate(images(), torch.arange(10)).loss
            found.append((evaluated, engine.train_step(images(), torch.arange(10)).loss))
    (plain, trained), (again, smoothed) = found
    assert plain == again and trained != pytest.approx(smoothed, rel=1e-6)


# --- the command line


def batches(cache: str) -> Iterator[tuple[Tensor, Tensor]]:
    """The global batches that a run with the seed of the flags trains on."""
    os.environ["MEGASNN_CACHE"] = cache
    config = DataConfig(num_workers=0)
    data = open_datasets(config, MODEL.input_shape, MODEL.num_classes, shards_of_sample)
    size = SIZES["global_batch_size"]
    loader = BatchLoader(data.train, BatchShare(size, size), config, seed=1234)
    for batch in islice(loader.batches(), SIZES["train_iters"]):
        (whole,) = batch.micro_batches
        yield whole.inputs.contiguous(), whole.targets


def stand_in(tensor: Tensor, is_needed: bool) -> Tensor:
    return tensor if is_needed else torch.empty(len(tensor), device="meta")


def from_python(cache: str, flags: dict[str, Any], folder: str) -> tuple[list[float], dict[str, Tensor]]:
    """Three steps; their losses, and the weights after them."""
    with Engine(MODEL, **SIZES, **flags) as engine:
        losses = [
            engine.train_step(stand_in(x, engine.takes_inputs), stand_in(y, engine.takes_targets)).loss
            for x, y in batches(cache)
        ]
        weights = engine.state_dict()
        engine.load(folder)  # what the command line has saved
        assert engine.iteration == 3 and engine.consumed_samples == 30
        earlier_names = engine.takes_images, engine.takes_labels
        assert earlier_names == (engine.takes_inputs, engine.takes_targets)
        assert all(torch.equal(value, weights[name]) for name, value in engine.state_dict().items())
    assert not model_parallel_is_initialized()
    return losses, weights


def by_command_line(cache: str, folder: str, flags: dict[str, Any]) -> None:
    given = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with without_trial():
        train(cache, "--train-iters", "3", "--eval-iters", "0", "--log-interval", "1", "--save", folder, *given)


@pytest.mark.parametrize(("size", "flags"), [(1, {}), (4, {"tensor_model_parallel_size": 2, **PP2})])
def test_it_computes_what_the_command_line_does(ranks, tmp_path_factory, tmp_path, size, flags) -> None:
    cache = str(tmp_path_factory.getbasetemp() / "cache")
    ranks(size, by_command_line, cache, str(tmp_path), flags)
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in log if line["kind"] == "iteration"]
    saved = load_global_tensors(tmp_path)
    for of_rank, weights in ranks(size, from_python, cache, flags, str(tmp_path)):
        assert of_rank == losses and len(losses) == 3 and weights.keys() == saved.keys()
        assert all(torch.equal(weights[name], value) for name, value in saved.items())


# --- checkpoints


def test_a_saved_engine_goes_on_where_it_stood(tmp_path: Path) -> None:
    x, y = images(), torch.arange(10)
    with Engine(MODEL, **SIZES, ema_decay=0.9) as engine:
        engine.train_step(x, y)
        path = engine.save(tmp_path)
        result, averages = engine.train_step(x, y), [entry.tensor.clone() for entry in engine.trainer.average.tensors]
    assert path == tmp_path / "iter_0000001"
    with Engine(MODEL, **SIZES, ema_decay=0.9) as engine:
        engine.load(tmp_path)
        assert engine.train_step(x, y) == result
        assert all(torch.equal(a, e.tensor) for a, e in zip(averages, engine.trainer.average.tensors, strict=True))
        weights = engine.state_dict()
        engine.load_state_dict({name: torch.zeros_like(value) for name, value in weights.items()})
        assert not any(value.any() for value in engine.state_dict().values())
        for wrong in (
            {name: value for name, value in weights.items() if name != "head.weight"},
            {name: value.long() for name, value in weights.items()},
            weights | {"head.weight": "w"},
        ):
            with pytest.raises(megasnn.CheckpointError):
                engine.load_state_dict(wrong)
        assert not any(value.any() for value in engine.state_dict().values())
        for call in (engine.save, engine.load):
            with pytest.raises(TypeError):
                call(None)
        with pytest.raises(megasnn.CheckpointError, match="absent"):
            engine.load(tmp_path / "absent")


def test_changed_flags_are_reported_weights_alone_are_taken_and_a_run_cannot_go_on(tmp_path_factory, tmp_path) -> None:
    with Engine(MODEL, **SIZES) as engine:
        engine.train_step(images(), torch.arange(10))
        engine.save(tmp_path)
        weights = engine.state_dict()
    with Engine(MODEL, **{**SIZES, "micro_batch_size": 5}) as engine:
        with pytest.warns(UserWarning, match="--micro-batch-size from 4 to 5"):
            engine.load(tmp_path)
    with Engine(MODEL, **SIZES, optimizer="sgd", ema_decay=0.5) as engine:
        with pytest.raises(megasnn.CheckpointError, match="AdamW"):
            engine.load(tmp_path)
        engine.load(tmp_path, weights_only=True)
        assert engine.iteration == 0
        assert all(torch.equal(value, weights[name]) for name, value in engine.state_dict().items())
    cache = str(tmp_path_factory.getbasetemp() / "cache")
    with without_trial(), pytest.raises(megasnn.CheckpointError, match="--finetune"):
        train(cache, "--train-iters", "3", "--eval-iters", "0", "--load", str(tmp_path))


def through_pooling(folder: str, flags: dict[str, Any]) -> tuple[list[float], float, dict[str, Tensor]]:
    """Losses of three steps, the third by what was saved after the second; an evaluation, and the weights."""
    model = between(lambda: [megasnn.layer("pool", torch.nn.MaxPool2d(2))], image_size=8)
    x, y = torch.rand(10, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(10) % 4
    with Engine(model, **SIZES, clip_grad=0.1, ema_decay=0.5, **flags) as engine:
        losses = [engine.train_step(x, y).loss for _ in range(2)]
        engine.save(folder)
        losses.append(engine.train_step(x, y).loss)
        engine.load(folder)
        losses.append(engine.train_step(x, y).loss)
        return losses, engine.evaluate(x, y).loss, engine.state_dict()


def test_a_stage_without_parameters(ranks, tmp_path: Path) -> None:
    flags: dict[str, Any] = {"optimizer": "lamb", "precision": "fp64"}
    losses, evaluated, weights = through_pooling(str(tmp_path / "one"), flags)
    assert losses[2] == losses[3] != losses[1]
    stages = {"pipeline_model_parallel_size": 3, "pipeline_model_parallel_layout": "1|1|1"}
    for found in ranks(3, through_pooling, str(tmp_path / "three"), {**flags, **stages}):
        assert found[:2] == (losses, evaluated)
        assert all(torch.equal(found[2][name], value) for name, value in weights.items())


# --- learning rates


def trained(lr_schedule: Callable[[int], float] | None = None, **flags: Any) -> tuple[list[float], dict[str, Tensor]]:
    sizes = {name: value for name, value in SIZES.items() if name != "lr" or lr_schedule is None}
    with Engine(MODEL, lr_schedule=lr_schedule, **sizes, **flags) as engine:
        rates = [engine.train_step(images(), torch.arange(10)).learning_rate for _ in range(3)]
        return rates, engine.state_dict()


def test_a_schedule_of_ones_own_is_the_rate_of_each_step() -> None:
    rates, weights = trained(lr_decay_style="linear")
    own, same = trained(lambda step: 1e-2 * (1 - step / 3))
    assert own == pytest.approx(rates) and all(torch.allclose(same[name], value) for name, value in weights.items())
    halved, others = trained(lambda step: 5e-3)
    assert halved == [5e-3] * 3 and not torch.equal(others["head.weight"], weights["head.weight"])
    with Engine(MODEL, lr_schedule=lambda step: -1.0, micro_batch_size=4, global_batch_size=10) as engine:
        with pytest.raises(ValueError, match="-1.0"):  # endless: no flag of the length
            engine.train_step(images(), torch.arange(10))
    for flags in ({"lr": 1e-2}, {"lr_warmup_iters": 3}, {"lr_cooldown_epochs": 1}):
        with pytest.raises(ValueError, match=next(iter(flags))):
            Engine(MODEL, lr_schedule=lambda step: 1e-3, micro_batch_size=4, **flags)


def by_hand(engine: Engine) -> None:
    engine.optimizer.param_groups[0]["lr"] = 1.0


def by_torch(engine: Engine) -> None:
    schedule = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, 0.1)
    schedule.step()


def another_group(engine: Engine) -> None:
    engine.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})


@pytest.mark.parametrize("change", [by_hand, by_torch, another_group])
def test_rates_that_are_set_from_outside_are_refused_and_not_ignored(change: Callable[[Engine], None]) -> None:
    with Engine(MODEL, **SIZES) as engine:
        engine.train_step(images(), torch.arange(10))
        before = engine.state_dict()
        change(engine)
        with pytest.raises(ValueError, match="lr_schedule"):
            engine.train_step(images(), torch.arange(10))
        assert engine.iteration == 1
        assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())


def test_shares_of_the_rate_and_decay_that_are_set_in_groups_are_honoured() -> None:
    with Engine(MODEL, **SIZES, optimizer="sgd", clip_grad=0) as engine:
        for group in engine.optimizer.param_groups:
            group["lr_scale"] = 0.0
        before = engine.state_dict()
        engine.train_step(images(), torch.arange(10))
        assert torch.equal(engine.state_dict()["head.weight"], before["head.weight"])


def test_a_length_in_samples_is_kept_over_a_change_of_the_batch(tmp_path: Path) -> None:
    """25 samples: a batch of 10, then of 5."""
    sizes = {"micro_batch_size": 5, "train_samples": 25, "lr": 1e-2, "lr_decay_style": "linear"}
    with Engine(MODEL, **sizes, global_batch_size=10) as engine:
        assert engine.length.iterations == 2
        assert engine.train_step(images(10), torch.arange(10)).learning_rate == pytest.approx(1e-2)
        engine.save(tmp_path)
    with Engine(MODEL, **sizes, global_batch_size=5) as engine:
        engine.load(tmp_path)
        rates = [engine.train_step(images(5), torch.arange(5)).learning_rate for _ in range(3)]
        assert rates == pytest.approx([1e-2 * (1 - done / 5) for done in (2, 3, 4)])
        with pytest.raises(ValueError, match="all 4 steps are done"):
            engine.train_step(images(5), torch.arange(5))


# --- one Engine, one grid


def test_one_engine_at_a_time_and_whoever_made_the_grid_destroys_it() -> None:
    with Engine(MODEL, **SIZES):
        with pytest.raises(ValueError, match="another Engine is open"):
            Engine(MODEL, **SIZES)
    engine = Engine(MODEL, **SIZES)
    destroy_model_parallel()
    with Engine(MODEL, **SIZES, deterministic=True) as second:
        engine.close()
        assert get_parallel_state() is second.state and torch.are_deterministic_algorithms_enabled()
    initialize_model_parallel()
    try:
        Engine(MODEL, **SIZES).close()
        assert model_parallel_is_initialized() and not torch.are_deterministic_algorithms_enabled()
    finally:
        destroy_model_parallel()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"learning_rate": 1.0}, "learning_rate"),
        ({"save": "there"}, "save"),
        ({"mixup_alpha": 0.2, "mixup_off_epoch": 3, "log_interval": 1}, "^2 problems"),
        ({"train_iters": None}, "train_iters"),
        ({"tensor_model_parallel_size": 2}, "world size 1"),
        ({"neuron_backend": "triton"}, "triton"),
    ],
)
def test_flags_that_cannot_work_are_refused_before_anything_is_built(flags: dict[str, Any], named: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=named):
        Engine(MODEL, **{**SIZES, **flags})
    assert not model_parallel_is_initialized()


@pytest.mark.parametrize("name", megasnn.MODELS)
def test_dimensions_from_python_are_checked(name: str) -> None:
    for wrong in (0, -1, "2", 2.5):
        with pytest.raises(ConfigError, match="--time-steps"):
            Engine(megasnn.MODELS[name](time_steps=wrong), **SIZES)
    for no_model in (megasnn.MODELS[name], name, None):
        with pytest.raises(ValueError, match="megasnn.Model"):
            Engine(no_model, **SIZES)  # type: ignore[arg-type]
