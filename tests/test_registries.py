"""One of each kind is added through its registry: its flag takes it, it is used, and afterwards it is unknown again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from typing import Any
from unittest import mock

import pytest
import torch

from megasnn.augment import AUGMENTATIONS, IMAGES, Augmentation, crop_and_flip
from megasnn.common.registry import Registry
from megasnn.config import ConfigError, from_dict, parse, validate
from megasnn.config.optimizer import DECAY_STYLES, OPTIMIZERS, OptimizerRecipe
from megasnn.config.training import LOSSES, PRECISIONS, Loss, Precision
from megasnn.kernels import BACKENDS, NEURONS, SURROGATES, NeuronSpec
from megasnn.kernels.neuron import neuron_multi_step
from megasnn.kernels.neuron_spec import FUSED_SURROGATES, Neuron
from megasnn.kernels.torch_backend import TorchNeuron
from megasnn.models.losses import mse_sum
from megasnn.models.model import run_config
from megasnn.models.spikformer.model import Spikformer
from megasnn.schedule import SCHEDULES, Schedule
from megasnn.schedule.named import NamedSchedule
from megasnn.schedule.partition import PLACEMENTS
from tests.training.runs import Outcome, train

REGISTRIES = (
    *(SCHEDULES, NEURONS, SURROGATES, BACKENDS, FUSED_SURROGATES),
    *(LOSSES, AUGMENTATIONS, OPTIMIZERS, DECAY_STYLES, PRECISIONS, PLACEMENTS),
)
NAME = "made-up"
FLAGS = ("--pipeline-schedule", "--neuron", "--loss", "--augment", "--optimizer")
NAMED = (*FLAGS, "--precision")
calls: Counter[str] = Counter()


def ahead(*arguments: Any) -> Schedule:
    calls["--pipeline-schedule"] += 1
    return SCHEDULES["1f1b"].order(*arguments)


def half(x: Any, v: Any, spec: NeuronSpec, q: Any) -> Any:
    """LIF with tau 2 whose input does not decay."""
    calls["--neuron"] += 1
    return 0.5 * v + x


def loss(*arguments: Any, **options: Any) -> Any:
    calls["--loss"] += 1
    return mse_sum(*arguments, **options)


def change(*arguments: Any) -> Any:
    calls["--augment"] += 1
    return crop_and_flip(*arguments)


def adam(groups: Any, lr: float) -> torch.optim.Optimizer:
    calls["--optimizer"] += 1
    return torch.optim.AdamW(groups, lr=lr, fused=True)


@contextmanager
def one_of_each() -> Iterator[None]:
    entries: list[tuple[Registry[Any], Any]] = [
        (SCHEDULES, NamedSchedule("as 1f1b", ahead)),
        (NEURONS, Neuron("halves", half, leaks=False)),
        (LOSSES, Loss("as mse", loss)),
        (AUGMENTATIONS, Augmentation("as cifar", change, (IMAGES,))),
        (OPTIMIZERS, OptimizerRecipe("as adamw", adam, ("step", "exp_avg", "exp_avg_sq"))),
        (PRECISIONS, Precision("as fp32", "float32", "float32")),
    ]
    with ExitStack() as stack:
        for table, entry in entries:
            stack.enter_context(mock.patch.dict(table, {NAME: entry}))
        yield


def config(*flags: str) -> run_config(Spikformer):
    return parse(run_config(Spikformer), ["--train-iters", "1", *flags])


def train_with_one_of_each(*arguments: str) -> tuple[Outcome, Counter[str]]:
    calls.clear()
    with one_of_each():
        return train(*arguments), calls


def test_a_run_uses_one_of_each(ranks, tmp_path) -> None:
    """They stand for what others compute, which tells that they were taken for what they are."""
    common = (str(tmp_path), *"--train-iters 2 --eval-iters 0 --neuron-backend torch".split())
    common += ("--pipeline-model-parallel-size", "2")
    told = ranks(2, train_with_one_of_each, *common, *(word for flag in NAMED for word in (flag, NAME)))
    others = "--pipeline-schedule 1f1b --neuron lif --no-decay-input --loss mse --augment cifar --optimizer adamw"
    ours, theirs = told[0][0].tensors, ranks(2, train, *common, *others.split())[0].tensors
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert set(sum((counted for _, counted in told), Counter())) == set(FLAGS)


def test_flags_and_files_take_it_while_it_is_there() -> None:
    with one_of_each():
        found = config(*(word for flag in NAMED for word in (flag, NAME)))
        assert validate(found, 1) is None
        assert from_dict(run_config(Spikformer), asdict(found)) == found
    for flag in NAMED:
        with pytest.raises(ConfigError, match=f"{flag} '{NAME}'"):
            config(flag, NAME)
    with pytest.raises(ConfigError, match=f"--loss '{NAME}'"):
        from_dict(run_config(Spikformer), asdict(found))


def test_a_neuron_that_the_kernels_lack_is_not_taken_for_another() -> None:
    x = torch.rand(3, 2, 4)
    with one_of_each():
        spec = NeuronSpec(kind=NAME)
        spikes, _ = neuron_multi_step(x, spec)
        assert torch.equal(spikes, neuron_multi_step(x, NeuronSpec(decay_input=False), backend="torch")[0])
        with pytest.raises(ValueError, match=f"--neuron {NAME}; choose --neuron-backend auto or torch"):
            neuron_multi_step(x, spec, backend="fused")
        with pytest.raises(ConfigError, match=f"--neuron {NAME}"):
            validate(config("--neuron", NAME, "--neuron-backend", "fused"), 1)


class InputForSpikes(TorchNeuron):
    def multi_step(self, x: Any, *_: Any) -> Any:
        return x, x[0]


def test_auto_takes_the_last_backend_that_can_be_used() -> None:
    other = replace(
        BACKENDS["torch"],
        neurons=("if",),
        why_unusable=lambda x: "it is too large" if x.numel() > 10 else None,
        neuron_kernels=InputForSpikes,
    )
    small, large = torch.rand(3, 2), torch.rand(3, 20)
    with mock.patch.dict(BACKENDS, {NAME: other}):
        assert neuron_multi_step(small, NeuronSpec(kind="if"))[0] is small
        assert neuron_multi_step(small, NeuronSpec(kind="lif"))[0] is not small
        assert neuron_multi_step(large, NeuronSpec(kind="if"))[0] is not large
        with pytest.raises(ValueError, match="it is too large; choose --neuron-backend"):
            neuron_multi_step(large, NeuronSpec(kind="if"), backend=NAME)


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    for registry in REGISTRIES:
        with pytest.raises(ValueError) as refused:
            registry[NAME]
        told = str(refused.value)
        assert registry.flag in told and all(name in told for name in (NAME, *registry.choices))
