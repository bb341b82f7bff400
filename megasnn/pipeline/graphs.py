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
then. Graphs are made in steps of which all ranks have agreed on that before, since it takes memory (see
Transfers.announce); what lacks a graph in another step goes without.

What forward keeps, and the dense outputs and gradients of all layers stay in memory for every slot.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from megasnn.bundle import Bundle, entries_of, shapes_text
from megasnn.layers.neuron import NeuronLayer
from megasnn.layers.replicated import apply_layer
from megasnn.layers.weight_grad import WeightGradients
from megasnn.pipeline.capture import GraphOptions
from megasnn.pipeline.graph_room import CaptureError, GraphRoom, MicroBatchPass
from megasnn.pipeline.layer_graphs import LayerGraphs

MOST_SHAPES = 2  # of a layer's inputs: micro-batches of the usual size, and the smaller last one
KNOWN = ("megasnn", "torch")  # packages of modules that depend on nothing that Python knows and a graph does not


class ChunkGraphs:
    """The graphs of a chunk's layers, and the slots of its micro-batches.

    Args:
        layers: of the chunk, by name.
        sharing: those that take what another layer takes too, or take it twice.
        weight_gradients: where they leave the second part of their backward.
    Attributes:
        lacks: whether something had no graph in the last step that has one in later ones.
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
        self._layers = dict(layers)
        self._capture, self._is_required = options
        modules = [each for layer in self._layers.values() for each in layer.modules()]
        self._neurons = [each for each in modules if isinstance(each, NeuronLayer)]
        self._left_out, self._told = set[str](), set[str]()
        self._new_room = partial(GraphRoom, self._capture, weight_gradients, self._left_out)
        self._room = self._new_room()
        self._seen: dict[str, dict[Any, int]] = {name: {} for name in self._layers}  # in which step, by shape
        self._graphs: dict[Any, LayerGraphs] = {}
        self._addresses: list[int] = []
        self._step, self._slots = 0, dict[int, int]()
        self._pass: MicroBatchPass | None = None
        self._makes = self.lacks = False
        for name in self._layers:
            if name in sharing:
                self._leave_out(name, "its input is taken several times, and gradients would be added in another order")
        self._look()

    def begin(self, makes: bool) -> None:
        """Before each step. Raises RuntimeError where tensors are no longer where graphs know them.

        Args:
            makes: whether graphs may be made in it.
        """
        self._step, self._slots, self._makes, self.lacks = self._step + 1, {}, makes, False
        self._look()
        if makes:
            self._capture.make_room()
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
            slot = self._slots[micro_batch] = next(each for each in range(len(taken) + 1) if each not in taken)
            self._pass = MicroBatchPass(slot, self._capture.pool(), self._may_make, self._fail)
        elif self._makes:
            self.lacks = True
        try:
            yield
        except BaseException:
            self._forget()
            raise
        finally:
            self._pass = None

    def done(self, micro_batch: int) -> None:
        """After all of its backward."""
        self._slots.pop(micro_batch, None)

    def apply(self, name: str, inputs: Sequence[Bundle], samples: range | None) -> Bundle:
        """What `apply_layer` gives for a layer of the chunk."""
        layer, entries = self._layers[name], [entry for x in inputs for entry in entries_of(x).values()]
        shapes = tuple((x.shape, x.stride(), x.dtype, x.requires_grad) for x in entries)
        steps = self._seen[name]
        if shapes not in steps and len(steps) < MOST_SHAPES:
            steps[shapes] = self._step
        elif shapes not in steps:
            self._tell(name, f"its inputs have changing shapes: now {shapes_text(*inputs)}, after {MOST_SHAPES} others")
        first = steps.get(shapes)
        self.lacks |= first == self._step
        if self._pass is None or name in self._left_out or first in (None, self._step):
            y = apply_layer(layer, inputs[0], samples, *inputs[1:])
            if name not in self._left_out and not any(each.requires_grad for each in entries_of(y).values()):
                self._leave_out(name, "neither it nor what is before it in its stage learns")
            return y
        key = name, self._pass.slot, shapes, self._room.places(entries)
        if key not in self._graphs and self._may_make():
            try:
                self._graphs[key] = LayerGraphs(self._room, name, layer, inputs, samples, self._pass)
            except CaptureError as error:
                self._fail(name, error)
        if key not in self._graphs:
            return apply_layer(layer, inputs[0], samples, *inputs[1:])
        return self._graphs[key].apply(entries, samples, self._pass)

    def _may_make(self) -> bool:
        self.lacks |= not self._makes
        return self._makes

    def _forget(self) -> None:
        """What was seen first in a step that ends here. Layers that it has not come to would get their graphs in a
        later step than those before them, whose backward would be captured for gradients from elsewhere."""
        for steps in self._seen.values():
            for shapes in [each for each, step in steps.items() if step == self._step]:
                del steps[shapes]

    # --- what runs without

    def _look(self) -> None:
        for name, layer in self._layers.items():
            if name not in self._left_out and (why := why_not(layer)):
                self._leave_out(name, why)

    def _fail(self, name: str, error: CaptureError) -> None:
        try:
            self._leave_out(name, str(error))
        except ValueError as refused:
            raise refused from error

    def _leave_out(self, name: str, why: str) -> None:
        self._tell(name, why)
        self._left_out.add(name)
        # What was given to this layer's graphs is made anew. Micro-batches under way hold the graphs that they need.
        self._graphs, self._room = {}, self._new_room()
        self.lacks = True

    def _tell(self, name: str, why: str) -> None:
        if self._is_required:
            raise ValueError(f"{name} cannot have CUDA graphs: {why} (--cuda-graphs auto leaves it without)")
        if name not in self._told:
            self._told.add(name)
            sys.stderr.write(f"WARNING: {name} runs without CUDA graphs: {why}\n")


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
