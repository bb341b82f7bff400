"""The costs file: what the layers of a model cost at every size that they can be cut to.

Written where the model can be built, read where it cannot, without torch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import with_config

from megasnn.checkpoint.format import config_differences
from megasnn.config.pretrain import PretrainConfig
from megasnn.config.values import to_dict
from megasnn.files import STRICT, DescriptionError, FreeForm, described, write_whole
from megasnn.grid import ContextCut
from megasnn.pipeline.cost_model import LayerCost
from megasnn.planner.machines import Machine

_ADVICE = "make it anew with `analyze`"

CutAxis = Literal["tensor", "samples", "rows"]
"""Along which ranks share layers."""


@with_config(STRICT)
@dataclass(frozen=True)
class HeldTensor:
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
    tensors: tuple[tuple[HeldTensor, ...], ...]


Seconds = tuple[float, float, float]
"""Of one micro-batch through one layer: forward, input gradient, weight gradient."""


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
        model: its name. about: what the figures depend on; see `identity`.
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
    def units(self) -> list[str]:
        """The unit of each layer."""
        return [each.unit for each in self.layers]


def identity(config: PretrainConfig) -> dict[str, FreeForm]:
    """All of a configuration that the layers' costs depend on, but for the size of micro-batches."""
    training = config.training
    about = {
        "model": {"name": config.model.name, **to_dict(config.model)},
        "neuron": to_dict(config.neuron),
        "training": {"precision": training.precision, "sparse_products": training.sparse_products},
    }
    return json.loads(json.dumps(about))


def differences(analysis: Analysis, config: PretrainConfig) -> list[str]:
    """Entries of `identity` that are others in the costs."""
    if analysis.model != config.model.name:
        return [f"they are of {analysis.model}, and the model is {config.model.name}"]
    return list(config_differences(analysis.about, identity(config)))


def write(analysis: Analysis, path: Path) -> None:
    """Writes the costs file."""
    write_whole(path, json.dumps(asdict(analysis)))


def read(path: Path) -> Analysis:
    """The costs in a file. Raises DescriptionError for one that cannot be read, or is none."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DescriptionError(f"cannot read {path}: {error}; {_ADVICE}") from None
    return described(Analysis, content, path, advice=_ADVICE)
