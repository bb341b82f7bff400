"""Profile of a model's layers: seconds and bytes of each, on copies of its own, in one pass from the first to the last.

Each layer runs by itself, as a chunk that begins and ends with it: once to warm up, once with its allocations counted,
and a few times by the clock. Layers that are built alike and take the same shapes are profiled once. No more than one
layer exists at a time. Values come from keyed generators: no random state moves.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from megasnn.bundle import Bundle, bundle_of, entries_of, map_entries
from megasnn.device_checks import DeviceChecks
from megasnn.kernels.spike_codec import bits_of, remember_bits
from megasnn.layers.blocks import recompute_mode
from megasnn.layers.context import BuildContext
from megasnn.layers.replicated import apply_layer
from megasnn.layers.row_context import own_rows_of
from megasnn.layers.weight_grad import CastWeights, WeightGradients
from megasnn.models.description import INPUT, LayerDescription, ModelDescription, frames_of
from megasnn.parallel.sharding import materialise
from megasnn.parallel.traffic import statistics
from megasnn.parallel_state import ParallelState
from megasnn.pipeline.chunk import carrying_layers
from megasnn.pipeline.cost_model import LayerCost, LinkCost, PipelineCosts, crossing, for_samples
from megasnn.pipeline.edges import Entry, backward_of
from megasnn.pipeline.link import measure_link
from megasnn.pipeline.p2p import TensorDescriptor, WireOptions, message_of
from megasnn.recompute import Cache, recording, replaying
from megasnn.telemetry.allocations import AllocationCounter

ROUNDS = 3
TRIAL_SAMPLES = 1, 2
COUNTED_AS_THEY_ARE = 4
"""Samples of a micro-batch. Of few, other moments are the peak than of many: weights' gradients take most."""


def profile_pipeline(
    model: ModelDescription,
    samples: int,
    context: BuildContext,
    state: ParallelState,
    wires: WireOptions = WireOptions(),  # noqa: B008  (frozen)
    repeats: bool = False,
) -> PipelineCosts:
    """Costs for micro-batches of `samples` samples as the first rank measured them; the same on every rank.

    Ranks that used figures of their own would cut the model differently and wait for each other for ever. All of them
    measure nevertheless, at the same time: in training every core is at work. Collective over the world.

    Args:
        repeats: whether forwards that are computed again are measured, too.
    """
    world, link, replicas = state.world, LinkCost(), None
    if world.size > 1:
        dist.barrier(group=world.handle)  # who begins before the others would measure a quieter machine
    layers = profile_layers(model, samples, context, state.device, wires, ROUNDS, repeats)
    if world.size > 1:
        dist.barrier(group=world.handle)
        wire = state.communicators.wire
        if state.pipeline.size > 1:
            state.communicators.start_messages(state.pipeline, 0, 1)
            link = measure_link(state.pipeline, wire)
        if context.weight.size > 1:
            state.communicators.start_messages(context.weight, 0, 1)
            replicas = measure_link(context.weight, wire)
    measured = [PipelineCosts(tuple(layers), link, replicas)]
    if world.size > 1:
        dist.broadcast_object_list(measured, src=0, group=world.handle)
    return measured[0]


def count_memory(
    model: ModelDescription,
    samples: int,
    context: BuildContext,
    device: torch.device,
    wires: WireOptions,
    repeats: bool = False,
) -> PipelineCosts:
    """Bytes of each layer for a micro-batch of `samples` samples; times are 0.

    Up to four samples are counted as they are; more with one sample and with two: each more needs as much more.
    """
    sizes = TRIAL_SAMPLES if samples > COUNTED_AS_THEY_ARE else (samples,)
    counted = [profile_layers(model, size, context, device, wires, 0, repeats) for size in sizes]
    return PipelineCosts(tuple(for_samples(each, samples, sizes) for each in zip(*counted, strict=True)), LinkCost())


