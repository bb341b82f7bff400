"""A chunk's CUDA graphs: forward, input gradients and weight gradients.

A graph computes at fixed addresses, with fixed host numbers. Therefore:

- Micro-batches in flight have slots, and every slot has its own graphs.
- Inputs and output gradients are copied in. Outputs and input gradients are copied out: a message may still be under
  way when the slot is reused.
- Exchanges between ranks are part of a graph. Ranks that share layers or micro-batches replay the same graphs in the
  same order, as NCCL demands. Their communicators were started before.
- Each replay copies out norm statistics and check findings. Sample positions, the random numbers' key, are written
  before it. Graphs add parameter gradients, reported after a replay.

A size's first training step compiles and selects kernels without graphs. The second one captures them. All outputs,
gradients and saved tensors stay in memory, for every slot.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from megasnn.common.bundle import entries_of, map_entries
from megasnn.common.checks import DeviceChecks, check_value
from megasnn.kernels.spike_codec import share_bits
from megasnn.layers.dropout import drawing_for
from megasnn.layers.norm import ParallelBatchNorm
from megasnn.layers.weight_grad import WeightGradients
from megasnn.parallel.traffic import traffic

KNOWN = ("megasnn", "torch")
"""Packages whose modules depend on no state of Python that a graph would not see."""

Run = Callable[[list[Tensor], range | None], Any]
"""Computes a chunk from its inputs, a list that it empties, and the positions of the samples."""


class Capture(Protocol):
    """Maker of graphs in memory pools.

    A later capture may reuse memory freed by an earlier one in the same pool. So graphs in one pool are replayed in
    capture order, or keep no tensors there.
    """

    def pool(self) -> Any: ...

    def __call__(self, work: Callable[[], None], pool: Any) -> Callable[[], None]:
        """Captures the kernels without running them. Returns a function that runs them."""


class CudaCapture:
    """Captures on its own stream: the driver cannot capture the default stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def pool(self) -> Any:
        # The allocator's cache is not available to a pool.
        torch.cuda.empty_cache()
        return torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None], pool: Any) -> Callable[[], None]:
        # `torch.cuda.graph` would first wait for the device, which may wait for a message that never comes.
        graph = torch.cuda.CUDAGraph()
        was_enabled = gc.isenabled()
        # A graph that is freed during a capture would invalidate the capture.
        gc.disable()
        try:
            with torch.cuda.stream(self._stream):
                # Other threads (NCCL's, autograd's allocations) go on calling the driver.
                graph.capture_begin(pool, capture_error_mode="thread_local")
                work()
                graph.capture_end()
        finally:
            if was_enabled:
                gc.enable()
        return graph.replay


class ChunkGraphs:
    """A chunk's graphs, and its micro-batches' slots.

    Args:
        chunk: all modules in the graphs.
    """

    def __init__(self, chunk: nn.Module, run: Run, weight_gradients: WeightGradients, capture: Capture) -> None:
        self.chunk = chunk
        self.run = run
        self.weight_gradients = weight_gradients
        self.capture = capture
        # A leaf that makes the outputs of a replay part of autograd's graph.
        self.anchor = torch.zeros((), requires_grad=True)
        # Weight gradients keep no tensors in their pool, so their graphs replay in any order.
        self.weight_pool = self.capture.pool()
        # One pool for each slot, because a slot's backward replays after its forward.
        self._pools: list[Any] = []
        self._graphs = dict[Any, _SlotGraphs]()
        self._addresses = list[int]()
        self._is_on = False
        self._slots = dict[int, int]()
        self._sizes: Sequence[int] = ()

    def begin(self, is_on: bool, sizes: Sequence[int]) -> None:
        """Begins a training step. Raises RuntimeError for layers with moved tensors.

        Args:
            sizes: samples in each micro-batch, on all ranks that share it.
        """
        self._is_on = is_on
        self._sizes = sizes
        self._slots = {}
        addresses = []
        for tensor in (*self.chunk.parameters(), *self.chunk.buffers()):
            addresses.append(tensor.data_ptr())
            if tensor.grad is not None:
                addresses.append(tensor.grad.data_ptr())
        if self._graphs and addresses != self._addresses:
            raise RuntimeError(
                "weights, buffers or gradients were moved in memory after CUDA graphs were made of their layers: write "
                "into them instead, or use --cuda-graphs off"
            )
        self._addresses = addresses

    def has(self, micro_batch: int) -> bool:
        """Whether the micro-batch's forward runs as a graph. Assigns a slot to it."""
        if not self._is_on:
            return False
        used = self._slots.values()
        self._slots[micro_batch] = next(slot for slot in range(len(used) + 1) if slot not in used)
        if len(self._pools) < len(self._slots):
            self._pools.append(self.capture.pool())
        return True

    def done(self, micro_batch: int) -> None:
        """Frees the slot, after the backward's last part."""
        self._slots.pop(micro_batch, None)

    def apply(self, inputs: Sequence[Tensor], samples: range | None, micro_batch: int) -> Any:
        """Forward, after a capture for a new slot. Raises RuntimeError for an impossible capture."""
        slot = self._slots[micro_batch]
        # With the size on all ranks: NCCL wants the ranks of a collective to replay graphs of the same capture.
        size = self._sizes[micro_batch]
        key = slot, size, tuple((x.shape, x.stride(), x.dtype, x.requires_grad) for x in inputs)
        if key not in self._graphs:
            self._graphs[key] = _SlotGraphs(self, inputs, samples, self._pools[slot])
        return self._graphs[key].apply(inputs, samples)

    def captured(self, work: Callable[[], None], pool: Any, work_name: str) -> Callable[[], None]:
        """Raises RuntimeError with the work's name and the reason."""
        try:
            with traffic.separate() as moved:
                replay = self.capture(work, pool)
        except Exception as error:
            # The first line only: torch appends advice about CUDA errors in general.
            lines = str(error).splitlines() or [""]
            kind = type(error).__name__
            raise RuntimeError(f"{work_name} cannot be captured ({kind}: {lines[0]}); use --cuda-graphs off") from error

        def replayed() -> None:
            replay()
            traffic.add(moved)

        return replayed if moved else replay


