"""Profile of a model's layers and links: seconds and bytes of each, in one pass from the first layer to the last.

Each layer runs by itself, as a chunk that begins and ends with it: once to warm up, once with its allocations counted,
and three times by the clock, of which the median counts. Layers that are built alike and take the same shapes are
profiled once. No more than one layer exists at a time. Values come from keyed generators: no random state moves.
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
from megasnn.common.recompute import Cache, recording
from megasnn.kernels.spike_codec import bits_of, remember_bits
from megasnn.layers.context import BuildContext
from megasnn.layers.weight_grad import CastWeights, WeightGradients
from megasnn.models.description import ModelDescription
from megasnn.parallel.agreement import broadcast_result
from megasnn.parallel.collectives import traffic
from megasnn.parallel.sharding import materialise
from megasnn.parallel_state import Group, ParallelState, start_messages
from megasnn.pipeline.chunk import PipelineChunk
from megasnn.pipeline.cost_model import TIMED, LayerCost, LinkCost, PipelineCosts, for_samples
from megasnn.pipeline.microbatch_state import MicroBatchInput, StepState
from megasnn.pipeline.p2p import TensorSpec

ROUNDS = 3
TRIAL_SAMPLES = 1, 2
COUNTED_AS_THEY_ARE = 4
"""Samples of a micro-batch. Of few, other moments are the peak than of many: weights' gradients take most."""
MESSAGES = 8
SMALL, LARGE = 1 << 10, 1 << 22  # bytes


def profile_pipeline(
    description: ModelDescription, samples: int, context: BuildContext, state: ParallelState
) -> PipelineCosts:
    """Costs for micro-batches of `samples` samples as the first rank measured them; the same on every rank.

    Ranks that used figures of their own would cut the model differently and wait for each other for ever. All of them
    measure nevertheless, at the same time: in training every core is at work. Collective over the world.
    """
    world, link = state.world, LinkCost()
    if world.size > 1:
        dist.barrier(group=world.handle)  # who begins before the others would measure a quieter machine
    layers = profile_layers(description, samples, context, state.device)
    if world.size > 1:
        dist.barrier(group=world.handle)
    group = state.pp if state.pp.size > 1 else context.dp_shard
    if group.size > 1:
        start_messages(group, 0, 1, state.device)
        link = measure_link(group, state.device)
    return broadcast_result(world.handle, lambda: PipelineCosts(tuple(layers), link))


def count_memory(
    description: ModelDescription, samples: int, context: BuildContext, device: torch.device
) -> PipelineCosts:
    """Bytes of each layer for a micro-batch of `samples` samples; times are 0.

    Up to four samples are counted as they are; more with one sample and with two: each more needs as much more.
    """
    sizes = TRIAL_SAMPLES if samples > COUNTED_AS_THEY_ARE else (samples,)
    counted = [profile_layers(description, size, context, device, rounds=0) for size in sizes]
    return PipelineCosts(tuple(for_samples(each, samples, sizes) for each in zip(*counted, strict=True)), LinkCost())