def profile_layers(
    model: ModelDescription,
    samples: int,
    context: BuildContext,
    device: torch.device,
    wires: WireOptions,
    rounds: int = ROUNDS,
    repeats: bool = False,
) -> list[LayerCost]:
    """Costs of all layers for a micro-batch. Collective over the ranks that share one.

    Args:
        rounds: runs by the clock, whose median counts; 0: bytes only.
        repeats: whether forwards that are computed again are measured, too.
    """
    generator, draw = torch.Generator().manual_seed(0), model.example_input
    x = torch.randn((samples, *model.input_shape), generator=generator) if draw is None else draw(samples, generator)
    outputs: dict[int, Bundle] = {
        INPUT: own_rows_of(frames_of(x.to(device, context.dtype), model.input_shape), context)
    }
    casts, weight_gradients = CastWeights(), WeightGradients()
    built = replace(context, cast_weights=casts, weight_gradients=weight_gradients)
    layers: list[nn.Module | None] = list(model.build(built))
    known: dict[Hashable, tuple[LayerCost, Bundle]] = {}
    costs: list[LayerCost] = []
    quiet = True if rounds == 0 or (dist.is_initialized() and dist.get_rank() > 0) else None  # None: on a terminal
    for number in tqdm(range(len(layers)), desc="measuring layers", leave=False, disable=quiet):
        description, takes = model.layers[number], model.inputs[number]
        inputs = [outputs[source] for source in takes]
        layer, layers[number] = layers[number], None  # its memory is free when it has been profiled
        assert layer is not None
        shapes = [(key, x.shape, x.requires_grad) for each in inputs for key, x in entries_of(each).items()]
        kind = (_structure(layer), str(description.output), tuple(shapes), INPUT in takes)
        if kind not in known:
            materialise([(description.name, layer)], device, seed=0)
            with casts.kept():  # as in a step, which makes each copy once
                trial = _Trial(layer, inputs, range(samples), INPUT in takes, weight_gradients, device)
                cost = _with_messages(trial.cost(rounds, repeats), trial.output, description, wires, rounds)
                cast = casts.held_bytes if context.weight.size == 1 else 0  # weights are gathered as such
            known[kind] = replace(cost, cast=cast), trial.output
        cost, outputs[number] = known[kind]
        costs.append(cost)
        still_needed = model.needed_from(number + 1)
        outputs = {source: output for source, output in outputs.items() if source in still_needed}
    return crossing(model, costs)


def _structure(layer: nn.Module) -> Hashable:
    """Class, settings and tensors' shapes of every module in a layer: equal for layers that are built alike."""
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


class _Trial:
    """Runs of one layer.

    Args:
        is_first: whether it takes the model's input, of which no gradient is needed.
    Attributes:
        output: with its bits, where it knows them.
    """

    def __init__(
        self,
        layer: nn.Module,
        inputs: Sequence[Bundle],
        samples: range,
        is_first: bool,
        weight_gradients: WeightGradients,
        device: torch.device,
    ) -> None:
        self._layer, self._inputs, self._samples, self._is_first = layer, inputs, samples, is_first
        self._weight_gradients, self._device, self._clock = weight_gradients, device, Clock(device)
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._gradients: list[Sequence[Tensor]] = []  # of the inputs
        before = statistics.total()
        # What is left of the first run goes while something else is counted: torch warns of memory not seen taken.
        with AllocationCounter(device).counting(), statistics.counting():
            y = self._forward(inputs)
            self._learning = [torch.empty_like(each, device="meta") for each in _learning(y)]
            self._backward_of(y)()  # the first one pays for compiling and for the gradients' memory
            self._gradients.clear()
            self.output = map_entries(_copied, y)
        after = statistics.total()
        self._traffic = after.calls - before.calls, after.bytes - before.bytes

    def cost(self, rounds: int, repeats: bool) -> LayerCost:
        """Costs without those of messages. Args: as of `profile_layers`."""
        held, forward, whole = self._count_whole_backward()
        inputs, deferred, weights = self._count_parts()
        found, again = self._count_again() if repeats else (0, None)
        for _ in range(rounds):
            self._run_by_the_clock(repeats)
        return LayerCost(
            forward=self._clock.seconds("forward") or 0.0,
            input_gradient=self._clock.seconds("input_gradient") or 0.0,
            weight_gradient=self._clock.seconds("weight_gradient") or 0.0,
            held=held,
            working=(forward, inputs, weights),
            parameters=sum(each.nbytes for each in self._layer.parameters()),
            collectives=self._traffic[0],
            exchanged=self._traffic[1],
            found=found,
            again=self._clock.seconds("again"),
            working_again=again,
            working_whole=whole,
            deferred=deferred,
            output=sum(each.nbytes for each in entries_of(self.output).values()),
        )

    def _count_whole_backward(self) -> tuple[int, int, int]:
        """Bytes that a forward keeps and needs, and that a backward in one part needs."""
        counter, forward, backward = self._counted_forward()
        held = counter.held
        with counter.counting():
            backward()
        self._gradients.clear()
        return held, forward, counter.peak - held - self._gradient_bytes

    def _count_parts(self) -> tuple[int, int, int]:
        """Bytes that an input gradient needs and leaves, and that a weight gradient needs."""
        counter, _, backward = self._counted_forward()
        held = counter.held
        with counter.counting(), self._weight_gradients.deferred() as tasks:
            backward()
        inputs = counter.peak - held - self._gradient_bytes
        with counter.counting():
            self._gradients.clear()
        deferred = counter.held
        tasks.reverse()
        with counter.counting():
            while tasks:
                tasks.pop()()
        return inputs, deferred, counter.peak - deferred

    def _count_again(self) -> tuple[int, int]:
        """Bytes that a forward keeps for the second one beside its input, and that the second one needs."""
        with AllocationCounter(self._device).counting():
            findings = self._first_forward()
        parts = [part for each in findings for part in ([each] if isinstance(each, Tensor) else each)]
        found = sum(part.nbytes for part in parts)
        with recompute_mode([self._layer]), replaying(findings):
            return found, self._counted_forward()[1]

    def _counted_forward(self) -> tuple[AllocationCounter, int, Callable[[], None]]:
        """A forward, at whose end nothing is left but what it keeps; the bytes that it needed, and its backward."""
        self._forget()
        counter, given = AllocationCounter(self._device), list[Bundle]()
        with counter.counting():  # inputs come in, but images lie in the batch
            given += self._inputs if self._is_first else [map_entries(_copied, x) for x in self._inputs]
        before = counter.held
        with counter.counting():
            y = [self._forward(given)]
        needed = counter.peak - before
        with counter.counting():
            backward = self._backward_of(y.pop())
            given.clear()
        return counter, needed, backward

    @property
    def _gradient_bytes(self) -> int:
        """Bytes of the gradient of the output."""
        return sum(each.nbytes for each in self._learning)

    def _first_forward(self) -> Cache:
        findings: Cache = deque()
        self._forget()
        with recording(findings):
            self._forward(self._inputs)
        return findings

    def _run_by_the_clock(self, repeats: bool) -> None:
        self._forget()
        with self._clock("forward"):
            y = self._forward(self._inputs)
        backward = self._backward_of(y)
        del y
        with self._clock("input_gradient"), self._weight_gradients.deferred() as tasks:
            backward()
        self._gradients.clear()
        tasks.reverse()
        with self._clock("weight_gradient"):
            while tasks:
                tasks.pop()()
        if repeats:
            findings = self._first_forward()
            with self._clock("again"), recompute_mode([self._layer]), replaying(findings):
                self._forward(self._inputs)

    def _forget(self) -> None:
        """Lets neurons forget the state that the last run left."""
        for each in carrying_layers(self._layer):
            each.forget()

    def _forward(self, inputs: Sequence[Bundle]) -> Bundle:
        inputs = list(inputs) if self._is_first else self._entered(inputs)
        return apply_layer(self._layer, inputs[0], self._samples, *inputs[1:])

    def _entered(self, inputs: Sequence[Bundle]) -> list[Bundle]:
        """Inputs as a chunk behind a boundary gets them."""
        bundles = [dict(entries_of(x)) for x in inputs]
        learning = [(bundle, key) for bundle in bundles for key, entry in bundle.items() if entry.requires_grad]
        if learning:
            given = (bundle[key].detach() for bundle, key in learning)
            entered = Entry.apply(self._anchor, self._gradients.append, *given)
            for (bundle, key), entry in zip(learning, entered, strict=True):
                bundle[key] = remember_bits(entry, bits_of(bundle[key]))
        return [bundle_of(bundle) for bundle in bundles]

    def _backward_of(self, y: Bundle) -> Callable[[], None]:
        """Backward from ones; nothing without anything to learn up to here."""
        learning = _learning(y)
        return backward_of(learning, self._ones) if learning else _nothing

    def _ones(self) -> list[Tensor]:
        return [torch.ones_like(each, device=self._device) for each in self._learning]


