"""Memory of a rank: the forecast of a run, and weights, gradients and optimizer state of a layout that is planned.

Sums of states are those of a run but for what aligns tensors in their buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from math import prod

from megasnn.config import PretrainConfig
from megasnn.config.optimizer import OPTIMIZERS, OptimizerConfig
from megasnn.planner.costs import ResidentTensor

CPU_BUCKET_BYTES = 8 << 20  # on a CPU
GPU_BUCKET_BYTES = 32 << 20


@dataclass(frozen=True)
class MemoryForecast:
    """MB (10^6 bytes) on one rank.

    Attributes:
        program: the process without tensors: interpreter, libraries, compiled kernels; on a GPU 0.
        weights: parameters and buffers, and their average where one is kept; where replicas share weights, this rank's
            rows, and buffers that others' come in.
        gradients: their buckets, and the sums of the rows that the rank owns where rows have owners.
        gathered: where replicas share weights, the most that is gathered at once.
        optimizer: its state.
        kept: the most that forwards leave for backward.
        working: what the largest layer computes with, at the moment when that and `kept` are most.
        messages: between stages; or what sharded gradients and rows take between replicas, where that is more than all
        of a step's other moments. samples: the batch in use, and on a CPU the one read ahead.
        snapshot: the copy that --async-save writes from; on a GPU 0, it is in the host's memory.
        update: what the optimizer's step computes with, as far as that is more than what forward and backward needed
            and have given back.
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
        """The peak that is predicted."""
        return sum(asdict(self).values())

    @property
    def parts_text(self) -> str:
        """The parts, for people."""
        names = {"program": "program and libraries", "optimizer": "optimizer state", "kept": "kept for backward",
                 "working": "working memory", "gathered": "gathered weights",
                 "update": "optimizer step"}  # fmt: skip
        values = {names.get(each.name, each.name): getattr(self, each.name) for each in fields(self)}
        return " + ".join(f"{name} {value:.0f}" for name, value in values.items() if value)

    def __str__(self) -> str:
        return f"{self.total:.0f} MB = {self.parts_text}"


def sample_bytes(config: PretrainConfig, itemsize: int, micro_batches: int, samples: int, on_host: bool) -> int:
    """Bytes of the batch that is trained on, and on the host the one read ahead.

    Args:
        itemsize: bytes of a value. samples: of a micro-batch that the rank reads; those that are mixed are read whole.
        on_host: the rank computes on its host.
    """
    batches = 2 if on_host and config.data.num_workers else 1
    model = config.model  # whose own inputs alone need torch
    shapes = [each.shape for each in model.inputs.values()] if "inputs" in model.own_task() else [model.input_shape]
    return itemsize * sum(map(prod, shapes)) * micro_batches * samples * batches


@dataclass(frozen=True)
class StateBytes:
    """Bytes of a rank.

    Attributes:
        weights: parameters and buffers that it keeps, and their average. gradients, optimizer: theirs.
        exchanged: what gradients and rows take on their way, where these have owners.
        reduced: bytes of gradients that are summed over ranks that hold the same.
        updated: bytes of the parameters that this rank's optimizer steps. working: what its step takes meanwhile.
    """

    weights: int
    gradients: int
    optimizer: int
    exchanged: int
    reduced: int
    updated: int
    working: int


def states_of(
    tensors: Sequence[ResidentTensor], weight: int, owners: int, optimizer: OptimizerConfig, on_gpu: bool
) -> StateBytes:
    """States of the rank that owns most rows.

    Args:
        tensors: of its layers. weight: replicas that share weights. owners: ranks that share the rows of each of them.
    """
    trained = [each for each in tensors if each.is_parameter]
    whole, buffers = sum(map(_bytes, trained)), sum(_bytes(each) for each in tensors if not each.is_parameter)
    kept, owned = (sum(_shard_bytes(each, ranks) for each in trained) for ranks in (weight, weight * owners))
    recipe = OPTIMIZERS[optimizer.optimizer]
    return StateBytes(
        weights=kept + buffers + (owned + buffers if optimizer.ema_decay else 0),
        gradients=whole + kept * (weight > 1) + owned * (owners > 1),
        optimizer=sum(4 * len(trained) if kind == "step" else owned for kind in optimizer.state_kinds),
        exchanged=_exchanged(whole, weight if weight > 1 else owners, on_gpu),
        reduced=kept,
        updated=owned,
        working=int(recipe.working_copies * owned),
    )


def bucket_bytes(on_gpu: bool) -> int:
    """Bytes after which a bucket of gradients is closed."""
    return GPU_BUCKET_BYTES if on_gpu else CPU_BUCKET_BYTES


def _shard_bytes(tensor: ResidentTensor, ranks: int) -> int:
    """Bytes of the first rank, which has most rows, where so many share them."""
    rows = tensor.shape[0] if tensor.shape else 1
    return _bytes(tensor) // max(rows, 1) * -(-rows // ranks)


def _exchanged(trained: int, ranks: int, on_gpu: bool) -> int:
    """Most bytes of exchanges with those who keep or own rows: two buckets at a time, each with what is sent and comes,
    and as much again where it ends. Args: trained: bytes of all gradients."""
    return int(2 * min(2 * bucket_bytes(on_gpu), trained) * (2 - 2 / ranks))


def gathered_bytes(tensors: Iterable[ResidentTensor]) -> int:
    """Bytes of the gathered weights of a segment."""
    return sum(prod(each.shape) * each.travels for each in tensors if each.is_parameter)


def _bytes(tensor: ResidentTensor) -> int:
    return prod(tensor.shape) * tensor.itemsize