def profile_layers(
    description: ModelDescription, samples: int, context: BuildContext, device: torch.device, rounds: int = ROUNDS
) -> list[LayerCost]:
    """Costs of all layers for a micro-batch. Collective over the ranks that share one.

    Args:
        rounds: runs by the clock; 0: bytes only.
    """
    inputs = {name: x.to(device) for name, x in description.task.examples(samples, context.dtype).items()}
    micro = MicroBatchInput(inputs, None, samples, range(samples))
    casts, bounds = CastWeights(), [range(number, number + 1) for number in range(len(description.layers))]
    built = replace(context, cast_weights=casts, weight_gradients=WeightGradients())
    layers: list[nn.Module | None] = [each.module for each in description.build(built)]
    known: dict[Hashable, tuple[LayerCost, list[Tensor]]] = {}
    entering, costs = list[Tensor](), list[LayerCost]()
    for number in range(len(layers)):
        layer, layers[number] = layers[number], None  # its memory is free when it has been profiled
        assert layer is not None
        chunk = PipelineChunk(description, bounds, number, [layer], built)
        shapes = tuple((x.shape, x.requires_grad) for x in entering)
        carried = tuple((each.layer - number, each.key, each.content) for each in (*chunk.receives, *chunk.hands_on))
        kind = (_structure(layer), shapes, carried, chunk.is_last)
        if kind not in known:
            materialise([(description.layers[number].name, layer)], device, seed=0)
            with casts.caching():  # as in a step, which makes each copy once
                trial = _Trial(chunk, micro, entering, device)
                cost = trial.cost(rounds)
                cast = casts.resident_bytes if context.dp_shard.size == 1 else 0  # weights are gathered as such
            known[kind] = replace(cost, cast=cast), trial.output
        cost, entering = known[kind]
        costs.append(cost)
    return costs


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
    """Runs of a chunk of one layer.

    Args:
        entering: what it receives; the first one takes the images of the micro-batch.
    Attributes:
        output: what it hands on, with its bits where it knows them.
    """

    def __init__(
        self, chunk: PipelineChunk, micro: MicroBatchInput, entering: Sequence[Tensor], device: torch.device
    ) -> None:
        self._chunk, self._micro, self._entering, self._device = chunk, micro, entering, device
        self._key = chunk.index, 0
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        before, collected = traffic.total(), Cache()
        # The first run pays for compiling and for the gradients' memory. What is left of it goes while something else
        # is counted: torch warns of memory not seen taken.
        with AllocationCounter(device).counting(), traffic.counting():
            self._pass(lambda part: recording(collected) if part == "forward" else nullcontext())
        after = traffic.total()
        self._traffic = after.calls - before.calls, after.bytes - before.bytes
        parts = (part for each in collected for part in ([each] if isinstance(each, Tensor) else each))
        self._found = sum(part.nbytes for part in parts if part is not None)

    def cost(self, rounds: int) -> LayerCost:
        """Costs of the layer, and of the boundary behind it. Args: rounds: as of `profile_layers`."""
        counter, counted = AllocationCounter(self._device), dict[str, tuple[int, int]]()

        @contextmanager
        def count(part: str) -> Iterator[None]:
            before = counter.allocated
            with counter.counting():
                yield
            counted[part] = counter.peak - before, counter.allocated

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
        carried, meta = zip(self.output, self._chunk.hands_on, strict=True), torch.device("meta")
        messages = (TensorSpec(tuple(y.shape), y.dtype, each.content).buffer(meta) for y, each in carried)
        gradient = sum(each.nbytes for each in self.output if each.requires_grad)
        return LayerCost(
            forward,
            inputs,
            weights,
            held=counted["kept"][1],
            # The gradient of the output is no work of the layer's.
            working=(counted["forward"][0], counted["input_gradient"][0] - gradient, counted["weight_gradient"][0]),
            message=sum(each.nbytes for each in messages),
            gradient=gradient,
            output=sum(each.nbytes for each in self.output),
            deferred=counted["deferred"][1],
            collectives=self._traffic[0],
            exchanged=self._traffic[1],
            found=self._found,
        )

    def _pass(self, inside: Callable[[str], AbstractContextManager[None]]) -> None:
        """Forward and backward of a micro-batch. Args: inside: surrounds each part of it."""
        run, key = StepState([self._micro], self._anchor), self._key
        with inside("inputs"):  # they come in, but images lie in the batch
            run.inputs[key] = [_copied(x) for x in self._entering]
        with inside("forward"):
            y = self._forward(run)
        self.output = [_copied(each) for each in y]
        with inside("kept"):
            run.await_gradients(key, y)
            y.clear()
        with inside("input_gradient"), self._chunk.weight_gradients.deferred() as tasks:
            run.gradients[key] = [torch.ones_like(each) for each in self.output if each.requires_grad]
            run.backward(key)
        with inside("deferred"):
            run.gradients.clear()
        with inside("weight_gradient"):
            while tasks:
                tasks.popleft()()

    def _forward(self, run: StepState) -> list[Tensor]:
        chunk = self._chunk
        y = chunk(self._micro.inputs if chunk.is_first else run.entered(self._key), self._micro.samples)
        if not chunk.is_last:
            return [*y]
        entries = entries_of(y)
        return [entries[each.key] for each in chunk.hands_on]


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
    (dist.send if sends else dist.recv)(tensor, group.ranks[1 - group.rank], group=group.handle)
