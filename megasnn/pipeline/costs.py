"""What each layer and each boundary between stages costs: measured, taken from one rank, told to all.

Ranks that used figures of their own would cut the model differently and wait for each other for ever. All of them
measure nevertheless, at the same time: in training every core is at work, and shares caches and memory with the others.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from tqdm import tqdm

from megasnn.bundle import Bundle, Key, bundle_of, entries_of
from megasnn.layers.context import BuildContext
from megasnn.layers.weight_gradients import Task, WeightGradients
from megasnn.layers.whole import apply_layer
from megasnn.models.description import INPUT, LayerDescription, ModelDescription, frames_of
from megasnn.parallel_state import ParallelState
from megasnn.pipeline.executor import Entry
from megasnn.pipeline.link import LinkCost, measure_link
from megasnn.pipeline.p2p import TensorDescriptor, WireOptions, messages_of
from megasnn.schedule import ChunkCost, Kind, Transfer
from megasnn.schedule.memory import stage_shares
from megasnn.sharding import materialise
from megasnn.telemetry.memory import peak_memory_mb, release_free_memory, reset_peak_memory

IN_FLIGHT = 2  # micro-batches that are forward before one is backward, as in a pipeline: memory is not reused at once
ROUNDS = 3


@dataclass(frozen=True)
class LayerCost:
    """One micro-batch through one layer, seconds and bytes.

    Attributes:
        forward, input_gradient, weight_gradient: to compute.
        held: bytes kept from the forward until the weight gradient is done.
        working: bytes that forward, input gradient and weight gradient need at most, above what was there before each;
            0 where the system does not tell.
        message, gradient: bytes of the output and of its gradient on the way to another stage, and in PipelineCosts of
            all that crosses a boundary behind the layer.
        pack, unpack: seconds to make those messages, and to restore what they hold.
    """

    forward: float
    input_gradient: float
    weight_gradient: float
    held: int = 0
    working: tuple[int, int, int] = (0, 0, 0)
    message: int = 0
    gradient: int = 0
    pack: float = 0.0
    unpack: float = 0.0

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward + self.input_gradient + self.weight_gradient


@dataclass(frozen=True)
class PipelineCosts:
    """Of every layer of a model for one micro-batch, and of the way between two stages."""

    layers: tuple[LayerCost, ...]
    link: LinkCost

    def of_chunks(self, bounds: Sequence[range], placement: Sequence[int]) -> list[ChunkCost]:
        """For the simulator, in seconds; activations in whole stages' micro-batches.

        Args:
            bounds: the layers of each chunk. placement: its rank.
        """
        shares = stage_shares(placement)
        return [self._of_chunk(span, share) for span, share in zip(bounds, shares, strict=True)]

    def held_bytes(self, bounds: Sequence[range]) -> list[int]:
        """What each chunk keeps of a micro-batch from forward to backward."""
        return [sum(self.layers[i].held for i in span) for span in bounds]

    def working_bytes(self, bounds: Sequence[range]) -> list[dict[Kind, int]]:
        """What each chunk's computations need at most, above what is there before them."""
        return [self._working_of(span) for span in bounds]

    def _working_of(self, span: range) -> dict[Kind, int]:
        """A forward keeps its layers' activations one after another, and its input until its end."""
        forward, held = 0, 0
        for i in span:
            entering = self.layers[i - 1].gradient if i > span.start else 0
            forward = max(forward, held + entering + self.layers[i].working[0])
            held += self.layers[i].held
        given = self.layers[span.start - 1].gradient if span.start > 0 else 0
        given_back = self.layers[span.stop - 1].gradient if span else 0
        inputs, weights = (max((self.layers[i].working[part] for i in span), default=0) for part in (1, 2))
        return {
            Kind.FORWARD: given + forward,
            Kind.BACKWARD: given_back + max(inputs, weights),
            Kind.INPUT_GRADIENT: given_back + inputs,
            Kind.WEIGHT_GRADIENT: weights,
        }

    def _of_chunk(self, span: range, share: float) -> ChunkCost:
        layers = [self.layers[i] for i in span]
        # What a chunk without layers hands on is what it was given.
        last = self.layers[span.stop - 1] if span.stop > 0 else LayerCost(0, 0, 0)
        inputs, weights = (sum(getattr(each, f"{part}_gradient") for each in layers) for part in ("input", "weight"))
        return ChunkCost(
            forward=sum(each.forward for each in layers),
            backward=inputs + weights,
            activation=share,
            input_gradient=inputs,
            weight_gradient=weights,
            output=self._transfer(last.message, last.pack, last.unpack),
            gradient=self._transfer(last.gradient, 0.0, 0.0),
        )

    def _transfer(self, size: int, pack: float, unpack: float) -> Transfer:
        link = self.link
        sender, receiver = size * link.sender_per_byte, size * link.receiver_per_byte
        on_the_way = link.latency + size * link.per_byte - sender - receiver
        return Transfer(on_the_way, pack + sender, unpack + receiver)


