"""A network of ours beside the same one of SpikingJelly's and torch's, which one process trains with torch's optimizer:
loss, logits, spikes, gradients, buffers and weights of some steps, on any layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megasnn.config.optimizer import OptimizerConfig
from megasnn.models.model import Model
from megasnn.models.weight_names import translated_tensors
from tests.parity import spikingjelly_reference as reference
from tests.parity.ranks import (
    SGD,
    SIZES,
    TOLERANCE,
    Layout,
    RankStep,
    assemble,
    error,
    images,
    logits_in_order,
    model_config,
    name_of,
    take_steps,
)

ROUNDING = 1e-14
"""Times the norm of all gradients: what rounding leaves of a gradient that is 0."""
CHOSEN = [
    Layout(),
    Layout(tensor=2),
    Layout(1, 1, 4, "1f1b"),
    Layout(2, 2, 2, "zbv"),
]
ALL = [
    Layout(data, tensor, pipeline, schedule)
    for data, tensor, pipeline in product((1, 2), (1, 2), (1, 2, 4))
    for schedule in (("1f1b", "zbv") if pipeline > 1 else ("1f1b",))
    if data * tensor * pipeline <= 8
]
FEW_PIPELINES = [Layout(1, 1, 2, "1f1b"), Layout(1, 1, 2, "zbv"), Layout(1, 1, 4, "gpipe")]

Loss = Callable[[Any, Tensor], Tensor]


def sgd(net: nn.Module, options: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), options.lr, 0.9)


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        model: ours.
        reference: makes the other one, in float64 and step mode "m"; it is given `[T, N, C, ...]`.
        steps: how many of the optimizer are compared.
        scale: of the images.
        counts: whether spikes are compared; not where several ranks count those of the same neurons.
        batch: gives images and labels, where they are of another kind; sizes: of their micro-batches.
        loss: a sum over samples, as both have it.
        firing: share of the neurons' outputs that are spikes, or mean of counts, at most.
        options: of our optimizer, and whether gradients are clipped; optimizer: makes the other one.
    """

    model: Model
    reference: Callable[[], nn.Module]
    steps: int = 1
    scale: float = 1.0
    counts: bool = True
    batch: Callable[[], tuple[Tensor, Tensor]] | None = None
    sizes: tuple[int, ...] = SIZES
    loss: tuple[Loss | None, Loss] = (None, reference.mean_over_time)
    firing: float = 0.8
    options: OptimizerConfig = SGD
    optimizer: Callable[[nn.Module, OptimizerConfig], Any] = sgd

    def data(self) -> tuple[Tensor, Tensor]:
        return images(self.model, self.scale) if self.batch is None else self.batch()

    def network(self) -> nn.Module:
        """The other one, on what a data loader gives."""
        net, time, frames = self.reference(), self.model.time_steps, len(self.model.input_shape) == 4
        net.register_forward_pre_hook(
            lambda _, given: given[0].transpose(0, 1) if frames else given[0].expand(time, *given[0].shape)
        )
        # Some take the mean over time before their last layer, which is linear, and ours behind it.
        net.register_forward_hook(lambda _, given, y: y if y.ndim == 3 else y.unsqueeze(0))
        return net

    def ours(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Its tensors by our names."""
        dialects = self.model.dialects()
        return translated_tensors(dialects[0].to_ours(values), values) if dialects else dict(values)


SPIKFORMER = Case(model_config(), reference.build, batch=reference.data, sizes=(3, 3, 3, 2), firing=0.5)


@lru_cache(maxsize=4)  # of a large network these are gigabytes, so that the tests of one stand together
def truth(case: Case) -> list[reference.ReferenceStep]:
    """Each step of the other one. The comparison means something: neurons fire, some do not, and every weight has a
    gradient."""
    net, (x, labels), steps = case.network(), case.data(), list[reference.ReferenceStep]()
    optimizer, clip = case.optimizer(net, case.options), case.options.clip_grad
    while len(steps) < case.steps:
        steps.append(reference.step(net, x, labels, list(case.sizes), case.loss[1]))
        net.load_state_dict(steps[-1].buffers)
        if case.steps > 1:
            if clip:
                assert nn.utils.clip_grad_norm_(net.parameters(), clip) > 2 * clip, "nothing would be clipped"
            optimizer.step()
            steps[-1].weights = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    assert 0.02 < steps[0].firing < case.firing
    assert all(gradient.abs().max() > 0 for gradient in steps[0].gradients.values())
    return steps


def run(
    case: Case, ranks: Any, layout: Layout, dtype: torch.dtype = torch.float64, **options: Any
) -> list[list[RankStep]]:
    """Our steps on every rank, from the other one's initial values."""
    x, labels = case.data()
    with TemporaryDirectory() as folder:
        torch.save(case.ours(truth(case)[0].state_before), weights := Path(folder) / "weights.pt")
        options |= {"micro_batch_size": case.sizes[0], "weights": weights, "options": case.options}
        steps = partial(take_steps, case.model, layout, (x.to(dtype), labels), case.steps, loss=case.loss[0], **options)
        return ranks(layout.world_size, steps)


def assert_equal_to_truth(case: Case, ranks: Any, layout: Layout, **options: Any) -> list[list[RankStep]]:
    """Every step on a layout, to 1e-9 relative in float64, no spike flipped."""
    found = run(case, ranks, layout, **options)
    for number, theirs in enumerate(truth(case)):
        _assert_equal(case, [each[number] for each in found], theirs)
    return found


def _assert_equal(case: Case, steps: list[RankStep], expected: reference.ReferenceStep) -> None:
    assert all(step.loss == pytest.approx(expected.loss, rel=TOLERANCE) for step in steps)
    assert not case.counts or sum(step.spikes for step in steps) == expected.spikes, "spikes flipped"
    for mine, theirs in zip(logits_in_order(steps), expected.logits, strict=True):
        assert error(mine if len(mine) == len(theirs) else mine.mean(0, keepdim=True), theirs) < TOLERANCE
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in expected.gradients.values()))
    assert all(step.norm == pytest.approx(norm, rel=TOLERANCE) for step in steps)
    for what in ("gradients", "weights", "buffers"):
        values, found = getattr(expected, what), assemble(steps, what)
        assert what == "buffers" or len(found) == len(values)
        by_our_names = case.ours({**expected.state_before, **values})
        for name, value in found.items():
            theirs = by_our_names[name].double()
            if what == "gradients" and theirs.abs().max() < ROUNDING * norm:
                # A bias before a batch norm: its gradient is 0 but for rounding.
                assert value.double().abs().max() < ROUNDING * norm, name
            else:
                assert error(value, theirs) < TOLERANCE, (what, name)


