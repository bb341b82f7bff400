"""One slot's CUDA graphs as autograd functions; graphs.py says how they are used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from megasnn.common.bundle import entries_of, map_entries
from megasnn.common.checks import DeviceChecks, check_value
from megasnn.kernels.spike_codec import share_bits
from megasnn.layers.dropout import drawing_for
from megasnn.layers.norm import ParallelBatchNorm
from megasnn.layers.weight_grad import AddGradient, WeightGradients
from megasnn.pipeline.graph_capture import Capture, captured

Run = Callable[[list[Tensor], range | None], Any]
"""Computes a chunk from its inputs, a list that it empties, and the positions of the samples."""


@dataclass(frozen=True)
class GraphedChunk:
    """A chunk, with its way into graphs.

    Attributes:
        layers: all modules in the graphs.
        anchor: leaf in autograd's graph, for every replay's outputs.
        weight_pool: memory of weight gradients.
    """

    layers: nn.Module
    run: Run
    weight_gradients: WeightGradients
    capture: Capture
    anchor: Tensor
    weight_pool: Any


@dataclass(frozen=True)
class _CapturedForward:
    """A captured forward's results. Every replay fills their memory.

    Attributes:
        output: the chunk's, with the autograd graph for capturing backward.
        norms: by record, with the number of its values.
        statistics: all means and variances in one tensor; None without norms.
        statistic_sizes: elements of each mean and variance.
        flags: findings of all checks in one tensor; None without checks.
        complaints: a text for each flag.
    """

    output: Any
    norms: Sequence[tuple[ParallelBatchNorm, int | Tensor]]
    statistics: Tensor | None
    statistic_sizes: list[int]
    flags: Tensor | None
    complaints: Sequence[str]


@dataclass(frozen=True)
class _CapturedGradients:
    """A captured backward's results. Every replay fills their memory.

    Attributes:
        of_inputs: None for inputs without a gradient.
        by_autograd: parameters whose gradients autograd computes.
        weight_tasks: the other parameters, and functions to add their gradients.
    """

    of_inputs: Sequence[Tensor | None]
    by_autograd: Sequence[nn.Parameter]
    weight_tasks: Sequence[tuple[Tensor, AddGradient]]


@dataclass(frozen=True)
class _Backward:
    """The backward's graphs.

    Attributes:
        output_grads: a replay's arguments; None for outputs without a gradient.
        replay: computes input gradients.
        replay_weights: runs `weight_tasks`; None without any.
    """

    output_grads: Sequence[Tensor | None]
    gradients: _CapturedGradients
    replay: Callable[[], None]
    replay_weights: Callable[[], None] | None


class SlotGraphs:
    """One slot's graphs. The forward is captured at once, the backward with the first gradients."""

    def __init__(self, chunk: GraphedChunk, inputs: Sequence[Tensor], samples: range | None, pool: Any) -> None:
        self._chunk = chunk
        self._pool = pool
        self._positions: Tensor | None = None
        if samples is not None:
            self._positions = torch.arange(len(samples), device=inputs[0].device)
        self._leaves: dict[nn.Parameter, Tensor] = {}
        for parameter in chunk.layers.parameters():
            if parameter.requires_grad:
                leaf: Tensor = parameter
                if not chunk.weight_gradients.takes(parameter):
                    # Autograd adds a gradient on the stream where the parameter was first used. A forward without
                    # graphs still under way would draw its stream into the capture, which the driver refuses.
                    leaf = parameter.detach().requires_grad_()
                self._leaves[parameter] = leaf
        # Zeros: a capture may run the work once, and other memory may hold tokens outside the vocabulary.
        self._inputs = [torch.zeros_like(x).requires_grad_(x.requires_grad) for x in inputs]
        self._forward, self._replay = captured(chunk.capture, partial(self._compute, samples), pool, "forward")
        output = self._forward.output
        self.outputs: Sequence[Tensor] = output if isinstance(output, list) else [*entries_of(output).values()]
        self._backward: _Backward | None = None

    def _compute(self, samples: range | None) -> _CapturedForward:
        layers = self._chunk.layers
        checks = DeviceChecks(self._inputs[0].device)
        earlier_records: dict[ParallelBatchNorm, int] = {}
        for module in layers.modules():
            if isinstance(module, ParallelBatchNorm):
                earlier_records[module] = len(module.pending)
        leaves = {}
        for name, parameter in layers.named_parameters():
            if parameter in self._leaves:
                leaves[f"layers.{name}"] = self._leaves[parameter]
        with checks.collecting(), drawing_for(self._positions):
            output = functional_call(_Applied(layers, self._chunk.run), leaves, ([*self._inputs], samples))
        # The records of the capture hold no values; each replay records a copy.
        norms: list[tuple[ParallelBatchNorm, int | Tensor]] = []
        statistics: list[Tensor] = []
        for norm, start in earlier_records.items():
            for mean, variance, count in norm.pending[start:]:
                norms.append((norm, count))
                statistics += [mean, variance]
            del norm.pending[start:]
        flags: list[Tensor] = []
        complaints: list[str] = []
        for flag, text in checks.noted():
            flags.append(flag)
            complaints.append(text)
        # One tensor for all flags, and one for all statistics: a replay copies each with one kernel.
        return _CapturedForward(
            output,
            norms,
            statistics=_joined(statistics),
            statistic_sizes=[value.numel() for value in statistics],
            flags=_joined(flags),
            complaints=complaints,
        )

    def apply(self, inputs: Sequence[Tensor], samples: range | None) -> Any:
        forward = self._forward
        _fill(self._inputs, inputs)
        if self._positions is not None and samples is not None:
            torch.arange(samples.start, samples.stop, out=self._positions)
        self._replay()
        if forward.flags is not None:
            for flag, text in zip(forward.flags.clone().split(1), forward.complaints, strict=True):
                check_value(flag, text)
        if forward.statistics is not None:
            values = iter(forward.statistics.clone().split(forward.statistic_sizes))
            for norm, count in forward.norms:
                norm.record(next(values), next(values), count)
        copies = iter(_Replayed.apply(self, self._chunk.anchor, *inputs))

        def copied(y: Tensor) -> Tensor:
            return share_bits(y, next(copies), own_memory=True)

        if isinstance(forward.output, list):
            return [copied(y) for y in forward.output]
        return map_entries(copied, forward.output)

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Returns input gradients. Weight gradients run at once, or are deferred."""
        weight_gradients = self._chunk.weight_gradients
        if self._backward is None:
            self._backward = self._capture_backward(grads)
        backward = self._backward
        if [x is None for x in grads] != [x is None for x in backward.output_grads]:
            raise RuntimeError("gradients reach a chunk otherwise than when its CUDA graphs were made")
        _fill(backward.output_grads, grads)
        backward.replay()
        for parameter in backward.gradients.by_autograd:
            weight_gradients.report(parameter)
        if backward.replay_weights is not None:
            weight_gradients.run_or_defer(partial(self._replay_weights, backward.replay_weights, backward.gradients))
        return [None if grad is None else grad.clone() for grad in backward.gradients.of_inputs]

    def _capture_backward(self, grads: Sequence[Tensor | None]) -> _Backward:
        chunk = self._chunk
        output_grads = [None if grad is None else torch.empty_like(grad) for grad in grads]
        differentiate = partial(self._differentiate, output_grads)
        gradients, replay = captured(chunk.capture, differentiate, self._pool, "the gradients of inputs")
        replay_weights = None
        if gradients.weight_tasks:
            run = partial(_run_tasks, gradients.weight_tasks)
            _, replay_weights = captured(chunk.capture, run, chunk.weight_pool, "the gradients of weights")
        return _Backward(output_grads, gradients, replay, replay_weights)

    def _differentiate(self, output_grads: Sequence[Tensor | None]) -> _CapturedGradients:
        outputs = []
        grads = []
        for y, grad in zip(self.outputs, output_grads, strict=True):
            if grad is not None:
                outputs.append(y)
                grads.append(grad)
        inputs = [x for x in self._inputs if x.requires_grad]
        wanted = [*inputs, *self._leaves.values(), self._chunk.weight_gradients.anchor]
        with self._chunk.weight_gradients.collecting() as weight_tasks:
            # Tensors saved for backward stay: no other graph may use their memory.
            found = torch.autograd.grad(outputs, wanted, grads, retain_graph=True, allow_unused=True)
        input_grads = iter(found[: len(inputs)])
        parameter_grads = found[len(inputs) : -1]  # without the anchor's
        of_inputs = [next(input_grads) if x.requires_grad else None for x in self._inputs]
        by_autograd = []
        with torch.no_grad():
            for parameter, grad in zip(self._leaves, parameter_grads, strict=True):
                if grad is not None:
                    by_autograd.append(parameter)
                    _gradient(parameter).add_(grad)  # as autograd would
        return _CapturedGradients(of_inputs, by_autograd, weight_tasks)

    def _replay_weights(self, replay: Callable[[], None], gradients: _CapturedGradients) -> None:
        replay()
        for parameter, _ in gradients.weight_tasks:
            self._chunk.weight_gradients.report(parameter)


class _Replayed(torch.autograd.Function):
    """Copies a replayed chunk's outputs; its backward replays the backward graph."""

    @staticmethod
    def forward(ctx: Any, graphs: SlotGraphs, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.graphs = graphs
        ctx.set_materialize_grads(False)
        copies = tuple(y.detach().clone() for y in graphs.outputs)
        constants = []
        for copy, y in zip(copies, graphs.outputs, strict=True):
            if not y.requires_grad:
                constants.append(copy)
        ctx.mark_non_differentiable(*constants)
        return copies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.graphs.backward(grads)


class _Applied(nn.Module):
    """The chunk's run as a module, for `functional_call`."""

    def __init__(self, layers: nn.Module, run: Run) -> None:
        super().__init__()
        self.layers = layers
        self._run = run

    def forward(self, inputs: list[Tensor], samples: range | None) -> Any:
        return self._run(inputs, samples)


def _fill(buffers: Sequence[Tensor | None], values: Sequence[Tensor | None]) -> None:
    for buffer, x in zip(buffers, values, strict=True):
        if buffer is not None and x is not None:
            # Through `data`: an in-place change that autograd sees would invalidate tensors saved for backward.
            buffer.data.copy_(x)


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


@torch.no_grad()
def _run_tasks(tasks: Sequence[tuple[Tensor, AddGradient]]) -> None:
    for parameter, add in tasks:
        add(_gradient(parameter))


def _joined(values: Sequence[Tensor]) -> Tensor | None:
    return torch.cat([each.detach().reshape(-1) for each in values]) if values else None
