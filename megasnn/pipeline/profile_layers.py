"""Profile of a model's layers and links: seconds and bytes of each, in one pass from the first layer to the last.

Each layer runs by itself, as a chunk that begins and ends with it: once to warm up, once with its allocations counted,
and three times by the clock, of which the median counts. Layers that are built alike and take the same shapes are
profiled once. No more than one layer exists at a time. Values come from keyed generators: no random state moves.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from megasnn.bundle import Bundle, bundle_of, entries_of, map_entries
from megasnn.kernels.spike_codec import bits_of, remember_bits
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
from megasnn.recompute import Cache, recording
from megasnn.telemetry.allocations import AllocationCounter

ROUNDS = 3
TIMED = "forward", "input_gradient", "weight_gradient"
TRIAL_SAMPLES = 1, 2
COUNTED_AS_THEY_ARE = 4
"""Samples of a micro-batch. Of few, other moments are the peak than of many: weights' gradients take most."""
MESSAGES = 8
SMALL, LARGE = 1 << 10, 1 << 22  # bytes


def profile_pipeline(
    model: ModelDescription, samples: int, context: BuildContext, state: ParallelState
) -> PipelineCosts:
    """Costs for micro-batches of `samples` samples as the first rank measured them; the same on every rank.

    Ranks that used figures of their own would cut the model differently and wait for each other for ever. All of them
    measure nevertheless, at the same time: in training every core is at work. Collective over the world.
    """
    world, link = state.world, LinkCost()
    if world.size > 1:
        dist.barrier(group=world.handle)  # who begins before the others would measure a quieter machine
    layers = profile_layers(model, samples, context, state.device)
    if world.size > 1:
        dist.barrier(group=world.handle)
    group = state.pp if state.pp.size > 1 else context.dp_shard
    if group.size > 1:
        start_messages(group, 0, 1, state.wire)
        link = measure_link(group, state.wire)
    measured = [PipelineCosts(tuple(layers), link)]
    if world.size > 1:
        dist.broadcast_object_list(measured, src=0, group=world.handle)
    return measured[0]


def count_memory(model: ModelDescription, samples: int, context: BuildContext, device: torch.device) -> PipelineCosts:
    """Bytes of each layer for a micro-batch of `samples` samples; times are 0.

    Up to four samples are counted as they are; more with one sample and with two: each more needs as much more.
    """
    sizes = TRIAL_SAMPLES if samples > COUNTED_AS_THEY_ARE else (samples,)
    counted = [profile_layers(model, size, context, device, rounds=0) for size in sizes]
    return PipelineCosts(tuple(for_samples(each, samples, sizes) for each in zip(*counted, strict=True)), LinkCost())