def agreed_costs(
    model: ModelDescription,
    samples: int,
    context: BuildContext,
    state: ParallelState,
    wires: WireOptions = WireOptions(),  # noqa: B008  (frozen)
) -> PipelineCosts:
    """The costs for micro-batches of `samples` samples as the first rank measured them; the same on every rank."""
    world, stages = state.world, state.pipeline.size
    if world.size > 1:
        dist.barrier(group=world.handle)  # who begins before the others would measure a quieter machine
    layers = measure_layers(model, samples, context, state.device, wires, stages)
    measured = [PipelineCosts(tuple(layers), LinkCost())]
    if world.size > 1:
        dist.barrier(group=world.handle)
        if stages > 1:
            state.communicators.start_messages(state.pipeline, 0, 1)
        measured[0] = replace(measured[0], link=measure_link(state.pipeline, state.communicators.wire))
        dist.broadcast_object_list(measured, src=0, group=world.handle)
    return measured[0]


def measure_layers(
    model: ModelDescription,
    samples: int,
    context: BuildContext,
    device: torch.device,
    wires: WireOptions,
    stages: int = 1,
) -> list[LayerCost]:
    """Medians over a few runs of each layer, on copies of its own: the model in training is not touched.

    Layers run one after another as in training: one that ran alone would find its weights in the cache, and its output
    in memory that is warm from the last time. No more exist at a time than a stage has. Values come from keyed
    generators: no random state moves. Collective over the context's tensor group, whose exchanges are part of the cost.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((samples, *model.input_shape), generator=generator).to(device, context.dtype)
    outputs: dict[int, Bundle] = {INPUT: frames_of(x, model.input_shape)}
    measured = MeasuredLayers(model, context, range(samples), device)
    costs: list[LayerCost] = []
    each = -(-len(model.layers) // stages)
    quiet = True if dist.is_initialized() and dist.get_rank() > 0 else None  # None: only on a terminal
    for first in tqdm(range(0, len(model.layers), each), desc="measuring layers", leave=False, disable=quiet):
        layers = [measured(index) for index in range(first, min(first + each, len(model.layers)))]
        outputs = _measure(layers, outputs)
        costs += [layer.cost(wires) for layer in layers]
        outputs = {number: outputs[number] for number in model.needed_from(first + len(layers))}
    return crossing(model, costs)


def crossing(model: ModelDescription, costs: Sequence[LayerCost]) -> list[LayerCost]:
    """The costs of layers with messages of all that crosses a boundary behind each, in place of its own output's."""
    found = []
    for number, cost in enumerate(costs):
        carried = [costs[other] for other in model.needed_from(number + 1)]
        sizes = {name: sum(getattr(each, name) for each in carried) for name in ("message", "gradient")}
        times = {name: sum(getattr(each, name) for each in carried) for name in ("pack", "unpack")}
        found.append(replace(cost, **sizes, **times))
    return found


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
    return tuple((path, type(module), *_settings(module)) for path, module in layer.named_modules())


def _settings(module: nn.Module) -> Iterator[tuple[str, Hashable]]:
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
        self._layer = layer
        materialise([(description.name, layer)], device, seed=0)
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._held = 0
        self._output: Bundle | None = None
        self._learning: list[Key] = []
        self.clock = _Clock(device)
        self.edges: list[list[GradientEdge]] = []
        self.tasks: list[list[Task]] = []
        self._gradients: list[Sequence[Tensor]] = []

    def forward(self, inputs: Sequence[Bundle]) -> Bundle:
        """Runs the layer; it needs no gradient of the model's input."""
        if INPUT not in self.takes:
            inputs = self._entered(inputs)
        with self.clock("forward"):
            y = apply_layer(self._layer, inputs[0], self._samples, *inputs[1:])
        # Without anything to learn up to here there is no backward.
        entries = entries_of(y)
        self._learning = [key for key, entry in entries.items() if entry.requires_grad]
        self.edges.append([get_gradient_edge(entries[key]) for key in self._learning])
        self._output = bundle_of({key: entry.detach() for key, entry in entries.items()})
        assert self._output is not None
        return self._output

    def _entered(self, inputs: Sequence[Bundle]) -> list[Bundle]:
        """The inputs as a chunk behind a boundary gets them."""
        bundles = [dict(entries_of(x)) for x in inputs]
        learning = [(bundle, key) for bundle in bundles for key, entry in bundle.items() if entry.is_floating_point()]
        if learning:
            entered = Entry.apply(self._anchor, self._gradients.append, *(bundle[key] for bundle, key in learning))
            for (bundle, key), entry in zip(learning, entered, strict=True):
                bundle[key] = entry
        return [bundle_of(bundle) for bundle in bundles]

    def count_held(self, inputs: Sequence[Bundle]) -> None:
        """What one forward keeps for backward, once."""
        with _counting_saved(self._layer) as held:
            apply_layer(self._layer, inputs[0], self._samples, *inputs[1:])
        self._held = held[0]

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

    def run_once(self, inputs: Sequence[Bundle]) -> Bundle:
        """Forward and backward of one micro-batch, with the memory that they take; returns the output."""
        self.count_held(inputs)
        for watched in (False, True):  # the first time pays for compiling and for the gradients' memory
            self.clock.watches_memory = watched
            y = self.forward(inputs)
            self.backward()
            self.add_weight_gradients()
        return y

    def cost(self, wires: WireOptions) -> LayerCost:
        times = self.clock.times
        forward, inputs, weights = (median(times[n]) for n in ("forward", "input_gradient", "weight_gradient"))
        assert self._output is not None
        peaks = self.clock.peaks
        working = peaks.get("forward", 0), peaks.get("input_gradient", 0), peaks.get("weight_gradient", 0)
        cost = LayerCost(forward, inputs, weights, self._held, working)
        return _with_messages(cost, self._output, self._description, wires)


