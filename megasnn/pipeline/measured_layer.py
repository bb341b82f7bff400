"""A copy of one layer, tried out by itself: its seconds and what it sends."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megasnn.again import Findings, first_forward, second_forward
from megasnn.bundle import Bundle, Key, bundle_of, entries_of
from megasnn.comm.statistics import statistics
from megasnn.device_checks import DeviceChecks
from megasnn.kernels.packed import bits_of, remember_bits
from megasnn.layers.context import BuildContext
from megasnn.layers.only_graph import only_graph
from megasnn.layers.weight_gradients import Task, WeightGradients
from megasnn.layers.whole import apply_layer
from megasnn.models.description import INPUT, LayerDescription, ModelDescription
from megasnn.pipeline.chunk import carrying_layers
from megasnn.pipeline.costs import LayerCost
from megasnn.pipeline.edges import Entry, without_graph
from megasnn.pipeline.p2p import TensorDescriptor, WireOptions, message_of
from megasnn.sharded_tensors import materialise

ROUNDS = 3


class MeasuredLayers:
    """Copies of a model's layers, by their number; each gets its memory when it is asked for, once."""

    def __init__(self, model: ModelDescription, context: BuildContext, samples: range, device: torch.device) -> None:
        self._weight_gradients = WeightGradients()
        built = model.build(replace(context, weight_gradients=self._weight_gradients))
        self._layers: list[nn.Module | None] = list(built)
        self._model, self._samples, self._device = model, samples, device

    def alike(self, index: int) -> Hashable:
        """Equal for layers that are built in the same way."""
        layer = self._layers[index]
        assert layer is not None, "a layer that was measured is gone"
        return _structure(layer)

    def __call__(self, index: int) -> MeasuredLayer:
        layer, self._layers[index] = self._layers[index], None  # its memory is free when it has been measured
        assert layer is not None
        description, takes = self._model.layers[index], self._model.inputs[index]
        return MeasuredLayer(index, description, takes, layer, self._weight_gradients, self._samples, self._device)


def _structure(layer: nn.Module) -> Hashable:
    """Class, settings and tensors' shapes of every module in a layer."""
    return tuple((path, type(module), *_attributes(module)) for path, module in layer.named_modules())


def _attributes(module: nn.Module) -> Iterator[tuple[str, Hashable]]:
    for name, value in sorted(vars(module).items()):
        if not name.startswith("_"):
            try:
                hash(value)
            except TypeError:
                value = repr(value)
            yield name, value
    for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        yield name, (tensor.shape, tensor.dtype, tensor.requires_grad)


