"""Profile of a model's layers and links: seconds and bytes of each, in one pass from the first layer to the last.

Each layer runs by itself, as a chunk that begins and ends with it: once to warm up, once with its allocations counted,
and three times by the clock, of which the median counts. Layers that are built alike and take the same shapes are
profiled once. No more than one layer exists at a time. Values come from keyed generators: no random state moves.
"""

from __future__ import annotations

import os
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
from megasnn.parallel_state import Group, ParallelState, start_messages
from megasnn.pipeline.chunk import carrying_layers
from megasnn.pipeline.cost_model import LayerCost, LinkCost, PipelineCosts, crossing, for_samples
from megasnn.pipeline.microbatch_state import backward_of, enter_graph
from megasnn.pipeline.p2p import TensorSpec
from megasnn.recompute import Cache, recording, replaying
from megasnn.telemetry.allocations import AllocationCounter

ROUNDS = 3
TRIAL_SAMPLES = 1, 2
COUNTED_AS_THEY_ARE = 4
"""Samples of a micro-batch. Of few, other moments are the peak than of many: weights' gradients take most."""
MESSAGES = 8
SMALL, LARGE = 1 << 10, 1 << 22  # bytes


def profile_pipeline(
    model: ModelDescription, samples: int, context: BuildContext, state: ParallelState, repeats: bool = False
) -> PipelineCosts:
    """Costs for micro-batches of `samples` samples as the first rank measured them; the same on every rank.

    Ranks that used figures of their own would cut the model differently and wait for each other for ever. All of them
    measure nevertheless, at the same time: in training every core is at work. Collective over the world.

    Args:
        repeats: also measures forwards that are computed again.
    """
    world, link, replicas = state.world, LinkCost(), None
    if world.size > 1:
        dist.barrier(group=world.handle)  # who begins before the others would measure a quieter machine
    layers = profile_layers(model, samples, context, state.device, ROUNDS, repeats)
    if world.size > 1:
        dist.barrier(group=world.handle)
        if state.pp.size > 1:
            start_messages(state.pp, 0, 1, state.wire)
            link = measure_link(state.pp, state.wire)
        if context.dp_shard.size > 1:
            start_messages(context.dp_shard, 0, 1, state.wire)
            replicas = measure_link(context.dp_shard, state.wire)
    measured = [PipelineCosts(tuple(layers), link, replicas)]
    if world.size > 1:
        dist.broadcast_object_list(measured, src=0, group=world.handle)
    return measured[0]


def count_memory(
    model: ModelDescription, samples: int, context: BuildContext, device: torch.device, repeats: bool = False
) -> PipelineCosts:
    """Bytes of each layer for a micro-batch of `samples` samples; times are 0.

    Up to four samples are counted as they are; more with one sample and with two: each more needs as much more.
    """
    sizes = TRIAL_SAMPLES if samples > COUNTED_AS_THEY_ARE else (samples,)
    counted = [profile_layers(model, size, context, device, 0, repeats) for size in sizes]
    return PipelineCosts(tuple(for_samples(each, samples, sizes) for each in zip(*counted, strict=True)), LinkCost())


def profile_layers(
    model: ModelDescription,
    samples: int,
    context: BuildContext,
    device: torch.device,
    rounds: int = ROUNDS,
    repeats: bool = False,
) -> list[LayerCost]:
    """Costs of all layers for a micro-batch. Collective over the ranks that share one.

    Args:
        rounds: runs by the clock; 0: bytes only.
        repeats: also measures forwards that are computed again.
    """
    x = model.example_input(samples, torch.Generator().manual_seed(0))
    images = own_rows_of(frames_of(x.to(device, context.dtype), model.input_shape), context)
    outputs: dict[int, Bundle] = {INPUT: images}
    casts, tasks = CastWeights(), WeightGradients()
    layers: list[nn.Module | None] = list(model.build(replace(context, cast_weights=casts, weight_gradients=tasks)))
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
                trial = _Trial(layer, inputs, range(samples), INPUT in takes, tasks, device)
                cost = _with_messages(trial.cost(rounds, repeats), trial.output, description, rounds)
                cast = casts.held_bytes if context.dp_shard.size == 1 else 0  # weights are gathered as such
            known[kind] = replace(cost, cast=cast), trial.output
        cost, outputs[number] = known[kind]
        costs.append(cost)
        still_needed = model.needed_from(number + 1)
        outputs = {source: output for source, output in outputs.items() if source in still_needed}
    return crossing(model, costs)


def _structure(layer: nn.Module) -> Hashable:
    """Class, settings and tensors' shapes of every module in a layer: equal for layers that are built alike."""
    found: list[Hashable] = []
    for path, module in layer.named_modules():
        found.append((path, type(module)))
        for name, value in sorted(vars(module).items()):
            if not name.startswith("_") and name != "forward":  # which calls that of the class
                found.append((name, value if isinstance(value, Hashable) else repr(value)))
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            found.append((name, tensor.shape, tensor.dtype, tensor.requires_grad))
    return tuple(found)


