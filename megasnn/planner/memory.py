"""What a rank needs in memory: the forecast of a run, and the same of a layout that is only planned."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from megasnn.config import PretrainConfig


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
        graphs: what CUDA graphs keep beside all that (docs/gpu.md).
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
    graphs: float = 0.0
    update: float = 0.0

    @property
    def total(self) -> float:
        """The peak that is predicted."""
        return sum(asdict(self).values())

    @property
    def told(self) -> str:
        """The parts, for people."""
        names = {"program": "program and libraries", "optimizer": "optimizer state", "kept": "kept for backward",
                 "working": "working memory", "graphs": "CUDA graphs", "gathered": "gathered weights",
                 "update": "optimizer step"}  # fmt: skip
        values = {names.get(each.name, each.name): getattr(self, each.name) for each in fields(self)}
        return " + ".join(f"{name} {value:.0f}" for name, value in values.items() if value)

    def __str__(self) -> str:
        return f"{self.total:.0f} MB = {self.told}"


def sample_bytes(config: PretrainConfig, itemsize: int, micro_batches: int, share: int, on_host: bool) -> int:
    """Of the batch that is trained on, and on the host the one read ahead.

    Args:
        itemsize: bytes of a value. share: samples of a micro-batch that the rank has.
        on_host: whether the rank computes on its host.
    """
    of_sample = itemsize
    for length in config.model.input_shape:
        of_sample *= length
    batches = 2 if on_host and config.data.num_workers else 1
    samples = config.training.micro_batch_size if config.data.mixes else share  # those that are mixed are read whole
    return of_sample * micro_batches * samples * batches