class MeasuredLayer:
    """A copy of a layer, with what its runs took.

    Attributes:
        number: its place in the model. takes: the numbers of the layers whose outputs it takes.
        edges, tasks: for each micro-batch that has been forward, the edges of its outputs' graph, and for each that has
            been backward, its tasks.
    """

    def __init__(
        self,
        number: int,
        description: LayerDescription,
        takes: tuple[int, ...],
        layer: nn.Module,
        weight_gradients: WeightGradients,
        samples: range,
        device: torch.device,
    ) -> None:
        self.number, self.takes, self._description = number, takes, description
        self._samples, self._weight_gradients = samples, weight_gradients
        self._layer, self._carrying = layer, carrying_layers(layer)
        materialise([(description.name, layer)], device, seed=0)
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._output: Bundle | None = None
        self._learning: list[Key] = []
        self.clock = _Clock(device)
        self.edges: list[list[GradientEdge]] = []
        self.tasks: list[list[Task]] = []
        self._gradients: list[Sequence[Tensor]] = []

    def forward(self, inputs: Sequence[Bundle]) -> Bundle:
        """Runs the layer, and keeps its graph for `backward`."""
        inputs = self._entered(inputs)
        with self.clock("forward"):
            y = apply_layer(self._layer, inputs[0], self._samples, *inputs[1:])
        # Without anything to learn up to here there is no backward.
        entries = entries_of(y)
        self._learning = [key for key, entry in entries.items() if entry.requires_grad]
        self.edges.append([get_gradient_edge(entries[key]) for key in self._learning])
        self._output = bundle_of({key: without_graph(entry) for key, entry in entries.items()})
        assert self._output is not None
        return self._output

    def output_of(self, inputs: Sequence[Bundle], samples: range) -> Bundle:
        """Runs the layer."""
        inputs = self._entered(inputs)
        return apply_layer(self._layer, inputs[0], samples, *inputs[1:])

    def forget(self) -> None:
        """Lets neurons forget the state that the last run left, before one of another number of samples."""
        for each in self._carrying:
            each.forget()

    def deferred(self) -> AbstractContextManager[list[Task]]:
        """Inside, the second part of a backward is left in the list."""
        return self._weight_gradients.deferred()

    def only_graph(self) -> AbstractContextManager[None]:
        """Inside is a forward that is computed again."""
        return only_graph([self._layer])

    def taken_gradients(self) -> None:
        """After a backward: the gradients of the inputs are used up."""
        self._gradients.clear()

    def _entered(self, inputs: Sequence[Bundle]) -> list[Bundle]:
        """The inputs as a chunk behind a boundary gets them; no gradient is needed of the model's input."""
        if INPUT in self.takes:
            return list(inputs)
        bundles = [dict(entries_of(x)) for x in inputs]
        learning = [(bundle, key) for bundle in bundles for key, entry in bundle.items() if entry.requires_grad]
        if learning:
            given = (bundle[key].detach() for bundle, key in learning)
            entered = Entry.apply(self._anchor, self._gradients.append, *given)
            for (bundle, key), entry in zip(learning, entered, strict=True):
                bundle[key] = remember_bits(entry, bits_of(bundle[key]))
        return [bundle_of(bundle) for bundle in bundles]

    def repeat(self, inputs: Sequence[Bundle]) -> None:
        """Runs the layer as where its forward is computed again, and drops the graph."""
        findings: Findings = deque()
        inputs = self._entered(inputs)
        with first_forward(findings):
            apply_layer(self._layer, inputs[0], self._samples, *inputs[1:])
        with self.clock("again"), self.only_graph(), second_forward(findings):
            apply_layer(self._layer, inputs[0], self._samples, *inputs[1:])

    def backward(self, gradients: Sequence[Tensor] | None = None) -> Sequence[Tensor] | None:
        """Of the oldest micro-batch, from the gradients of the output to those of the inputs; None at the beginning of
        the model. Without gradients, from ones."""
        edges = self.edges.pop(0)
        assert self._output is not None
        if gradients is None or len(gradients) != len(edges):
            entries = entries_of(self._output)
            gradients = [torch.ones_like(entries[key]) for key in self._learning]
        with self.clock("input_gradient"), self._weight_gradients.deferred() as tasks:
            if edges:
                torch.autograd.backward(edges, gradients)
        self.tasks.append(tasks)
        return self._gradients.pop() if self._gradients else None

    def add_weight_gradients(self) -> None:
        tasks = self.tasks.pop(0)
        tasks.reverse()
        with self.clock("weight_gradient"):
            while tasks:
                tasks.pop()()

    def cost(self, wires: WireOptions) -> LayerCost:
        times = self.clock.times
        forward, inputs, weights = (median(times[n]) for n in ("forward", "input_gradient", "weight_gradient"))
        assert self._output is not None
        cost = LayerCost(
            *(forward, inputs, weights),
            parameters=sum(each.nbytes for each in self._layer.parameters()),
            collectives=sum(calls for calls, _ in self.clock.traffic.values()),
            exchanged=sum(sent for _, sent in self.clock.traffic.values()),
            again=median(times["again"]) if times.get("again") else None,
        )
        return _with_messages(cost, self._output, self._description, wires)


def _with_messages(cost: LayerCost, output: Bundle, description: LayerDescription, wires: WireOptions) -> LayerCost:
    """Adds what it costs to hand the output to another stage."""
    for key, y in entries_of(output).items():
        descriptor = TensorDescriptor.of(y, description.entries[key].content)
        clock = _Clock(y.device)
        for _ in range(ROUNDS):
            # Whether values fit is a question of training: here they are made up.
            with clock("pack"), DeviceChecks(y.device).collecting():
                message = message_of(y, descriptor)
            with clock("unpack"):
                descriptor.restore(message)
        width = (wires.gradient_dtype or y.dtype).itemsize if y.requires_grad else 0
        cost = replace(
            cost,
            message=cost.message + message.nbytes,
            gradient=cost.gradient + y.numel() * width,
            pack=cost.pack + median(clock.times["pack"]),
            unpack=cost.unpack + median(clock.times["unpack"]),
        )
    return cost


class _Clock:
    """
    Attributes:
        times: seconds of each block by name. traffic: calls of collectives in a block, and bytes received.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.times: dict[str, list[float]] = {}
        self.traffic: dict[str, tuple[int, int]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        before_it = statistics.total()
        with statistics.counting():
            start = self._now()
            yield
            self.times.setdefault(name, []).append(self._now() - start)
        total = statistics.total()
        self.traffic[name] = total.calls - before_it.calls, total.bytes - before_it.bytes

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