def _learning(y: Bundle) -> list[Tensor]:
    return [each for each in entries_of(y).values() if each.requires_grad]


def _nothing() -> None:
    return


def _copied(x: Tensor) -> Tensor:
    bits = bits_of(x)
    copy = x.detach().clone().requires_grad_(x.requires_grad)
    return remember_bits(copy, None if bits is None else bits.clone())


def _with_messages(
    cost: LayerCost, output: Bundle, description: LayerDescription, wires: WireOptions, rounds: int
) -> LayerCost:
    """Adds the costs of handing the output to another stage."""
    for key, y in entries_of(output).items():
        descriptor = TensorDescriptor.of(y, description.entries[key].content)
        size, clock = descriptor.buffer(torch.device("meta")).nbytes, Clock(y.device)
        for _ in range(rounds):
            # Whether values fit is a question of training: here they are made up.
            with clock("pack"), DeviceChecks(y.device).collecting():
                message = message_of(y, descriptor)
            with clock("unpack"):
                descriptor.restore(message)
        width = (wires.gradient_dtype or y.dtype).itemsize if y.requires_grad else 0
        cost = replace(
            cost,
            message=cost.message + size,
            gradient=cost.gradient + y.numel() * width,
            pack=cost.pack + (clock.seconds("pack") or 0.0),
            unpack=cost.unpack + (clock.seconds("unpack") or 0.0),
        )
    return cost


class Clock:
    """Seconds of blocks by name."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._times: dict[str, list[float]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = self._now()
        yield
        self._times.setdefault(name, []).append(self._now() - start)

    def seconds(self, name: str) -> float | None:
        """Median of a block; None where it never ran."""
        return median(self._times[name]) if name in self._times else None

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
