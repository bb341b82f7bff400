"""Amplitudes of spikes from the first batch, before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch

from megasnn.engine.model import DistributedModel
from megasnn.layers.bispike import ParallelBiSpike
from megasnn.parallel.agreement import sum_over_ranks
from megasnn.parallel.collectives import all_reduce_sum
from megasnn.pipeline.microbatch_state import MicroBatchInput


class Calibration:
    """Sets the amplitudes of spikes from the first batch, the same on every rank of every layout.

    One forward of the step's first micro-batch, before the first step. Every neuron takes its amplitudes from its own
    input, which earlier neurons' amplitudes have shaped.

    Attributes:
        is_done: no neuron waits for its amplitudes, as far as this is known without asking other ranks.
    """

    def __init__(self, distributed: DistributedModel) -> None:
        self._distributed = distributed
        self._neurons: list[ParallelBiSpike] = []
        for _, neuron in distributed.neurons():
            if isinstance(neuron, ParallelBiSpike) and neuron.amplitude is not None:
                self._neurons.append(neuron)
        self.is_done = not distributed.description.calibrates

    def after_loading(self) -> None:
        self.is_done = not self._distributed.description.calibrates

    def is_due(self) -> bool:
        """Whether a neuron on any rank waits. Collective, unless `is_done`."""
        if not self.is_done:
            waiting = 0
            for neuron in self._neurons:
                assert neuron.amplitude is not None
                waiting += int(not neuron.amplitude.all())
            self.is_done = sum_over_ranks(self._distributed.state.world.handle, [waiting]) == [0]
        return not self.is_done

    def run(self, micro_batches: Sequence[MicroBatchInput]) -> None:
        """Collective. Args: micro_batches: this replica's in the step."""
        distributed = self._distributed
        schedule = distributed.plan.schedules.evaluation(1)
        # The step itself finds again what is wrong with its values.
        with ExitStack() as stack:
            stack.enter_context(distributed.checks.collecting())
            for neuron in self._neurons:
                stack.enter_context(neuron.calibrating())
            distributed.executor.run(schedule, micro_batches[:1], lambda output, targets: None)
        self._adopt_first_replica()
        self.is_done = True

    def _adopt_first_replica(self) -> None:
        """Replicas have computed different micro-batches; the first one's is the first of the global batch."""
        replicas = self._distributed.state.dp
        if replicas.size == 1 or not self._neurons:
            return
        amplitudes = [neuron.amplitude for neuron in self._neurons if neuron.amplitude is not None]
        found = torch.stack(amplitudes)
        if replicas.rank > 0:
            found.zero_()
        for amplitude, values in zip(amplitudes, all_reduce_sum(found, replicas), strict=True):
            amplitude.copy_(values)
