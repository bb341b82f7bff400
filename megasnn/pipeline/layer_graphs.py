"""One layer as graphs: forward, the gradients of its inputs, and those of its weights; see graphs.py for what holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megasnn.bundle import Bundle, entries_of, map_entries
from megasnn.device_checks import DeviceChecks, refuse
from megasnn.kernels.spike_codec import bits_of, remember_bits
from megasnn.layers.dropout import RefilledKeys
from megasnn.layers.norm import ParallelBatchNorm
from megasnn.layers.replicated import apply_layer
from megasnn.layers.weight_grad import WeightGradients
from megasnn.pipeline.graph_room import CaptureError, GraphRoom, MicroBatchPass, Places, making


class LayerGraphs:
    """One layer, for micro-batches in one slot.

    Attributes:
        room: in which its graphs are.
        inputs: where it takes them. outputs: where it leaves them; they hold what backward needs.
        leaves: what autograd differentiates in the place of the parameters that the layer learns, by parameter.
    Raises:
        CaptureError: its forward cannot be captured. Nothing is left behind by that.
    """

    def __init__(
        self,
        room: GraphRoom,
        name: str,
        layer: nn.Module,
        inputs: Sequence[Bundle],
        samples: range | None,
        passing: MicroBatchPass,
    ) -> None:
        self.room, self._name = room, name
        learnt: list[Tensor] = [each for each in layer.parameters() if each.requires_grad]
        self.leaves = {each: _leaf(each, room.weight_gradients) for each in learnt}
        self._keys = RefilledKeys()
        self._backward: _Backward | None = None
        with making("its forward"):
            self.inputs = Places(room, [entry for x in inputs for entry in entries_of(x).values()])
            places = iter(self.inputs.tensors)
            bundles = [map_entries(lambda _: next(places), x) for x in inputs]
            self._replay = room.capture(partial(self._forward, layer, bundles, samples), passing.pool)
        for y in self.outputs:
            room.fix(y)

    def _forward(self, layer: nn.Module, inputs: Sequence[Bundle], samples: range | None) -> None:
        checks = DeviceChecks(self.inputs.tensors[0].device)
        with _taken_from_norms(layer) as before:
            with checks.collecting(), self._keys.entered(), _in_place_of_parameters(layer, self.leaves):
                self._output = apply_layer(layer, inputs[0], samples, *inputs[1:])
            self._records = [(norm, count) for norm, start in before for _, _, count in norm.pending[start:]]
            values = [value for norm, start in before for mean, var, _ in norm.pending[start:] for value in (mean, var)]
        self.outputs = list(entries_of(self._output).values())
        noted = checks.noted()
        self._complaints = [text for _, text in noted]
        # Each kind in one tensor, which takes one copy.
        self._flags, self._statistics = _joined([flag for flag, _ in noted]), _joined(values)
        self._sizes = [value.numel() for value in values]

    def apply(self, entries: Sequence[Tensor], samples: range | None, passing: MicroBatchPass) -> Bundle:
        self.inputs.fill(entries)
        self._keys.refill(samples)
        self._replay()
        if self._flags is not None:
            for flag, text in zip(self._flags.clone().split(1), self._complaints, strict=True):
                refuse(flag, text)
        if self._statistics is not None:
            values = iter(self._statistics.clone().split(self._sizes))
            for norm, count in self._records:
                norm.record(next(values), next(values), count)
        made = iter(_Replayed.apply(self, passing, self.room.anchor, *entries))
        return map_entries(lambda y: remember_bits(next(made), bits_of(y)), self._output)

    def backward(self, grads: Sequence[Tensor | None], passing: MicroBatchPass) -> list[Tensor | None]:
        """The gradients of the inputs, from those of the outputs."""
        if self._backward is None and self._name not in self.room.left_out:
            self._backward = self._made_backward(grads, passing)
        if self._backward is not None:
            return self._backward.apply(grads)
        # Forward's graph has left what is needed here, and what layers leave for later goes its usual way.
        given = [(y, grad) for y, grad in zip(self.outputs, grads, strict=True) if grad is not None]
        found, learnt = self.differentiate([y for y, _ in given], [grad for _, grad in given])
        self.room.capture.join()
        for parameter in learnt:
            self.room.weight_gradients.added(parameter)
        return found

    def _made_backward(self, grads: Sequence[Tensor | None], passing: MicroBatchPass) -> _Backward | None:
        try:
            return _Backward(self, grads, passing.pool) if passing.may_make() else None
        except CaptureError as error:
            passing.fail(self._name, error)
            return None

    def differentiate(
        self, outputs: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        """The gradients of the inputs, and the parameters to whose gradients autograd's was added."""
        learning = [x for x in self.inputs.tensors if x.requires_grad]
        wanted = [*learning, *self.leaves.values(), self.room.weight_gradients.anchor]
        # What forward has kept stays: its memory is no other graph's.
        found = torch.autograd.grad(outputs, wanted, grads, retain_graph=True, allow_unused=True)
        of_inputs, learnt = iter(found), []
        with torch.no_grad():
            for parameter, grad in zip(self.leaves, found[len(learning) :], strict=False):
                if grad is not None:
                    _gradient(parameter).add_(grad)  # as autograd would
                    learnt.append(parameter)
        return [next(of_inputs) if x.requires_grad else None for x in self.inputs.tensors], learnt


