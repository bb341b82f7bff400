"""What is kept where forwards are computed again, and what cannot be."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from megasnn.config import parse
from megasnn.engine import Engine
from megasnn.engine.model import DistributedModel
from megasnn.kernels.spike_codec import Content, bits_of
from megasnn.layers import BuildContext, ConvNormNeuron, MeanLinear
from megasnn.models.build import describe
from megasnn.models.description import Carried
from megasnn.models.layer import Layer, layer
from megasnn.models.model import Model, run_config
from megasnn.models.spikformer.model import Spikformer
from megasnn.pipeline.microbatch_state import MicroBatchInput, StepState
from megasnn.pipeline.packed_input import PackedInput
from megasnn.pipeline.peak_memory import unit_memory
from megasnn.pipeline.profile_layers import count_memory
from megasnn.schedule import Action, Kind
from megasnn.schedule.memory import activations_held
from tests.parity.ranks import Layout, built, forward_backward, inputs_of

CPU = torch.device("cpu")
SAMPLES = 2


@contextmanager
def _built(model: Model, recompute: str) -> Iterator[tuple[DistributedModel, list[MicroBatchInput]]]:
    """A model, and two micro-batches."""
    with built(describe(model), Layout(recompute=recompute), torch.float32) as engine:
        x = 2 * torch.randn(2 * SAMPLES, *model.input_shape, generator=torch.Generator().manual_seed(3))
        yield engine, inputs_of(engine, x, torch.arange(2 * SAMPLES) % model.num_classes, SAMPLES)


class _Live:
    """Bytes that graphs and kept inputs hold, each memory once, and not that of weights and of the batch."""

    def __init__(self, engine: DistributedModel, batches: Iterable[MicroBatchInput]) -> None:
        self.after: list[tuple[Action, int]] = []
        self._holders: weakref.WeakSet[_Holder] = weakref.WeakSet()
        self._inputs: weakref.WeakSet[PackedInput] = weakref.WeakSet()
        known = [each.tensor for each in engine.tensors] + [each.inputs for each in batches if each.inputs is not None]
        self._known = {each.untyped_storage().data_ptr() for each in known}
        engine.executor._do = partial(self._followed, engine.executor._do)  # type: ignore[method-assign]

    def _followed(self, do: Callable[[StepState, Action], None], step: StepState, action: Action) -> None:
        do(step, action)
        self.after.append((action, self._bytes()))

    def pack(self, tensor: Tensor) -> _Holder:
        self._holders.add(holder := _Holder(tensor))
        return holder

    def keep(self, made: type[PackedInput], *args: Any) -> PackedInput:
        self._inputs.add(kept := made(*args))
        return kept

    def _bytes(self) -> int:
        found = [each.tensor for each in self._holders]
        for kept in self._inputs:
            found += [each if isinstance(each, Tensor) else each[1] for each in kept._packed] + list(kept.collected)
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in found}
        return sum(size for place, size in storages.items() if place not in self._known)


class _Holder:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _held_after_actions(model: Model, recompute: str) -> tuple[list[tuple[Action, int]], list[float]]:
    """After each action of a step what is held, and what was predicted."""
    with _built(model, recompute) as (engine, batches):
        forward_backward(engine, batches, 2 * SAMPLES)  # weights have gradients from now on
        live = _Live(engine, batches)
        made = mock.patch("megasnn.pipeline.executor.PackedInput", lambda *args: live.keep(PackedInput, *args))
        with made, torch.autograd.graph.saved_tensors_hooks(live.pack, lambda holder: holder.tensor):
            forward_backward(engine, batches, 2 * SAMPLES)
    costs = count_memory(engine.description, SAMPLES, BuildContext(), CPU)
    units, schedule = unit_memory(costs, engine.plan.unit_bounds), engine.plan.schedules.training(2)
    assert [action for action, _ in live.after] == list(schedule.actions[0])
    return live.after, activations_held(schedule, 0, [each.held for each in units], [each.entering for each in units])


def _small_spikformer() -> Spikformer:
    return Spikformer(embed_dim=32, depth=1, num_heads=4, image_size=16, in_channels=1, time_steps=4, num_classes=4)


def test_what_is_held_falls_as_predicted(ranks) -> None:
    """After each action within 5 %, and at the fullest moment less than a third."""
    peaks = {}
    for mode in ("never", "always"):
        ((measured, predicted),) = ranks(1, _held_after_actions, _small_spikformer(), mode)
        peaks[mode] = max(held for _, held in measured)
        for (action, held), expected in zip(measured, predicted, strict=True):
            if action.kind is not Kind.REDUCE_GRAD:
                assert held == pytest.approx(expected, rel=0.05), action
    assert peaks["always"] < peaks["never"] / 3


def test_an_input_is_kept_in_its_format() -> None:
    spikes = (torch.rand(2, 3, 5, 5, 8) < 0.3).float().movedim(-1, 2)
    counts = torch.randint(0, 9, (2, 3, 8, 5, 5)).double().transpose(3, 4).requires_grad_()
    whole = torch.arange(6)
    formats = [Content.SPIKES, Content.COUNTS, Content.DENSE]
    carried = [Carried(0, None, content, f"tensor {index}") for index, content in enumerate(formats)]
    kept = PackedInput([spikes, counts, whole], carried)
    packed = bits_of(spikes)
    assert packed is not None and packed.nbytes == spikes.numel() // 8, "layers need not pack it again"
    for given, restored in zip((spikes, counts, whole), kept.restored(), strict=True):
        assert torch.equal(given, restored) and given.dtype == restored.dtype
        assert given.stride() == restored.stride() and given.requires_grad == restored.requires_grad
    assert kept.restored() == []
    with pytest.raises(ValueError, match="tensor 0: pack_bits takes 0 and 1"):
        PackedInput([spikes / 2], carried[:1])


class _Forgets(nn.Module):
    """Computes something else from its second call on."""

    def __init__(self) -> None:
        super().__init__()
        self.unit, self.calls = ConvNormNeuron(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        if x.is_meta:
            return self.unit(x)
        self.calls += 1
        return self.unit(x) if self.calls == 1 else x


@dataclass(frozen=True, kw_only=True)
class _Between(Model):
    image_size: int = 4
    time_steps: int = 2
    num_classes: int = 4

    def layers(self) -> Iterable[Layer]:
        yield layer("stem", ConvNormNeuron(3, 8))
        yield layer("between", _Forgets())
        yield layer("head", MeanLinear(8, 4))


def _refusal() -> str:
    with _built(_Between(), "always") as (engine, batches), pytest.raises(Exception, match="1R0") as caught:
        forward_backward(engine, batches, 2 * SAMPLES)
    return str(caught.value)


def test_a_forward_that_cannot_be_computed_again_is_an_error_with_the_place(ranks) -> None:
    (text,) = ranks(1, _refusal)
    assert "computed again did something else than the first time" in text and "--recompute never" in text


def test_a_run_that_only_evaluates_computes_nothing_again_and_needs_no_plan_for_it() -> None:
    """Whatever the configuration of the run says that it evaluates the weights of."""
    sizes = ["--image-size", "8", "--embed-dim", "16", "--depth", "1", "--num-heads", "2", "--train-iters", "1"]
    for flags in (["--memory-budget", "0.000001"], ["--recompute", "always"]):
        config = parse(run_config(Spikformer), [*sizes, "--evaluate-only", "--load", "x", "--device", "cpu", *flags])
        with Engine(config) as engine:
            assert engine.plan.schedules.units_per_chunk is None and engine.plan.costs is None
