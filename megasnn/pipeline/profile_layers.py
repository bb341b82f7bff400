"""Profiles a model's layers and links in one pass: seconds and bytes.

Each layer runs as its own chunk: one warm-up, one run to count allocations, three for median seconds. Equal layers
with equal inputs are profiled once. One layer exists at a time. Keyed generators leave torch's random state alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megasnn.common.bundle import entries_of
from megasnn.common.memory import AllocationCounter
from megasnn.common.recompute import Cache, recording_collectives
from megasnn.kernels.spike_codec import share_bits
from megasnn.layers.context import BuildContext
from megasnn.layers.tensors import materialise
from megasnn.layers.token_context import own_tokens
from megasnn.layers.weight_grad import CastWeights, WeightGradients
from megasnn.models.description import ModelDescription
from megasnn.parallel.agreement import broadcast_result
from megasnn.parallel.traffic import traffic
from megasnn.parallel_state import Group, start_messages
from megasnn.pipeline.chunk import PipelineChunk
from megasnn.pipeline.cost_model import TIMED, LayerCost, LinkCost, PipelineCosts, for_samples
from megasnn.pipeline.microbatch_state import MicroBatchInput, StepState
from megasnn.pipeline.p2p import TensorSpec

ROUNDS = 3
TRIAL_SAMPLES = 1, 2
COUNTED_AS_THEY_ARE = 4
"""Largest micro-batch that is counted as it is. Small ones peak at other moments: weight gradients dominate."""
MESSAGES = 8
SMALL, LARGE = 1 << 10, 1 << 22  # bytes


def profile_pipeline(description: ModelDescription, samples: int, context: BuildContext) -> PipelineCosts:
    """Measures layers and link. The first rank's costs count on every rank. Collective over the world."""
    state = context.state
    world = state.world
    if world.size > 1:
        # A rank that begins early would measure a quieter machine.
        dist.barrier(group=world.handle)
    # All ranks at the same time: all cores are busy in training, too.
    layers = profile_layers(description, samples, context, state.device)
    if world.size > 1:
        dist.barrier(group=world.handle)
    link = LinkCost()
    group = state.pp if state.pp.size > 1 else state.dp_shard
    if group.size > 1:
        start_messages(group, 0, 1, state.device)
        link = measure_link(group, state.device)
    # With different costs, ranks would cut the model differently and wait for each other for ever.
    return broadcast_result(world.handle, lambda: PipelineCosts(tuple(layers), link))


def count_memory(
    description: ModelDescription, samples: int, context: BuildContext, device: torch.device
) -> PipelineCosts:
    """Counts bytes only; times are 0. Above four samples, extrapolates from one and two."""
    sizes = TRIAL_SAMPLES if samples > COUNTED_AS_THEY_ARE else (samples,)
    counted = [profile_layers(description, size, context, device, rounds=0) for size in sizes]
    layers = [for_samples(each, samples, sizes) for each in zip(*counted, strict=True)]
    return PipelineCosts(tuple(layers), LinkCost())


