"""The layers of a chunk as graphs: forward, the gradients of inputs, and those of weights.

A graph computes on memory that stays where it is, with numbers that stay what they are. So:

- Micro-batches that are under way at the same time each have a slot, and every slot of a layer has graphs of its own.
- An output of a graph is given to the next layer's graph where it is. What comes from elsewhere is copied to a fixed
  place first, and its gradient is copied when it leaves: a message with it may be on its way when the slot is used
  again.
- What a layer has besides its outputs, statistics of norms and what checks have found, is copied after each replay.
  Keys of random numbers are written before it.
- Gradients of parameters are added inside of the graphs, and counted when those were replayed.

A layer runs without a graph in the first step that it sees an input of some shape in: kernels are compiled and chosen
then. Nothing of a graph is freed, so that graphs may be replayed in any order (see Capture): what forward keeps, and
the dense outputs and gradients of all layers stay in memory for every slot.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megasnn.bundle import Bundle, entries_of, map_entries, shapes_text
from megasnn.device_checks import DeviceChecks, refuse
from megasnn.kernels.packed import bits_of, remember_bits
from megasnn.layers.batch_norm import ParallelBatchNorm
from megasnn.layers.keyed import RefilledKeys
from megasnn.layers.neuron import NeuronLayer
from megasnn.layers.weight_gradients import WeightGradients
from megasnn.layers.whole import apply_layer
from megasnn.pipeline.capture import GraphOptions

MOST_SHAPES = 2  # of a layer's inputs: micro-batches of the usual size, and the smaller last one
KNOWN = ("megasnn", "torch")  # packages of modules that depend on nothing that Python knows and a graph does not


class ChunkGraphs:
    """The graphs of a chunk's layers, and the slots of its micro-batches.

    Args:
        layers: of the chunk, by name.
        sharing: those that take what another layer takes too, or take it twice.
        weight_gradients: where they leave the second part of their backward.
    Raises:
        ValueError: a layer cannot have graphs, and all of them must.
    """

    def __init__(
        self,
        layers: Iterable[tuple[str, nn.Module]],
        sharing: Collection[str],
        weight_gradients: WeightGradients,
        options: GraphOptions,
    ) -> None:
        self._layers, self.weight_gradients = dict(layers), weight_gradients
        self.capture, self._is_required = options
        modules = [each for layer in self._layers.values() for each in layer.modules()]
        self._neurons = [each for each in modules if isinstance(each, NeuronLayer)]
        self._left_out, self._told = set[str](), set[str]()
        self._seen: dict[str, dict[Any, int]] = {name: {} for name in self._layers}  # in which step, by shape
        self._graphs: dict[Any, _LayerGraphs] = {}
        self._fixed: set[int] = set()
        self._addresses: list[int] = []
        self._step, self._slots = 0, dict[int, int]()
        self._slot: int | None = None
        self.anchor = torch.zeros((), requires_grad=True)
        for name in self._layers:
            if name in sharing:
                self._leave_out(name, "its input is taken several times, and gradients would be added in another order")
        self._look()

    def begin(self) -> None:
        """Before each step. Raises RuntimeError where tensors are no longer where graphs know them."""
        self._step, self._slots = self._step + 1, {}
        self._look()
        tensors = [t for layer in self._layers.values() for t in (*layer.parameters(), *layer.buffers())]
        addresses = [each.data_ptr() for t in tensors for each in (t, t.grad) if each is not None]
        if self._graphs and addresses != self._addresses:
            raise RuntimeError(
                "weights, buffers or gradients were moved in memory after CUDA graphs were made of their layers: write "
                "into them instead, or use --cuda-graphs off"
            )
        self._addresses = addresses

    @contextmanager
    def begun(self, micro_batch: int) -> Iterator[None]:
        """Around a micro-batch's forward, which goes without graphs where its spikes are observed."""
        if not any(neuron.is_observed for neuron in self._neurons):
            taken = self._slots.values()
            self._slot = self._slots[micro_batch] = next(each for each in range(len(taken) + 1) if each not in taken)
        try:
            yield
        finally:
            self._slot = None

    def done(self, micro_batch: int) -> None:
        """After all of its backward."""
        self._slots.pop(micro_batch, None)

    def apply(self, name: str, inputs: Sequence[Bundle], samples: range | None) -> Bundle:
        """What `apply_layer` gives for a layer of the chunk."""
        layer, entries = self._layers[name], [entry for x in inputs for entry in entries_of(x).values()]
        shapes = tuple((x.shape, x.stride(), x.dtype, x.requires_grad) for x in entries)
        steps = self._seen[name]
        first = steps.get(shapes)
        if first is None and len(steps) < MOST_SHAPES:
            steps[shapes] = self._step
        elif first is None:
            self._tell(name, f"its inputs have changing shapes: now {shapes_text(*inputs)}, after {MOST_SHAPES} others")
        if self._slot is None or name in self._left_out or first in (None, self._step):
            y = apply_layer(layer, inputs[0], samples, *inputs[1:])
            if name not in self._left_out and not any(each.requires_grad for each in entries_of(y).values()):
                self._leave_out(name, "neither it nor what is before it in its stage learns")
            return y
        key = name, self._slot, shapes, self.places(entries)
        if key not in self._graphs:
            with _making(name):
                self._graphs[key] = _LayerGraphs(self, name, layer, inputs, samples)
        return self._graphs[key].apply(entries, samples)

    # --- memory

    def is_fixed(self, x: Tensor) -> bool:
        """Whether it is where a graph has left it."""
        return x.untyped_storage().data_ptr() in self._fixed

    def fix(self, x: Tensor) -> None:
        """From now on this memory is where a graph leaves it; the graph holds it."""
        self._fixed.add(x.untyped_storage().data_ptr())

    def places(self, tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
        """What a graph has to know of where tensors are."""
        return tuple(None if x is None else (x.stride(), x.data_ptr() if self.is_fixed(x) else 0) for x in tensors)

    # --- what runs without

    def _look(self) -> None:
        for name, layer in self._layers.items():
            if name not in self._left_out and (why := why_not(layer)):
                self._leave_out(name, why)

    def _leave_out(self, name: str, why: str) -> None:
        self._tell(name, why)
        self._left_out.add(name)
        self._graphs, self._fixed = {}, set()  # what was given to this layer's graphs is made anew

    def _tell(self, name: str, why: str) -> None:
        if self._is_required:
            raise ValueError(f"{name} cannot have CUDA graphs: {why} (--cuda-graphs auto leaves it without)")
        if name not in self._told:
            self._told.add(name)
            sys.stderr.write(f"WARNING: {name} runs without CUDA graphs: {why}\n")


@contextmanager
def _making(name: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"{name} cannot be made a CUDA graph, use --cuda-graphs off: {error}") from error


def why_not(layer: nn.Module) -> str | None:
    """Why a layer cannot have graphs, as far as it can be seen from outside; None where nothing is seen."""
    for path, module in layer.named_modules():
        kind = type(module)
        what = f"{path} ({kind.__name__})" if path else kind.__name__
        hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
        if any(hooks) or any(each._backward_hooks for each in module.parameters(recurse=False)):
            return f"{what} has hooks, and no replay calls them"
        if module._compiled_call_impl is not None:
            return f"{what} is compiled by torch.compile"
        if kind.__module__.split(".")[0] not in KNOWN:
            return f"{what} is no module of MegaSNN's or torch's: what it decides in Python would be decided once"
    return None


class _LayerGraphs:
    """One layer, for micro-batches in one slot.

    Attributes:
        inputs: where it takes them. outputs: where it leaves them; they hold what backward needs.
        parameters: those that it learns.
    """

    def __init__(
        self, owner: ChunkGraphs, name: str, layer: nn.Module, inputs: Sequence[Bundle], samples: range | None
    ) -> None:
        self.owner, self._name = owner, name
        self.inputs = _Places(owner, [entry for x in inputs for entry in entries_of(x).values()])
        self.parameters = [each for each in layer.parameters() if each.requires_grad]
        self._keys = RefilledKeys()
        self._backward: _Backward | None = None
        places = iter(self.inputs.tensors)
        bundles = [map_entries(lambda _: next(places), x) for x in inputs]
        self._replay = owner.capture(partial(self._forward, layer, bundles, samples))
        for y in self.outputs:
            owner.fix(y)

    def _forward(self, layer: nn.Module, inputs: Sequence[Bundle], samples: range | None) -> None:
        norms = [each for each in layer.modules() if isinstance(each, ParallelBatchNorm)]
        before = [(norm, len(norm.pending)) for norm in norms]
        checks = DeviceChecks(self.inputs.tensors[0].device)
        with checks.collecting(), self._keys.entered():
            self._output = apply_layer(layer, inputs[0], samples, *inputs[1:])
        self.outputs = list(entries_of(self._output).values())
        noted = checks.noted()
        self._complaints = [text for _, text in noted]
        self._records = [(norm, count) for norm, start in before for _, _, count in norm.pending[start:]]
        values = [value for norm, start in before for mean, var, _ in norm.pending[start:] for value in (mean, var)]
        for norm, start in before:
            del norm.pending[start:]
        # Each kind in one tensor, which takes one copy.
        self._flags, self._statistics = _joined([flag for flag, _ in noted]), _joined(values)
        self._sizes = [value.numel() for value in values]

    def apply(self, entries: Sequence[Tensor], samples: range | None) -> Bundle:
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
        made = iter(_Replayed.apply(self, self.owner.anchor, *entries))
        return map_entries(lambda y: remember_bits(next(made), bits_of(y)), self._output)

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the inputs, from those of the outputs."""
        if self._backward is None:
            with _making(self._name):
                self._backward = _Backward(self, grads)
        return self._backward.apply(grads)


class _Backward:
    """The backward of a layer in a slot, for gradients of some of its outputs."""

    def __init__(self, layer: _LayerGraphs, grads: Sequence[Tensor | None]) -> None:
        self._layer, self._owner = layer, layer.owner
        given = [(y, grad) for y, grad in zip(layer.outputs, grads, strict=True) if grad is not None]
        self._are = self._owner.places(grads)
        self._grads = _Places(self._owner, [grad for _, grad in given])
        self._replay = self._owner.capture(partial(self._differentiate, [y for y, _ in given]))
        self._replay_weights = self._owner.capture(self._add_weight_gradients) if self._tasks else None
        for grad, is_copied in zip(self._found, layer.inputs.are_copied, strict=True):
            if grad is not None and not is_copied:
                self._owner.fix(grad)

    def _differentiate(self, outputs: list[Tensor]) -> None:
        layer, weight_gradients = self._layer, self._owner.weight_gradients
        learning = [x for x in layer.inputs.tensors if x.requires_grad]
        wanted = [*learning, *layer.parameters, weight_gradients.anchor]
        with weight_gradients.collected() as tasks:
            # What forward has kept stays: its memory is no other graph's.
            found = torch.autograd.grad(outputs, wanted, self._grads.tensors, retain_graph=True, allow_unused=True)
        self._tasks, of_inputs = tasks, iter(found)
        self._found = [next(of_inputs) if x.requires_grad else None for x in layer.inputs.tensors]
        self._learnt = []
        with torch.no_grad():
            for parameter, grad in zip(layer.parameters, found[len(learning) :], strict=False):
                if grad is not None:
                    _gradient(parameter).add_(grad)  # as autograd would
                    self._learnt.append(parameter)

    def _add_weight_gradients(self) -> None:
        with torch.no_grad():
            for parameter, add in self._tasks:
                add(_gradient(parameter))

    def apply(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        if self._owner.places(grads) != self._are:
            raise RuntimeError("gradients reach the outputs of a layer otherwise than when its CUDA graphs were made")
        self._grads.fill([grad for grad in grads if grad is not None])
        self._replay()
        for parameter in self._learnt:
            self._owner.weight_gradients.added(parameter)
        if self._replay_weights is not None:
            self._owner.weight_gradients.leave(self._weights)
        return [
            grad.clone() if grad is not None and is_copied else grad
            for grad, is_copied in zip(self._found, self._layer.inputs.are_copied, strict=True)
        ]

    def _weights(self) -> None:
        assert self._replay_weights is not None
        self._replay_weights()
        for parameter, _ in self._tasks:
            self._owner.weight_gradients.added(parameter)


class _Replayed(torch.autograd.Function):
    """Gives the outputs of a layer that was replayed, and replays its backward."""

    @staticmethod
    def forward(ctx: Any, layer: _LayerGraphs, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.layer = layer
        ctx.set_materialize_grads(False)
        outputs = tuple(y.detach() for y in layer.outputs)
        learnt = zip(outputs, layer.outputs, strict=True)
        ctx.mark_non_differentiable(*(output for output, y in learnt if not y.requires_grad))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.layer.backward(grads)


class _Places:
    """Where a graph finds what it is given.

    Attributes:
        tensors: there. are_copied: which of them are filled before each replay; the others come from other graphs.
    """

    def __init__(self, owner: ChunkGraphs, given: Sequence[Tensor]) -> None:
        self.are_copied = [not owner.is_fixed(x) for x in given]
        self.tensors = []
        for x, is_copied in zip(given, self.are_copied, strict=True):
            if is_copied:  # in the same memory order, also where values are repeated
                place = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
            else:
                place = remember_bits(x.detach(), bits_of(x))
            self.tensors.append(place.requires_grad_(x.requires_grad))

    def fill(self, given: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for place, x, is_copied in zip(self.tensors, given, self.are_copied, strict=True):
                if is_copied:
                    _distinct(place).copy_(_distinct(x))


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _distinct(x: Tensor) -> Tensor:
    """Each place in memory once, of a tensor that may be expanded; autograd does not see when it is written to."""
    once = [1 if stride == 0 else size for size, stride in zip(x.shape, x.stride(), strict=True)]
    return x.data.as_strided(once, x.stride(), x.storage_offset())


def _joined(values: Sequence[Tensor]) -> Tensor | None:
    return torch.cat([each.detach().reshape(-1) for each in values]) if values else None
