"""Time and memory of laying out a checkpoint for other ranks, in a process of its own."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from megasnn.convert.reshard import Target, reshard, saved_model
from megasnn.convert.source import open_source
from megasnn.telemetry.memory import peak_memory_mb, reset_peak_memory
from tools.benchmark.ranks import RankProcesses

HOUR = 3600.0


@dataclass(frozen=True)
class ConversionTask:
    """Attributes: the checkpoint, where to write, and the sizes of the target; its layers are cut evenly by number."""

    load: Path
    save: Path
    tensor: int
    pipeline: int


class _Converter:
    def __init__(self, task: ConversionTask) -> None:
        self._task = task

    def convert(self) -> dict[str, float]:
        """Seconds, MB of peak memory above what the process had before, and MB of the largest tensor."""
        task, cpu = self._task, torch.device("cpu")
        source = open_source(task.load)
        layers = len(saved_model(source).description.layers)
        ends = [layers * stage // task.pipeline for stage in range(task.pipeline + 1)]
        layout = "|".join(str(end - start) for start, end in pairwise(ends))
        target = Target(task.tensor, task.pipeline, layout=layout)
        reset_peak_memory(cpu)
        before, began = peak_memory_mb(cpu), time.perf_counter()
        reshard(source, task.save, target)
        seconds = time.perf_counter() - began
        largest = max(value.nbytes for value in source.tensors.values())
        return {"seconds": seconds, "peak_mb": peak_memory_mb(cpu) - before, "largest_mb": largest / 1e6}


def measure_conversion(task: ConversionTask) -> dict[str, float]:
    """Raises RankError when the conversion fails."""
    with closing(RankProcesses("reshard", _Converter, [task])) as process:
        process.ready(HOUR)
        return process.call("convert", timeout=HOUR)[0]
