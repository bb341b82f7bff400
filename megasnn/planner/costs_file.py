"""The costs file: a model's layers, their counted bytes and measured seconds.

Writing it needs a model that can be built; reading it needs no torch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field, with_config

from megasnn.checkpoint.format import config_differences
from megasnn.common.files import STRICT, DescriptionError, FreeForm, described, read_regular, write_whole
from megasnn.common.grid import ContextCut
from megasnn.config.run import PretrainConfig
from megasnn.pipeline.cost_model import LayerCost
from megasnn.planner.machines import Machine

ADVICE = "make it anew with `analyze`"
CutAxis = Literal["tensor", "samples", "rows", "tokens"]
"""Axis along which ranks share layers."""
Seconds = tuple[float, float, float]
"""One layer's forward, input gradient and weight gradient for one micro-batch."""


@with_config(STRICT)
@dataclass(frozen=True)
class ResidentTensor:
    """A layer's tensor on one rank.

    Attributes:
        shape: local shape.
        travels: bytes per element when gathered from shards.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    is_parameter: bool
    travels: int


@with_config(STRICT)
@dataclass(frozen=True)
class PlannedLayer:
    """A layer on a rank that shares none.

    Attributes:
        layer_group: see `Layer`. Files of development versions call it `unit`.
        operations: multiply-adds in one sample's forward.
        rows: output image height; 1 for other outputs.
    """

    name: str
    layer_group: Annotated[str, Field(validation_alias=AliasChoices("layer_group", "unit"))]
    parameters: int
    operations: int
    rows: int


@with_config(STRICT)
@dataclass(frozen=True)
class LayoutBytes:
    """The layers' bytes on one rank at one tensor and context parallel size.

    Attributes:
        cut: how context parallel ranks share a micro-batch.
        costs: for each size in `Analysis.sizes`, by layer; seconds are 0.
        tensors: by layer.
    """

    tensor: int
    context: int
    cut: ContextCut
    costs: tuple[tuple[LayerCost, ...], ...]
    tensors: tuple[tuple[ResidentTensor, ...], ...]


@with_config(STRICT)
@dataclass(frozen=True)
class Timed:
    """All layers' measured seconds on a rank that shares none.

    Attributes:
        samples: in the micro-batch.
        ranks: computing on the machine at the same time.
    """

    samples: int
    ranks: int
    seconds: tuple[Seconds, ...]


@with_config(STRICT)
@dataclass(frozen=True)
class Analysis:
    """A model's layers and their costs; costs on any layout follow.

    Attributes:
        about: settings behind the costs; see `cost_identity`.
        sizes: numbers of samples with counted bytes, ascending.
        alone: bytes on a rank that shares no layer.
        shared: bytes at each axis' smallest possible size.
        possible: by axis and size, the reason against this size; None for a possible size. No tokens: no axis "tokens".
        machine: None without a measurement.
        larger: bytes at a middle and at the largest possible size, for an axis with three counts: by tokens.
    """

    model: str
    about: dict[str, FreeForm]
    layers: tuple[PlannedLayer, ...]
    sizes: tuple[int, ...]
    alone: LayoutBytes
    shared: dict[CutAxis, LayoutBytes]
    possible: dict[CutAxis, dict[int, str | None]]
    timed: tuple[Timed, ...] = ()
    machine: Machine | None = None
    larger: dict[CutAxis, tuple[LayoutBytes, ...]] = field(default_factory=dict)

    @property
    def precision(self) -> str:
        """`--precision` behind the costs."""
        training: Any = self.about["training"]
        return str(training["precision"])

    @cached_property
    def layer_groups(self) -> list[str]:
        """By layer."""
        return [each.layer_group for each in self.layers]


def cost_identity(config: PretrainConfig) -> dict[str, FreeForm]:
    """Settings behind layer costs, besides the micro-batch size."""
    training = config.training
    about = {
        "model": {"name": config.model.name, **asdict(config.model)},
        "neuron": asdict(config.neuron),
        "training": {"precision": training.precision, "sparse_products": training.sparse_products},
    }
    # As it is read back from the file: lists in place of tuples.
    return json.loads(json.dumps(about))


def cost_differences(analysis: Analysis, config: PretrainConfig) -> list[str]:
    """Differences in `cost_identity`, as texts."""
    if analysis.model != config.model.name:
        return [f"they are of {analysis.model}, and the model is {config.model.name}"]
    return list(config_differences(analysis.about, cost_identity(config)))


def write(analysis: Analysis, path: Path) -> None:
    write_whole(path, json.dumps(asdict(analysis)))


def read(path: Path) -> Analysis:
    """Raises DescriptionError for an unreadable file, or one with other content."""
    try:
        content = read_regular(path)
    except OSError as error:
        raise DescriptionError(f"cannot read {path}: {error}; {ADVICE}") from None
    return described(Analysis, content, path, advice=ADVICE)