def _measure(layers: Sequence[MeasuredLayer], given: Mapping[int, Bundle]) -> dict[int, Bundle]:
    """Runs the layers as a stage would.

    Args:
        given: the outputs of layers before, by number.
    Returns:
        these, and the layers' own.
    """
    outputs: dict[int, Bundle] = {}
    for number in range(ROUNDS + 2):
        for _ in range(IN_FLIGHT):
            outputs = dict(given)
            for layer in layers:
                inputs = [outputs[source] for source in layer.takes]
                if number == 0:
                    layer.count_held(inputs)
                outputs[layer.number] = layer.forward(inputs)
        for _ in range(IN_FLIGHT):
            gradients: dict[int, Sequence[Tensor]] = {}
            for layer in reversed(layers):
                found = layer.backward(gradients.pop(layer.number, None))
                if found is not None and len(layer.takes) == 1:  # of several inputs, ones do for the time that it takes
                    gradients[layer.takes[0]] = found
        for _ in range(IN_FLIGHT):
            for layer in reversed(layers):
                layer.add_weight_gradients()
        if number < 2:
            for layer in layers:
                layer.clock.times.clear()  # the first round pays for compiling and for the gradients' memory
                layer.clock.watches_memory = number == 0
    return outputs


def _with_messages(cost: LayerCost, output: Bundle, description: LayerDescription, wires: WireOptions) -> LayerCost:
    """Adds what it costs to hand the output to another stage."""
    for key, y in entries_of(output).items():
        descriptor = TensorDescriptor.of(y, description.entries[key].content)
        clock = _Clock(y.device)
        for _ in range(ROUNDS):
            with clock("pack"):
                messages = messages_of(descriptor.flatten(y), descriptor)
            with clock("unpack"):
                descriptor.restore(messages[0])
        width = (wires.gradient_dtype or y.dtype).itemsize if y.is_floating_point() else 0
        cost = replace(
            cost,
            message=cost.message + sum(message.nbytes for message in messages),
            gradient=cost.gradient + y.numel() * width,
            pack=cost.pack + median(clock.times["pack"]),
            unpack=cost.unpack + median(clock.times["unpack"]),
        )
    return cost


@contextmanager
def _counting_saved(layer: nn.Module) -> Iterator[list[int]]:
    """Inside, the one element of the list is the bytes that autograd keeps for backward, weights not counted."""
    seen = {tensor.untyped_storage().data_ptr() for tensor in (*layer.parameters(), *layer.buffers())}
    total = [0]

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total[0] += storage.nbytes()
        return tensor

    with saved_tensors_hooks(count, lambda tensor: tensor):
        yield total


class _Clock:
    """
    Attributes:
        times: seconds of each block by name. peaks: bytes that a block needed above what was there before it, of those
            run while `watches_memory`, which takes time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.watches_memory = False
        self.times: dict[str, list[float]] = {}
        self.peaks: dict[str, int] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        before = self._memory_before() if self.watches_memory else None
        start = self._now()
        yield
        self.times.setdefault(name, []).append(self._now() - start)
        if before is not None:
            self.peaks[name] = max(self.peaks.get(name, 0), round(1e6 * (peak_memory_mb(self._device) - before)))

    def _memory_before(self) -> float | None:
        release_free_memory()
        return peak_memory_mb(self._device) if reset_peak_memory(self._device) else None

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def layers_per_chunk(bounds: Sequence[range]) -> str:
    """Layers of each chunk, as `--pipeline-model-parallel-layout` takes them."""
    return "|".join(str(len(span)) for span in bounds)