def profile_layers(
    description: ModelDescription, samples: int, context: BuildContext, device: torch.device, rounds: int = ROUNDS
) -> list[LayerCost]:
    """All layers' costs. Collective over tensor- and context-parallel ranks.

    Args:
        rounds: timed runs; 0 for bytes only.
    """
    inputs = {name: x.to(device) for name, x in description.task.examples(samples, context.numerics.dtype).items()}
    targets = description.task.example_targets(samples, context.numerics.dtype).to(device)
    if context.token_group is not None:
        targets = own_tokens(targets, context.token_group)
    micro = MicroBatchInput(inputs, targets, samples, range(samples))
    bounds = [range(number, number + 1) for number in range(len(description.layers))]
    casts = CastWeights()
    own_context = replace(context, cast_weights=casts, weight_gradients=WeightGradients())
    layers: list[nn.Module | None] = [each.module for each in description.build(own_context)]
    known: dict[Hashable, tuple[LayerCost, list[Tensor]]] = {}
    entering = list[Tensor]()
    costs = list[LayerCost]()
    for number, layer in enumerate(layers):
        assert layer is not None
        # The list lets go of the layer, so that its memory is free after its profile.
        layers[number] = None
        chunk = PipelineChunk(description, bounds, number, [layer], own_context)
        kind = _kind(chunk, layer, number, entering)
        if kind not in known:
            materialise([(description.layers[number].name, layer)], device, seed=0)
            # As in a step, which casts each weight once.
            with casts.caching():
                trial = _Trial(chunk, micro, entering, device)
                cost = trial.cost(rounds)
                # Sharded weights are gathered in the type of the products, so they need no cast.
                if context.state.dp_shard.size == 1:
                    cost = replace(cost, cast=casts.resident_bytes)
            casts.free()
            known[kind] = cost, trial.output
        cost, entering = known[kind]
        costs.append(cost)
    return costs


def _kind(chunk: PipelineChunk, layer: nn.Module, number: int, entering: Sequence[Tensor]) -> Hashable:
    """Equal for layers with equal costs."""
    shapes = tuple((x.shape, x.requires_grad) for x in entering)
    boundaries = (*chunk.receives, *chunk.hands_on)
    carried = tuple((each.layer - number, each.key, each.content) for each in boundaries)
    return _structure(layer), shapes, carried, chunk.is_last


def _structure(layer: nn.Module) -> Hashable:
    found: list[Hashable] = []
    for path, module in layer.named_modules():
        found.append((path, type(module)))
        for name, value in sorted(vars(module).items()):
            # A converted layer has a `forward` of its own, which calls that of its class.
            if not name.startswith("_") and name != "forward":
                found.append((name, value if isinstance(value, Hashable) else repr(value)))
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            found.append((name, tensor.shape, tensor.dtype, tensor.requires_grad))
    return tuple(found)


