"""Costs of a rank's layers for one micro-batch at any size, and the costs file that keeps them.

The file is written where the model can be built, and read where it cannot, without torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import with_config

from megasnn.checkpoint.format import config_differences
from megasnn.common.files import STRICT, DescriptionError, FreeForm, described, read_regular, write_whole
from megasnn.common.grid import ContextCut
from megasnn.config.run import PretrainConfig
from megasnn.config.values import to_dict
from megasnn.pipeline.cost_model import LayerCost, LinkCost, for_samples
from megasnn.planner.machines import Machine

BYTE_FIELDS = "held", "message", "gradient", "output", "deferred", "found", "cast"
_ADVICE = "make it anew with `analyze`"
CutAxis = Literal["tensor", "samples", "rows"]
"""Along which ranks share layers."""
Seconds = tuple[float, float, float]
"""Of one micro-batch through one layer: forward, input gradient, weight gradient."""


@dataclass(frozen=True)
class LayerShare:
    """Share of a rank in each layer and in each micro-batch.

    Attributes:
        tensor, context: ranks that share the channels, and a micro-batch; cut: by what.
        samples: of a micro-batch that the rank computes.
        ranks: that compute at the same time on its node.
    """

    tensor: int
    context: int
    cut: ContextCut
    samples: int
    ranks: int


def counted_costs(analysis: Analysis, share: LayerShare) -> list[LayerCost]:
    """The bytes of each layer, and what ranks that share it exchange; seconds are 0.

    Where two axes share a layer, it keeps of each axis' part what the other one leaves. Raises ValueError for a size
    that cannot be.
    """
    alone = _at(analysis, share, analysis.alone)
    axes: list[tuple[CutAxis, int]] = [("tensor", share.tensor), (share.cut, share.context)]
    shared = [_shared(analysis, share, alone, axis, size) for axis, size in axes if size > 1]
    if len(shared) < 2:
        return shared[0] if shared else alone
    # Exchanges between ranks that share channels were counted for the rank's own samples, and of all rows.
    parts = share.context if share.cut == "rows" else 1
    found = []
    for whole, tensor, context in zip(alone, *shared, strict=True):
        both = _each(lambda one, some, other: -(-some * other // one) if one else some + other, whole, tensor, context)
        both["exchanged"] = tensor.exchanged // parts + context.exchanged // share.tensor
        found.append(replace(whole, collectives=tensor.collectives + context.collectives, **both))
    return found


def _shared(
    analysis: Analysis, share: LayerShare, alone: Sequence[LayerCost], axis: CutAxis, size: int
) -> list[LayerCost]:
    """Costs where ranks share layers along one axis alone.

    Sizes that were not counted follow from one rank and from the size that was: a share of channels takes whole +
    cut / n bytes; a share of rows cut / n, and the rows of its neighbours. Beside its samples a rank has what norms
    keep and exchange, which does not depend on the number of samples.
    """
    counted = _counted(analysis, axis, size)
    at = counted.tensor * counted.context
    received = (1 - 1 / size) / (1 - 1 / at)  # of what all ranks have, a rank receives the others' part

    def of_channels(one: int, some: int) -> int:
        cut = (one - some) / (1 - 1 / at)
        return max(0, round(one - cut + cut / size))

    def of_rows(one: int, some: int) -> int:
        return round(max(some - one / at, 0) + one / size)

    found = []
    for one, some in zip(alone, _at(analysis, share, counted), strict=True):
        if axis == "samples":
            exchanged = (size - 1) * some.exchanged
            found.append(
                replace(one, held=some.held, found=some.found, exchanged=exchanged, collectives=some.collectives)
            )
        elif axis == "rows":  # which do not cut weights
            found.append(replace(some, **_each(of_rows, one, some) | {"cast": one.cast}))
        else:
            found.append(replace(some, exchanged=round(some.exchanged * received), **_each(of_channels, one, some)))
    return found


def resident_tensors(analysis: Analysis, tensor: int) -> tuple[tuple[ResidentTensor, ...], ...]:
    """The tensors of each layer, as one of so many tensor-parallel ranks holds them."""
    alone = analysis.alone.tensors
    if tensor == 1:
        return alone
    some = _counted(analysis, "tensor", tensor).tensors
    return tuple(
        tuple(_part(whole, part, tensor) for whole, part in zip(wholes, parts, strict=True))
        for wholes, parts in zip(alone, some, strict=True)
    )


def _part(whole: ResidentTensor, part: ResidentTensor, tensor: int) -> ResidentTensor:
    """Cut in the dimension in which the counted part is smaller."""
    shape = [one if one == some else one // tensor for one, some in zip(whole.shape, part.shape, strict=True)]
    return replace(part, shape=tuple(shape))


def _counted(analysis: Analysis, axis: CutAxis, size: int) -> Counted:
    """Layers of an axis at the size that was counted. Raises ValueError where another size cannot be."""
    refused = analysis.possible[axis].get(size, "was not asked for by analyze")
    if refused is not None:
        raise ValueError(f"{axis if axis == 'tensor' else f'context by {axis}'} {size}: {refused}")
    return analysis.shared[axis]


def _each(of: Callable[..., int], *costs: LayerCost) -> dict[str, Any]:
    """Fields of bytes, each of which `of` computes from those of the costs."""
    values: dict[str, Any] = {name: of(*(getattr(cost, name) for cost in costs)) for name in BYTE_FIELDS}
    return values | {"working": tuple(map(of, *(cost.working for cost in costs)))}


def _at(analysis: Analysis, share: LayerShare, counted: Counted) -> list[LayerCost]:
    return [for_samples(of_sizes, share.samples, analysis.sizes) for of_sizes in zip(*counted.costs, strict=True)]


def layer_costs(analysis: Analysis, machine: Machine, share: LayerShare, link: LinkCost) -> tuple[LayerCost, ...]:
    """With seconds. Raises ValueError for a size that cannot be.

    Args:
        link: the slower one between the ranks that share layers.
    """
    costs = counted_costs(analysis, share)
    seconds = _computed(analysis, machine, costs, share)
    if analysis.timed:
        timed = min(analysis.timed, key=lambda each: abs(each.ranks - share.ranks))
        of_timed = LayerShare(1, 1, "samples", timed.samples, timed.ranks)
        then = _computed(analysis, machine, counted_costs(analysis, of_timed), of_timed)
        seconds = [_scaled(*each) for each in zip(timed.seconds, seconds, then, strict=True)]
    found = []
    for cost, (forward, inputs, weights) in zip(costs, seconds, strict=True):
        # Exchanges between ranks that share a layer hold up its computing; most of their bytes are gradients.
        waits = cost.collectives * link.latency + cost.exchanged * link.per_byte if cost.collectives else 0.0
        found.append(replace(cost, forward=forward, input_gradient=inputs + waits, weight_gradient=weights))
    return tuple(found)


def _computed(analysis: Analysis, machine: Machine, costs: Sequence[LayerCost], share: LayerShare) -> list[Seconds]:
    """By the machine's rates; the first layer needs no gradient of its input."""
    found = []
    rate = machine.operations.get(analysis.precision, machine.operations["fp32"])
    for number, (layer, cost) in enumerate(zip(analysis.layers, costs, strict=True)):
        rows = share.context if share.cut == "rows" and layer.rows > 1 else 1
        product = layer.operations * share.samples / share.tensor / rows / rate
        moved = (3 * cost.held + cost.output) / machine.moved
        parts = product + moved, (product if number else 0.0) + moved, product + cost.held / machine.moved
        forward, inputs, weights = (machine.start + max(machine.least, each) for each in parts)
        found.append((forward, inputs, weights))
    return found