class _Trial:
    """Runs of one layer.

    Args:
        is_first: it takes the model's input, of which no gradient is needed.
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
        counter, forward, backward = self._counted_forward()
        held = counter.held
        with counter.counting(), self._weight_gradients.deferred() as tasks:
            backward()
        gradient = sum(each.nbytes for each in self._learning)  # of the output, which is no work of the layer's
        inputs = counter.peak - held - gradient
        with counter.counting():
            self._gradients.clear()
        deferred = counter.held
        with counter.counting():
            _run(tasks)
        weights = counter.peak - deferred
        findings, again = (self._first_forward(), 0) if repeats else (deque(), None)
        parts = [part for each in findings for part in ([each] if isinstance(each, Tensor) else each)]
        found = sum(part.nbytes for part in parts)
        if repeats:  # the second forward does not fire the last neuron
            with recompute_mode([self._layer]), replaying(findings):
                again = self._counted_forward()[1]
        for _ in range(rounds):
            self._run_by_the_clock(repeats)
        seconds = self._clock.seconds
        return LayerCost(
            forward=seconds("forward") or 0.0,
            input_gradient=seconds("input_gradient") or 0.0,
            weight_gradient=seconds("weight_gradient") or 0.0,
            held=held,
            working=(forward, inputs, weights),
            parameters=sum(each.nbytes for each in self._layer.parameters()),
            collectives=self._traffic[0],
            exchanged=self._traffic[1],
            found=found,
            again=seconds("again"),
            working_again=again,
            deferred=deferred,
            output=sum(each.nbytes for each in entries_of(self.output).values()),
        )

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
        with self._clock("weight_gradient"):
            _run(tasks)
        if repeats:
            findings = self._first_forward()
            with self._clock("again"), recompute_mode([self._layer]), replaying(findings):
                self._forward(self._inputs)

    def _forget(self) -> None:
        """Lets neurons forget the state that the last run left."""
        for each in carrying_layers(self._layer):
            each.forget()

    def _forward(self, inputs: Sequence[Bundle]) -> Bundle:
        inputs = inputs if self._is_first else self._entered(inputs)
        return apply_layer(self._layer, inputs[0], self._samples, *inputs[1:])

    def _entered(self, inputs: Sequence[Bundle]) -> list[Bundle]:
        """Inputs as a chunk behind a boundary gets them."""
        bundles = [dict(entries_of(x)) for x in inputs]
        learning = [(bundle, key) for bundle in bundles for key, entry in bundle.items() if entry.requires_grad]
        if learning:
            entered = enter_graph(self._anchor, self._gradients.append, [bundle[key] for bundle, key in learning])
            for (bundle, key), entry in zip(learning, entered, strict=True):
                bundle[key] = entry
        return [bundle_of(bundle) for bundle in bundles]

    def _backward_of(self, y: Bundle) -> Callable[[], None]:
        """Backward from ones; nothing without anything to learn up to here."""
        learning = _learning(y)
        return backward_of(learning, self._ones) if learning else lambda: None

    def _ones(self) -> list[Tensor]:
        return [torch.ones_like(each, device=self._device) for each in self._learning]


def _run(tasks: list[Callable[[], None]]) -> None:
    tasks.reverse()
    while tasks:
        tasks.pop()()


def _learning(y: Bundle) -> list[Tensor]:
    return [each for each in entries_of(y).values() if each.requires_grad]


def _copied(x: Tensor) -> Tensor:
    bits = bits_of(x)
    copy = x.detach().clone().requires_grad_(x.requires_grad)
    return remember_bits(copy, None if bits is None else bits.clone())


def _with_messages(cost: LayerCost, output: Bundle, description: LayerDescription, rounds: int) -> LayerCost:
    """Adds the costs of handing the output to another stage."""
    for key, y in entries_of(output).items():
        spec = TensorSpec(tuple(y.shape), y.dtype, description.entries[key].content)
        clock = Clock(y.device)
        for _ in range(rounds):
            # Whether values fit is a question of training: here they are made up.
            with clock("pack"), DeviceChecks(y.device).collecting():
                message = spec.pack(y)
            with clock("unpack"):
                spec.unpack(message)
        cost = replace(
            cost,
            message=cost.message + spec.buffer(torch.device("meta")).nbytes,
            gradient=cost.gradient + y.nbytes * y.requires_grad,
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
        start = now(self._device)
        yield
        self._times.setdefault(name, []).append(now(self._device) - start)

    def seconds(self, name: str) -> float | None:
        """Median of a block; None where it never ran."""
        return median(self._times[name]) if name in self._times else None


def now(device: torch.device) -> float:
    """Seconds, when a device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def measure_link(group: Group, device: torch.device) -> LinkCost:
    """Cost of messages between the first two ranks of a group, stages or replicas; none on the others. Collective."""
    if group.rank > 1 or group.size == 1:
        return LinkCost()
    small, large = (torch.zeros(size, dtype=torch.uint8, device=device) for size in (SMALL, LARGE))
    times: list[list[float]] = [[], []]
    processor = []
    for _ in range(MESSAGES + 1):
        for message, found in zip((small, large), times, strict=True):
            start, used = now(device), time.process_time()
            _transfer(group, message, sends=group.rank == 0)
            _transfer(group, small, sends=group.rank != 0)
            found.append(now(device) - start)
        processor.append(time.process_time() - used)
    # What else the machine does lengthens some of them: the least of several, small and large by turns.
    least, most = (min(found[1:]) for found in times)
    per_byte = (most - least if most > least else most) / LARGE  # free bytes would be planned on
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    cores, busy = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, 0.0
    if device.type == "cpu" and ranks_here * torch.get_num_threads() >= cores:
        busy = min(median(processor[1:]) / LARGE, per_byte / 2)  # more would be threads that wait by spinning
    return LinkCost(least / 2, per_byte, busy, busy)


def _transfer(group: Group, tensor: Tensor, sends: bool) -> None:
    peer = group.ranks[1 - group.rank]
    work = (dist.isend if sends else dist.irecv)(tensor, peer, group=group.handle)
    assert work is not None
    work.wait()
