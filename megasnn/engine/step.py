"""The training step: from micro-batches to new weights, and the first place that is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

from megasnn.common import checks
from megasnn.common.grid import micro_batch_counts
from megasnn.config import PretrainConfig
from megasnn.data import GlobalBatch
from megasnn.engine.model import DistributedModel
from megasnn.optim.average import WeightAverage
from megasnn.optim.build import build_optimizer, takes_found_inf
from megasnn.parallel.agreement import gather
from megasnn.pipeline.microbatch_state import MicroBatchInput
from megasnn.telemetry.records import StepResult
from megasnn.telemetry.timers import Timers

_OVERFLOW = "values too large for their type, in statistics of a norm or in squares of gradients; the step is skipped"
_CHANGED = (
    "lr or params in the optimizer's param_groups were changed, and each step sets the rate itself: give Engine(..., "
    "lr_schedule=...), a function of the step; a group's own share of the rate is its lr_scale"
)


class TrainStep:
    """Optimizer steps of a distributed model; `rate`: (step, from 0 on) -> its learning rate. The `average` is of what
    this rank owns, None without `ema_decay`."""

    def __init__(self, config: PretrainConfig, distributed: DistributedModel, rate: Callable[[int], float]) -> None:
        self._config, self._rate, self.distributed, state = config, rate, distributed, distributed.state
        self.optimizer = build_optimizer(distributed.owned, config.optimizer, state.holding_groups)
        decay = config.optimizer.ema_decay
        self.average = WeightAverage(distributed.owned, decay) if decay else None
        self.timers = Timers(state.device)
        self.iteration = self.consumed_samples = 0
        self._cut = config.training.micro_batch_size, state.dp.size, config.windows
        self._groups_set = self._groups()
        self._masks = takes_found_inf(self.optimizer, config.optimizer)

    def __call__(self, micro_batches: Sequence[MicroBatchInput], batch: GlobalBatch) -> StepResult:
        """Takes one step on this replica's micro-batches of a global batch. Collective.

        A step that is not finite changes nothing: weights, optimizer state, average and running statistics stay. Raises
        ValueError for a learning rate that is negative or not finite, and for findings of the checks on any rank.
        """
        distributed, rate = self.distributed, self._rate(self.iteration)
        if not 0 <= rate < math.inf:
            raise ValueError(f"the learning rate of step {self.iteration} is {rate}: lr_schedule must give 0 or more")
        # A GPU updates before the host has read the step, and leaves the weights as they are where it is void.
        updates_unread = self._masks and checks.runs_ahead(distributed.state.device)
        with self.timers("forward_backward"):
            # Zeroes gradients; forward, backward and reductions by schedule.
            sums = distributed.run(micro_batches, batch.size)
        with self.timers("optimizer"):
            if updates_unread:
                self._update(rate, sums.norm, sums.is_void)
            found = distributed.check(sums)  # reads loss and norm; raises what was found on the device
            if found.is_finite:
                distributed.merge_statistics(micro_batch_counts(batch.size, *self._cut)[0])
                if not updates_unread:
                    self._update(rate, found.norm)
                distributed.refresh_copies()
                if self.average is not None:
                    self.average.update()
        where = None if found.is_finite else first_not_finite(distributed, micro_batches) or _OVERFLOW
        self.iteration += 1
        self.consumed_samples = batch.consumed_samples
        return StepResult(found.mean_loss, found.sums, batch.size, found.norm, rate, not found.is_finite, where)

    def _update(self, rate: float, norm: float | Tensor, is_void: Tensor | None = None) -> None:
        """Clips the gradients by their norm and steps the optimizer, unless `is_void` on the device."""
        self.distributed.gradient_norm.clip(norm, self._config.optimizer.clip_grad, is_void)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["lr_scale"]
        self._groups_set = self._groups()
        if self._masks:
            self.optimizer.found_inf = None if is_void is None else is_void.float()  # type: ignore[attr-defined]
        self.optimizer.step()

    def problem(self) -> str | None:
        """Returns an error text where learning rates or parameters of the optimizer were changed from outside."""
        return None if self._groups() == self._groups_set else _CHANGED

    def _groups(self) -> list[tuple[object, ...]]:
        return [(group["lr"], *map(id, group["params"])) for group in self.optimizer.param_groups]

    # --- other values

    def loaded(self, position: tuple[int, int] | None = None, averaged: bool = False) -> None:
        """Follows other values in the model's tensors: copies take them over, and the average unless it was `averaged`,
        too. Training goes on from `position`, iteration and consumed samples, where it is given. Collective."""
        self.distributed.refresh_copies()
        if self.average is not None and not averaged:
            self.average.restart()
        if position is not None:
            self.iteration, self.consumed_samples = position

    def exchange_average(self) -> None:
        """Exchanges the values of the weights and of their average. Collective."""
        assert self.average is not None
        self.average.exchange()
        self.distributed.refresh_copies()


def first_non_finite(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """Returns the name of the first tensor that holds nan or an infinity, and how many; None when all are finite."""
    for name, tensor in named:
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            nan, infinite = int(torch.isnan(tensor).sum()), int(torch.isinf(tensor).sum())
            return f"{name}: {nan} nan and {infinite} infinite of {tensor.numel()} values"
    return None


def first_not_finite(distributed: DistributedModel, micro_batches: Sequence[MicroBatchInput]) -> str | None:
    """Returns the layer whose output was not finite first in the step before, otherwise the gradient; None where all
    are finite. The same on every rank.

    The forward is run again; nothing that training keeps is touched. Collective over the world.
    """
    # All modules are watched: a neuron hides nan, since nan reaches no threshold.
    paths = {
        module: (index, path)
        for index, chunk in reversed(distributed.chunks.items())  # a module that is called twice has its first place
        for name, layer in reversed([*chunk.named_layers()])
        for path, module in layer.named_modules(prefix=name)
    }
    outputs: list[tuple[int, int, str]] = []

    def check(module: nn.Module, inputs: Any, output: Any) -> None:
        if module not in paths:
            return
        index, path = paths[module]
        tensors = [(path, leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if (found := first_non_finite(tensors)) is not None:
            outputs.append((index, len(outputs), found))

    hook = register_module_forward_hook(check)
    try:
        distributed.run_again(micro_batches)
    finally:
        hook.remove()
    outputs.sort()  # the lowest chunk first, whatever micro-batch came first
    gradients: list[tuple[int, int, str]] = []
    for index, chunk in reversed(distributed.chunks.items()):
        entries = reversed(chunk.sharded_tensors())
        of_chunk = ((each.name, distributed.gradient_buckets.gradient(each.tensor)) for each in entries)
        found = first_non_finite((name, gradient) for name, gradient in of_chunk if gradient is not None)
        gradients += [(-index, 0, found)] if found else []
    for what, mine in (("forward, first in", outputs), ("backward, first in the gradient of", gradients)):
        if of_ranks := [each for held in gather(distributed.state.world.handle, mine[:1]) for each in held]:
            return f"not finite in {what} {min(of_ranks)[2]}; the step is skipped"
    return None
