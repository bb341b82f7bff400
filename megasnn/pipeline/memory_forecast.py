"""A rank's memory forecast, for runs and for the planner. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from math import prod

from megasnn.config import PretrainConfig
from megasnn.config.optimizer import OPTIMIZERS, OptimizerConfig
from megasnn.pipeline.peak_memory import MB, Moment
from megasnn.schedule import Schedule
from megasnn.schedule.passes import SharedWeights


@dataclass(frozen=True)
class StateBytes:
    """A rank's bytes that do not depend on the schedule.

    Attributes:
        weights: parameters and buffers, and their moving average.
        gradients: gradient buckets, and reduced gradients for the rank's shards.
        exchanged: peak while replicas exchange gradients and shards.
        working: the optimizer step's temporary tensors.
    """

    weights: int
    gradients: int
    optimizer: int
    exchanged: int
    working: int

    @property
    def resident(self) -> int:
        """Bytes throughout the training."""
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True)
class MemoryForecast:
    """A rank's peak memory by parts, in MB (10^6 bytes).

    Attributes:
        program: interpreter, libraries and compiled kernels; on a GPU 0.
        weights, gradients, optimizer: as in `StateBytes`, with receive buffers for sharded weights.
        kept: tensors saved for backward, when `kept` and `working` together peak.
        working: temporary tensors in the layer computed at this peak.
        messages: transfers between stages; at a step's end the gradient exchange, where that is the peak.
        samples: the current batch, and on a CPU the next one.
        gathered: peak of weights gathered from their shards.
        snapshot: copy for --async-save; on a GPU 0: it is in host memory.
        update: the optimizer step's temporary tensors beyond memory freed by forward and backward.
    """

    program: float
    weights: float
    gradients: float
    optimizer: float
    kept: float
    working: float
    messages: float
    samples: float
    gathered: float = 0.0
    snapshot: float = 0.0
    update: float = 0.0

    @property
    def total(self) -> float:
        return sum(asdict(self).values())

    @property
    def parts_text(self) -> str:
        """The parts as a sum, without zeros."""
        names = {
            "program": "program and libraries",
            "optimizer": "optimizer state",
            "kept": "kept for backward",
            "working": "working memory",
            "gathered": "gathered weights",
            "update": "optimizer step",
        }
        parts = []
        for each in fields(self):
            value = getattr(self, each.name)
            if value:
                parts.append(f"{names.get(each.name, each.name)} {value:.0f}")
        return " + ".join(parts)

    def __str__(self) -> str:
        return f"{self.total:.0f} MB = {self.parts_text}"


def forecast(
    states: StateBytes,
    peak: Moment,
    schedule: Schedule,
    rank: int,
    sharded: SharedWeights | None,
    *,
    program: float,
    samples: int,
    snapshot: int = 0,
) -> MemoryForecast:
    """Sums up a pipeline rank's peak memory.

    Args:
        peak: moment at which the rank needs most.
        sharded: weights sharded over replicas; None where every replica holds them.
        program: bytes without tensors.
        snapshot: bytes copied for --async-save.
    """
    gathered = 0
    buffers = 0
    if sharded is not None:
        gathered, buffers = sharded.gathered_and_buffers(schedule, rank)
    # The optimizer's step begins when activations and gathered weights have been freed.
    freed = peak.total + gathered
    return MemoryForecast(
        program=program / MB,
        weights=(states.weights + buffers) / MB,
        gradients=states.gradients / MB,
        optimizer=states.optimizer / MB,
        kept=peak.stashed / MB,
        working=peak.working / MB,
        messages=peak.messages / MB,
        samples=samples / MB,
        gathered=gathered / MB,
        snapshot=snapshot / MB,
        update=max(0, states.working - freed) / MB,
    )


def optimizer_bytes(parameters: Iterable[int], config: OptimizerConfig) -> tuple[int, int]:
    """Bytes in the optimizer's state after a step, and in a step's temporary tensors.

    Args:
        parameters: bytes for each trained parameter or shard.
    """
    recipe = OPTIMIZERS[config.optimizer]
    state = 0
    trained = 0
    for size in parameters:
        trained += size
        for kind in config.state_kinds:
            state += 4 if kind == "step" else size
    return state, int(recipe.working_copies * trained)


def sample_bytes(config: PretrainConfig, itemsize: int, micro_batches: int, samples: int, on_host: bool) -> int:
    """Current batch, and the next one where workers read ahead into the rank's memory.

    Args:
        samples: samples read for a micro-batch. Mixing reads all.
        on_host: the rank computes on its CPU.
    """
    batches = 2 if on_host and config.data.num_workers else 1
    model = config.model
    shapes = [model.input_shape]
    if "inputs" in model.own_task():
        # Only a model's own inputs need torch.
        shapes = [each.shape for each in model.inputs.values()]
    values = sum(prod(shape) for shape in shapes)
    return itemsize * values * micro_batches * samples * batches