class _Backward:
    """The backward of a layer in a slot, for gradients of some of its outputs. Raises CaptureError."""

    def __init__(self, layer: LayerGraphs, grads: Sequence[Tensor | None], pool: Any) -> None:
        # Not the layer, which holds this: what holds each other is freed by Python's collector only, some time later.
        self._name, self._room, self._are_copied = layer._name, layer.room, layer.inputs.are_copied
        given = [(y, grad) for y, grad in zip(layer.outputs, grads, strict=True) if grad is not None]
        self._are = self._room.places(grads)
        with making("the gradients of its inputs"):
            self._grads = Places(self._room, [grad for _, grad in given])
            self._replay = self._room.capture(partial(self._differentiate, layer, [y for y, _ in given]), pool)
        self._replay_weights = None
        if self._tasks:
            with making("the gradients of its weights"):
                self._replay_weights = self._room.capture(self._add_weight_gradients, self._room.of_weights)
        for grad, is_copied in zip(self._found, self._are_copied, strict=True):
            if grad is not None and not is_copied:
                self._room.fix(grad)

    def _differentiate(self, layer: LayerGraphs, outputs: list[Tensor]) -> None:
        with self._room.weight_gradients.collected() as self._tasks:
            self._found, self._learnt = layer.differentiate(outputs, self._grads.tensors)

    def _add_weight_gradients(self) -> None:
        with torch.no_grad():
            for parameter, add in self._tasks:
                add(_gradient(parameter))

    def apply(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        if self._room.places(grads) != self._are:
            raise RuntimeError("gradients reach the outputs of a layer otherwise than when its CUDA graphs were made")
        self._grads.fill([grad for grad in grads if grad is not None])
        self._replay()
        for parameter in self._learnt:
            self._room.weight_gradients.added(parameter)
        if self._replay_weights is not None:
            self._room.weight_gradients.leave(self._weights)
        return [
            grad.clone() if grad is not None and is_copied else grad
            for grad, is_copied in zip(self._found, self._are_copied, strict=True)
        ]

    def _weights(self) -> None:
        assert self._replay_weights is not None
        self._replay_weights()
        for parameter, _ in self._tasks:
            self._room.weight_gradients.added(parameter)


class _Replayed(torch.autograd.Function):
    """Gives the outputs of a layer that was replayed, and replays its backward."""

    @staticmethod
    def forward(
        ctx: Any, layer: LayerGraphs, passing: MicroBatchPass, anchor: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.layer, ctx.passing = layer, passing
        ctx.set_materialize_grads(False)
        outputs = tuple(y.detach() for y in layer.outputs)
        learnt = zip(outputs, layer.outputs, strict=True)
        ctx.mark_non_differentiable(*(output for output, y in learnt if not y.requires_grad))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, None, *ctx.layer.backward(grads, ctx.passing)


@contextmanager
def _taken_from_norms(layer: nn.Module) -> Iterator[list[tuple[ParallelBatchNorm, int]]]:
    """Inside, the norms record; behind it, also where it fails, they have what they had before.

    Yields:
        each norm, with the number of its records.
    """
    norms = [each for each in layer.modules() if isinstance(each, ParallelBatchNorm)]
    before = [(norm, len(norm.pending)) for norm in norms]
    try:
        yield before
    finally:
        for norm, start in before:
            del norm.pending[start:]


def _leaf(parameter: Tensor, weight_gradients: WeightGradients) -> Tensor:
    """A leaf for autograd on the memory of a parameter; itself where the layer does not leave its gradient to autograd.

    Autograd adds to a parameter on the stream on which that was used first, as long as somebody holds a graph with it.
    A forward without a CUDA graph that is under way would draw its stream into the capture, which the driver refuses;
    and what is captured, which is held for good, would draw later forwards without graphs, and whatever waits for
    their gradients, to the stream of the capture. A leaf of its own has nothing to do with either.
    """
    return parameter if weight_gradients.takes(parameter) else parameter.detach().requires_grad_()


@contextmanager
def _in_place_of_parameters(layer: nn.Module, leaves: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Inside, the modules of a layer have these tensors for their parameters."""
    tables: list[dict[str, Any]] = [module._parameters for module in layer.modules()]
    learnt = [(table, name, p) for table in tables for name, p in table.items() if p in leaves]
    try:
        for table, name, parameter in learnt:
            table[name] = leaves[parameter]
        yield
    finally:
        for table, name, parameter in learnt:
            table[name] = parameter


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _joined(values: Sequence[Tensor]) -> Tensor | None:
    return torch.cat([each.detach().reshape(-1) for each in values]) if values else None