class _SlotGraphs:
    """One slot's graphs. `outputs` have fixed addresses, and the autograd graph for capturing backward."""

    def __init__(self, owner: ChunkGraphs, inputs: Sequence[Tensor], samples: range | None, pool: Any) -> None:
        self._owner = owner
        self._pool = pool
        self._positions: Tensor | None = None
        if samples is not None:
            self._positions = torch.arange(len(samples), device=inputs[0].device)
        self._leaves: dict[nn.Parameter, Tensor] = {}
        for parameter in owner.chunk.parameters():
            if parameter.requires_grad:
                leaf: Tensor = parameter
                if not owner.weight_gradients.takes(parameter):
                    # Autograd adds a gradient on the stream where the parameter was first used. A forward without
                    # graphs still under way would draw its stream into the capture, which the driver refuses.
                    leaf = parameter.detach().requires_grad_()
                self._leaves[parameter] = leaf
        # Zeros: other memory may hold tokens outside the vocabulary while graphs are made.
        self._inputs = [torch.zeros_like(x).requires_grad_(x.requires_grad) for x in inputs]
        self._output_grads: list[Tensor | None] | None = None
        self._replay = owner.captured(lambda: self._forward(samples), pool, "forward")

    def _forward(self, samples: range | None) -> None:
        chunk = self._owner.chunk
        checks = DeviceChecks(self._inputs[0].device)
        earlier_records: dict[ParallelBatchNorm, int] = {}
        for module in chunk.modules():
            if isinstance(module, ParallelBatchNorm):
                earlier_records[module] = len(module.pending)
        leaves = {}
        for name, parameter in chunk.named_parameters():
            if parameter in self._leaves:
                leaves[f"chunk.{name}"] = self._leaves[parameter]
        with checks.collecting(), drawing_for(self._positions):
            self._output = functional_call(_Applied(chunk, self._owner.run), leaves, ([*self._inputs], samples))
        output = self._output
        self.outputs = output if isinstance(output, list) else [*entries_of(output).values()]
        # The records of the capture hold no values; each replay records a copy.
        self._norms: list[tuple[ParallelBatchNorm, int | Tensor]] = []
        statistics: list[Tensor] = []
        for norm, start in earlier_records.items():
            for mean, variance, count in norm.pending[start:]:
                self._norms.append((norm, count))
                statistics += [mean, variance]
            del norm.pending[start:]
        flags: list[Tensor] = []
        self._complaints: list[str] = []
        for flag, text in checks.noted():
            flags.append(flag)
            self._complaints.append(text)
        # One tensor for all flags, and one for all statistics: a replay copies each with one kernel.
        self._flags = _joined(flags)
        self._statistics = _joined(statistics)
        self._sizes = [value.numel() for value in statistics]

    def apply(self, inputs: Sequence[Tensor], samples: range | None) -> Any:
        _fill(self._inputs, inputs)
        if self._positions is not None and samples is not None:
            torch.arange(samples.start, samples.stop, out=self._positions)
        self._replay()
        if self._flags is not None:
            for flag, text in zip(self._flags.clone().split(1), self._complaints, strict=True):
                check_value(flag, text)
        if self._statistics is not None:
            values = iter(self._statistics.clone().split(self._sizes))
            for norm, count in self._norms:
                norm.record(next(values), next(values), count)
        copies = iter(_Replayed.apply(self, self._owner.anchor, *inputs))

        def copied(y: Tensor) -> Tensor:
            return share_bits(y, next(copies), own_memory=True)

        if isinstance(self._output, list):
            return [copied(y) for y in self._output]
        return map_entries(copied, self._output)

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Returns input gradients. Weight gradients run at once, or are deferred."""
        weight_gradients = self._owner.weight_gradients
        if self._output_grads is None:
            self._capture_backward(grads)
        assert self._output_grads is not None
        if [x is None for x in grads] != [x is None for x in self._output_grads]:
            raise RuntimeError("gradients reach a chunk otherwise than when its CUDA graphs were made")
        _fill(self._output_grads, grads)
        self._replay_backward()
        for parameter in self._learnt:
            weight_gradients.report(parameter)
        if self._tasks:
            weight_gradients.run_or_defer(self._add_weights)
        return [None if grad is None else grad.clone() for grad in self._input_grads]

    def _capture_backward(self, grads: Sequence[Tensor | None]) -> None:
        self._output_grads = [None if grad is None else torch.empty_like(grad) for grad in grads]
        self._replay_backward = self._owner.captured(self._differentiate, self._pool, "the gradients of inputs")
        if self._tasks:
            pool = self._owner.weight_pool
            self._replay_weights = self._owner.captured(self._run_tasks, pool, "the gradients of weights")

    def _differentiate(self) -> None:
        assert self._output_grads is not None
        outputs = []
        grads = []
        for y, grad in zip(self.outputs, self._output_grads, strict=True):
            if grad is not None:
                outputs.append(y)
                grads.append(grad)
        learning = [x for x in self._inputs if x.requires_grad]
        wanted = [*learning, *self._leaves.values(), self._owner.weight_gradients.anchor]
        with self._owner.weight_gradients.collecting() as self._tasks:
            # Tensors saved for backward stay: no other graph may use their memory.
            found = torch.autograd.grad(outputs, wanted, grads, retain_graph=True, allow_unused=True)
        input_grads = iter(found)
        self._input_grads = [next(input_grads) if x.requires_grad else None for x in self._inputs]
        self._learnt = []
        with torch.no_grad():
            for parameter, grad in zip(self._leaves, found[len(learning) :], strict=False):
                if grad is not None:
                    self._learnt.append(parameter)
                    _gradient(parameter).add_(grad)  # as autograd would

    @torch.no_grad()
    def _run_tasks(self) -> None:
        for parameter, add in self._tasks:
            add(_gradient(parameter))

    def _add_weights(self) -> None:
        self._replay_weights()
        for parameter, _ in self._tasks:
            self._owner.weight_gradients.report(parameter)


class _Replayed(torch.autograd.Function):
    """Copies a replayed chunk's outputs; its backward replays the backward graph."""

    @staticmethod
    def forward(ctx: Any, graphs: _SlotGraphs, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.graphs = graphs
        ctx.set_materialize_grads(False)
        copies = tuple(y.detach().clone() for y in graphs.outputs)
        constants = []
        for copy, y in zip(copies, graphs.outputs, strict=True):
            if not y.requires_grad:
                constants.append(copy)
        ctx.mark_non_differentiable(*constants)
        return copies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.graphs.backward(grads)


def why_not(layer: nn.Module) -> str | None:
    """Reason why a layer cannot have graphs, as far as its modules show; None if it can."""
    for path, module in layer.named_modules():
        kind = type(module)
        label = f"{path} ({kind.__name__})" if path else kind.__name__
        hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
        if any(hooks) or any(parameter._backward_hooks for parameter in module.parameters(recurse=False)):
            return f"{label} has hooks, which no replay calls"
        if kind.__module__.split(".")[0] not in KNOWN:
            return f"{label} is no module of MegaSNN or torch, and its decisions in Python would be made only once"
    return None


class _Applied(nn.Module):
    def __init__(self, chunk: nn.Module, run: Run) -> None:
        super().__init__()
        self.chunk = chunk
        self._run = run

    def forward(self, inputs: list[Tensor], samples: range | None) -> Any:
        return self._run(inputs, samples)


def _fill(buffers: Sequence[Tensor | None], values: Sequence[Tensor | None]) -> None:
    for buffer, x in zip(buffers, values, strict=True):
        if buffer is not None and x is not None:
            # Through `data`: an in-place change that autograd sees would invalidate tensors saved for backward.
            buffer.data.copy_(x)


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _joined(values: Sequence[Tensor]) -> Tensor | None:
    return torch.cat([each.detach().reshape(-1) for each in values]) if values else None