def profile_layers(
    model: ModelDescription, samples: int, context: BuildContext, device: torch.device, rounds: int = ROUNDS
) -> list[LayerCost]:
    """Costs of all layers for a micro-batch. Collective over the ranks that share one.

    Args:
        rounds: runs by the clock; 0: bytes only.
    """
    x = model.example_input(samples, torch.Generator().manual_seed(0))
    images = own_rows_of(frames_of(x.to(device, context.dtype), model.input_shape), context)
    outputs: dict[int, Bundle] = {INPUT: images}
    casts, tasks = CastWeights(), WeightGradients()
    context = replace(context, cast_weights=casts, weight_gradients=tasks)
    layers: list[nn.Module | None] = [each.module for each in model.build(context)]
    known: dict[Hashable, tuple[LayerCost, Bundle]] = {}
    costs: list[LayerCost] = []
    quiet = True if rounds == 0 or (dist.is_initialized() and dist.get_rank() > 0) else None  # None: on a terminal
    for number in tqdm(range(len(layers)), desc="measuring layers", leave=False, disable=quiet):
        description, takes = model.layers[number], model.inputs[number]
        inputs = [outputs[source] for source in takes]
        layer, layers[number] = layers[number], None  # its memory is free when it has been profiled
        assert layer is not None
        shapes = [(key, x.shape, x.requires_grad) for each in inputs for key, x in entries_of(each).items()]
        kind = (_structure(layer), str(description.entries), tuple(shapes), INPUT in takes)
        if kind not in known:
            materialise([(description.name, layer)], device, seed=0)
            with casts.kept():  # as in a step, which makes each copy once
                trial = _Trial(layer, inputs, range(samples), INPUT in takes, tasks, device)
                cost = trial.cost(rounds, description)
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
        self._weight_gradients, self._device = weight_gradients, device
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._gradients: list[Sequence[Tensor]] = []  # of the inputs
        before = statistics.total()
        # The first run pays for compiling and for the gradients' memory. What is left of it goes while something else
        # is counted: torch warns of memory not seen taken.
        with AllocationCounter(device).counting(), statistics.counting():
            self._pass(lambda part: nullcontext())
        after = statistics.total()
        self._traffic = after.calls - before.calls, after.bytes - before.bytes

    def cost(self, rounds: int, description: LayerDescription) -> LayerCost:
        """Costs of the layer, and of its messages to another stage. Args: rounds: as of `profile_layers`."""
        counter, counted = AllocationCounter(self._device), dict[str, tuple[int, int]]()

        @contextmanager
        def count(part: str) -> Iterator[None]:
            before = counter.held
            with counter.counting():
                yield
            counted[part] = counter.peak - before, counter.held

        self._pass(count)
        times = dict[str, list[float]]()

        @contextmanager
        def clock(part: str) -> Iterator[None]:
            start = now(self._device)
            yield
            times.setdefault(part, []).append(now(self._device) - start)

        for _ in range(rounds):
            self._pass(clock)
        forward, inputs, weights = (median(times[part]) if rounds else 0.0 for part in TIMED)
        entries, message = entries_of(self.output), 0
        for key, y in entries.items():
            spec = TensorSpec(tuple(y.shape), y.dtype, description.entries[key].content)
            message += spec.buffer(torch.device("meta")).nbytes
        gradient = sum(each.nbytes for each in self._learning)
        return LayerCost(
            forward,
            inputs,
            weights,
            held=counted["kept"][1],
            # The gradient of the output is no work of the layer's.
            working=(counted["forward"][0], counted["input_gradient"][0] - gradient, counted["weight_gradient"][0]),
            message=message,
            gradient=gradient,
            output=sum(each.nbytes for each in entries.values()),
            deferred=counted["deferred"][1],
            parameters=sum(each.nbytes for each in self._layer.parameters()),
            collectives=self._traffic[0],
            exchanged=self._traffic[1],
            found=self._found(),
        )

    def _pass(self, inside: Callable[[str], AbstractContextManager[None]]) -> None:
        """Forward and backward of a micro-batch. Args: inside: surrounds each part of it."""
        self._forget()
        with inside("inputs"):  # they come in, but images lie in the batch
            given = [x if self._is_first else map_entries(_copied, x) for x in self._inputs]
        with inside("forward"):
            y = [self._forward(given)]
        self.output = map_entries(_copied, y[0])
        self._learning = [torch.empty_like(each, device="meta") for each in _learning(y[0])]
        with inside("kept"):
            backward = self._backward_of(y.pop())
            given.clear()
        with inside("input_gradient"), self._weight_gradients.deferred() as tasks:
            backward()
        with inside("deferred"):
            self._gradients.clear()
        tasks.reverse()
        with inside("weight_gradient"):
            while tasks:
                tasks.pop()()

    def _found(self) -> int:
        """Bytes that a forward keeps beside its input where it is computed again."""
        findings: Cache = deque()
        self._forget()
        with recording(findings):
            self._forward(self._inputs)
        parts = (part for each in findings for part in ([each] if isinstance(each, Tensor) else each))
        return sum(part.nbytes for part in parts)

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


def _learning(y: Bundle) -> list[Tensor]:
    return [each for each in entries_of(y).values() if each.requires_grad]


def _copied(x: Tensor) -> Tensor:
    bits = bits_of(x)
    copy = x.detach().clone().requires_grad_(x.requires_grad)
    return remember_bits(copy, None if bits is None else bits.clone())


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
    for _ in range(MESSAGES + 1):
        for message, found in zip((small, large), times, strict=True):
            start = now(device)
            _transfer(group, message, sends=group.rank == 0)
            _transfer(group, small, sends=group.rank != 0)
            found.append(now(device) - start)
    # What else the machine does lengthens some of them: the least of several, small and large by turns.
    least, most = (min(found[1:]) for found in times)
    per_byte = (most - least if most > least else most) / LARGE  # free bytes would be planned on
    return LinkCost(least / 2, per_byte)


def _transfer(group: Group, tensor: Tensor, sends: bool) -> None:
    peer = group.ranks[1 - group.rank]
    work = (dist.isend if sends else dist.irecv)(tensor, peer, group=group.handle)
    assert work is not None
    work.wait()