def on_layouts(cases: Mapping[str, Case], chosen_of: Mapping[str, Iterable[Layout]]) -> Iterator[Any]:
    """(case, layout) for pytest: of each case a choice of layouts, and the rest under the marker.

    Args:
        chosen_of: by the name of the case; CHOSEN of all others.
    """
    for name, case in cases.items():
        chosen = list(chosen_of.get(name, CHOSEN))
        for layout in dict.fromkeys([*chosen, *CHOSEN, *ALL]):
            marks = [] if layout in chosen else [pytest.mark.matrix]
            yield pytest.param(case, layout, id=f"{name}-{name_of(layout)}", marks=marks)


def assert_schedules_agree(ranks: Any, case: Case, layouts: Sequence[Layout]) -> None:
    """On other sizes of the pipeline and schedules everything has the bits of one rank, in float32."""
    x, labels = case.data()
    options = {"micro_batch_size": case.sizes[0], "loss": case.loss[0]}
    one, *others = (
        ranks(each.world_size, partial(take_steps, case.model, each, (x.float(), labels), case.steps, **options))
        for each in (Layout(), *layouts)
    )
    for layout, found in zip(layouts, others, strict=True):
        for number, expected in enumerate(one[0]):
            steps = [each[number] for each in found]
            assert {(step.loss, step.norm) for step in steps} == {(expected.loss, expected.norm)}, layout
            assert all(map(torch.equal, logits_in_order(steps), expected.logits))
            for what in ("gradients", "weights", "buffers"):
                values = assemble(steps, what)
                for name, value in assemble([expected], what).items():
                    assert torch.equal(values[name], value), (what, name, layout)