def _scaled(measured: Seconds, computed: Seconds, before: Seconds) -> Seconds:
    """Seconds that were measured, times the ratio of those computed for this share and for the measured one."""
    forward, inputs, weights = (
        each * (now / then if then else 1.0) for each, now, then in zip(measured, computed, before, strict=True)
    )
    return forward, inputs, weights


@with_config(STRICT)
@dataclass(frozen=True)
class ResidentTensor:
    """A tensor of a layer, as one rank holds it.

    Attributes:
        shape: of this rank's part. itemsize: bytes of an element. travels: the same where it is gathered to be used.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    is_parameter: bool
    travels: int


@with_config(STRICT)
@dataclass(frozen=True)
class LayerFacts:
    """
    Attributes:
        name, unit: as in `Layer`. parameters: number of their elements, of the whole layer.
        operations: multiply-adds in a sample's forward.
        rows: of the images that it gives; 1 where these are none.
    """

    name: str
    unit: str
    parameters: int
    operations: int
    rows: int


@with_config(STRICT)
@dataclass(frozen=True)
class Counted:
    """The layers as one of so many ranks has them.

    Attributes:
        tensor, context: ranks that share the channels, and a micro-batch; cut: by what.
        costs: bytes of each layer, for each number of samples in `Analysis.sizes`; seconds are 0.
        tensors: of each layer.
    """

    tensor: int
    context: int
    cut: ContextCut
    costs: tuple[tuple[LayerCost, ...], ...]
    tensors: tuple[tuple[ResidentTensor, ...], ...]


@with_config(STRICT)
@dataclass(frozen=True)
class Timed:
    """Measured seconds of all layers on a rank that shares none.

    Attributes:
        samples: that this rank computes. ranks: how many computed at the same time on the machine.
    """

    samples: int
    ranks: int
    seconds: tuple[Seconds, ...]


@with_config(STRICT)
@dataclass(frozen=True)
class Analysis:
    """
    Attributes:
        model: its name. about: what the figures depend on; see `cost_identity`.
        sizes: numbers of samples that bytes were counted for, in ascending order.
        alone: one rank. shared: the smallest size of each axis that can be; larger ones follow from both.
        possible: sizes of an axis that were asked for, and why each cannot be; None where it can.
        machine: where it was measured; None: nowhere.
    """

    model: str
    about: dict[str, FreeForm]
    layers: tuple[LayerFacts, ...]
    sizes: tuple[int, ...]
    alone: Counted
    shared: dict[CutAxis, Counted]
    possible: dict[CutAxis, dict[int, str | None]]
    timed: tuple[Timed, ...] = ()
    machine: Machine | None = None

    @property
    def precision(self) -> str:
        """`--precision` that it was counted for."""
        training: Any = self.about["training"]
        return str(training["precision"])

    @cached_property
    def layer_groups(self) -> list[str]:
        """The layer group of each layer."""
        return [each.unit for each in self.layers]


def cost_identity(config: PretrainConfig) -> dict[str, FreeForm]:
    """All of a configuration that the layers' costs depend on, but for the size of micro-batches."""
    training = config.training
    about = {
        "model": {"name": config.model.name, **to_dict(config.model)},
        "neuron": to_dict(config.neuron),
        "training": {"precision": training.precision, "sparse_products": training.sparse_products},
    }
    return json.loads(json.dumps(about))


def cost_differences(analysis: Analysis, config: PretrainConfig) -> list[str]:
    """Entries of `cost_identity` that are others in the costs."""
    if analysis.model != config.model.name:
        return [f"they are of {analysis.model}, and the model is {config.model.name}"]
    return list(config_differences(analysis.about, cost_identity(config)))


def write(analysis: Analysis, path: Path) -> None:
    """Writes the costs file."""
    write_whole(path, json.dumps(asdict(analysis)))


def read(path: Path) -> Analysis:
    """The costs in a file. Raises DescriptionError for one that cannot be read, or is none."""
    try:
        content = read_regular(path)
    except OSError as error:
        raise DescriptionError(f"cannot read {path}: {error}; {_ADVICE}") from None
    return described(Analysis, content, path, advice=_ADVICE)