class _Trial:
    """Trial runs of a one-layer chunk.

    Args:
        entering: received tensors; the first chunk uses the micro-batch.
    """

    def __init__(
        self, chunk: PipelineChunk, micro: MicroBatchInput, entering: Sequence[Tensor], device: torch.device
    ) -> None:
        self._chunk = chunk
        self._micro = micro
        self._entering = entering
        self._device = device
        self._key = chunk.index, 0
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        before = traffic.total()
        cache = Cache()
        # The first run compiles kernels and allocates gradients. It is counted as well, because its tensors are freed
        # while a later run counts, and torch warns of freed memory that was never counted.
        with AllocationCounter(device).counting(), traffic.counting():
            self._pass(lambda part: recording_collectives(cache) if part == "forward" else nullcontext())
        after = traffic.total()
        self._collectives = after.calls - before.calls
        self._exchanged = after.bytes - before.bytes
        self._found = 0
        for result in cache:
            parts = [result] if isinstance(result, Tensor) else result
            self._found += sum(part.nbytes for part in parts if part is not None)

    def cost(self, rounds: int) -> LayerCost:
        """Layer and the boundary after it. `rounds` as in `profile_layers`."""
        peaks, resident = self._memory()
        forward, input_gradient, weight_gradient = self._seconds(rounds)
        gradient = sum(each.nbytes for each in self.output if each.requires_grad)
        message = 0
        for y, carried in zip(self.output, self._chunk.hands_on, strict=True):
            spec = TensorSpec(tuple(y.shape), y.dtype, carried.content)
            message += spec.buffer(torch.device("meta")).nbytes
        return LayerCost(
            forward,
            input_gradient,
            weight_gradient,
            held=resident["saved"],
            # The next layer makes the output gradient.
            working=(peaks["forward"], peaks["input_gradient"] - gradient, peaks["weight_gradient"]),
            message=message,
            gradient=gradient,
            output=sum(each.nbytes for each in self.output),
            deferred=resident["deferred"],
            collectives=self._collectives,
            exchanged=self._exchanged,
            found=self._found,
        )

    def _memory(self) -> tuple[dict[str, int], dict[str, int]]:
        """For each part: peak bytes above the bytes before it, and bytes after."""
        counter = AllocationCounter(self._device)
        peaks = dict[str, int]()
        resident = dict[str, int]()

        @contextmanager
        def count(part: str) -> Iterator[None]:
            before = counter.allocated
            with counter.counting():
                yield
            peaks[part] = counter.peak - before
            resident[part] = counter.allocated

        self._pass(count)
        return peaks, resident

    def _seconds(self, rounds: int) -> list[float]:
        times: dict[str, list[float]] = {part: [] for part in TIMED}

        @contextmanager
        def clock(part: str) -> Iterator[None]:
            start = now(self._device)
            yield
            if part in times:
                times[part].append(now(self._device) - start)

        for _ in range(rounds):
            self._pass(clock)
        return [median(seconds) if seconds else 0.0 for seconds in times.values()]

    def _pass(self, inside: Callable[[str], AbstractContextManager[None]]) -> None:
        """Forward and backward. `inside` makes a context for each named part."""
        run = StepState(self._anchor)
        run.reset([self._micro])
        key = self._key
        # Received tensors take memory, but images lie in the batch.
        with inside("inputs"):
            run.inputs[key] = [_copied(x) for x in self._entering]
        with inside("forward"):
            y = self._forward(run)
        self.output = [_copied(each) for each in y]
        with inside("saved"):
            run.await_gradients(key, y)
            y.clear()
        with inside("input_gradient"), self._chunk.weight_gradients.deferring() as tasks:
            run.gradients[key] = [torch.ones_like(each) for each in self.output if each.requires_grad]
            run.backward(key)
        with inside("deferred"):
            run.gradients.clear()
        with inside("weight_gradient"), torch.no_grad():
            while tasks:
                tasks.popleft()()

    def _forward(self, run: StepState) -> list[Tensor]:
        chunk = self._chunk
        y = chunk(run.take_inputs(self._key), self._micro.samples, targets=self._micro.targets)
        if not chunk.is_last:
            return [*y]
        entries = entries_of(y)
        return [entries[each.key] for each in chunk.hands_on]


def _copied(x: Tensor) -> Tensor:
    return share_bits(x, x.detach().clone().requires_grad_(x.requires_grad), own_memory=True)


def now(device: torch.device) -> float:
    """Seconds, after the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def measure_link(group: Group, device: torch.device) -> LinkCost:
    """Times messages between a group's first two ranks; other ranks return zeros. Collective."""
    if group.rank > 1 or group.size == 1:
        return LinkCost()
    small = torch.zeros(SMALL, dtype=torch.uint8, device=device)
    large = torch.zeros(LARGE, dtype=torch.uint8, device=device)
    times: dict[Tensor, list[float]] = {small: [], large: []}
    # Small and large by turns, because other programs slow the machine down for a while.
    for _ in range(MESSAGES + 1):
        for message, seconds in times.items():
            start = now(device)
            _transfer(group, message, sends=group.rank == 0)
            _transfer(group, small, sends=group.rank != 0)
            seconds.append(now(device) - start)
    # The minimum, without the first message, which makes the connection.
    of_small = min(times[small][1:])
    of_large = min(times[large][1:])
    # Never zero: the planner would use a free link without limit.
    per_byte = (of_large - of_small if of_large > of_small else of_large) / LARGE
    return LinkCost(of_small / 2, per_byte)


def _transfer(group: Group, tensor: Tensor, sends: bool) -> None:
    peer = group.ranks[1 - group.rank]
    if sends:
        dist.send(tensor, peer, group=group.handle)
    else:
        dist.recv(tensor, peer, group=group.handle)
