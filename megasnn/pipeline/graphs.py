"""CUDA graphs of a chunk: forward, the gradients of its inputs, and those of its weights.

A graph computes on memory that stays where it is, with numbers that stay what they are. So:

- Micro-batches that are under way at the same time each have a slot, and every slot has graphs of its own.
- Inputs, and gradients of outputs, are copied to a fixed place first. Outputs, and gradients of inputs, are copied when
  they leave: a message may be on its way when the slot is used again.
- Statistics of norms and what checks have found are copied after each replay; the positions of samples, which random
  numbers follow from, are written before it. Gradients of parameters are added inside of the graphs, and counted when
  those were replayed.

The first training step of its sizes runs without graphs, since kernels are compiled and chosen in it; the second one
captures them. What forward keeps, and the outputs and gradients of all layers stay in memory for every slot.
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
from megasnn.kernels.spike_codec import bits_of, remember_bits
from megasnn.layers.dropout import drawing_for
from megasnn.layers.norm import ParallelBatchNorm
from megasnn.layers.weight_grad import WeightGradients

KNOWN = ("megasnn", "torch")  # packages of modules that depend on nothing that Python knows and a graph does not


Run = Callable[[list[Tensor], range | None], Any]


class Capture(Protocol):
    """Makes graphs, in pools of memory.

    Later captures in a pool keep tensors in memory that earlier ones gave back: graphs of one pool are replayed in the
    order of their captures, or keep nothing in it.
    """

    def pool(self) -> Any: ...

    def __call__(self, work: Callable[[], None], pool: Any) -> Callable[[], None]:
        """Records what `work` starts on the device, without computing it, and returns what starts all of that again."""


class CudaCapture:
    """Makes CUDA graphs. The driver captures no default stream, so there is one for this."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def pool(self) -> Any:
        # The allocator gives a pool none of the memory that it has cached for others.
        torch.cuda.empty_cache()
        return torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None], pool: Any) -> Callable[[], None]:
        # Not by `torch.cuda.graph`, which waits for the device first: a message that it waits for may never come.
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()  # a graph that is freed meanwhile would make this one invalid
        try:
            with torch.cuda.stream(self._stream):
                # Other threads go on asking the driver: NCCL's, and those of autograd, which allocate.
                graph.capture_begin(pool, capture_error_mode="thread_local")
                work()
                graph.capture_end()
        finally:
            if collects:
                gc.enable()
        return graph.replay


class ChunkGraphs:
    """Graphs of a chunk, and the slots of its micro-batches.

    Args:
        chunk: all modules that the graphs compute with.
        run: computes the chunk: of its inputs, in a list that it empties, and the positions of the samples.
        weight_gradients: takes the second part of the layers' backward.
    """

    def __init__(self, chunk: nn.Module, run: Run, weight_gradients: WeightGradients, capture: Capture) -> None:
        self.chunk, self.run, self.weight_gradients, self.capture = chunk, run, weight_gradients, capture
        self.anchor = torch.zeros((), requires_grad=True)  # makes what a graph gives part of autograd's graph
        self.of_weights = self.capture.pool()  # of graphs that keep nothing in it, so that their order is free
        self._pools: list[Any] = []  # by slot: backward comes behind forward
        self._graphs, self._addresses = dict[Any, _SlotGraphs](), list[int]()
        self._is_on, self._slots = False, dict[int, int]()

    def begin(self, is_on: bool) -> None:
        """Begins a training step, with graphs or without. Raises RuntimeError where tensors of layers were moved."""
        self._is_on, self._slots = is_on, {}
        tensors = [*self.chunk.parameters(), *self.chunk.buffers()]
        addresses = [each.data_ptr() for t in tensors for each in (t, t.grad) if each is not None]
        if self._graphs and addresses != self._addresses:
            raise RuntimeError(
                "weights, buffers or gradients were moved in memory after CUDA graphs were made of their layers: write "
                "into them instead, or use --cuda-graphs off"
            )
        self._addresses = addresses

    def has(self, micro_batch: int) -> bool:
        """True if the chunk runs as graphs now; the micro-batch takes a slot."""
        if not self._is_on:
            return False
        used = self._slots.values()
        self._slots[micro_batch] = next(each for each in range(len(used) + 1) if each not in used)
        if len(self._pools) < len(self._slots):
            self._pools.append(self.capture.pool())
        return True

    def done(self, micro_batch: int) -> None:
        """Gives a micro-batch's slot back, after all of its backward."""
        self._slots.pop(micro_batch, None)

    def apply(self, inputs: Sequence[Tensor], samples: range | None, micro_batch: int) -> Any:
        """Forward; a step that captures replays at once. Raises RuntimeError where that cannot be."""
        slot = self._slots[micro_batch]
        key = slot, tuple((x.shape, x.stride(), x.dtype, x.requires_grad) for x in inputs)
        if key not in self._graphs:
            self._graphs[key] = _SlotGraphs(self, inputs, samples, self._pools[slot])
        return self._graphs[key].apply(inputs, samples)

    def captured(self, work: Callable[[], None], pool: Any, what: str) -> Callable[[], None]:
        """Graph of some work. Raises RuntimeError, which says what cannot be captured."""
        try:
            return self.capture(work, pool)
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0]  # torch goes on for lines about all of CUDA's errors
            kind = type(error).__name__
            raise RuntimeError(f"{what} cannot be captured ({kind}: {reason}); use --cuda-graphs off") from error


class _SlotGraphs:
    """A chunk, for micro-batches in one slot. Attributes: outputs: hold what backward needs."""

    def __init__(self, of: ChunkGraphs, inputs: Sequence[Tensor], samples: range | None, pool: Any) -> None:
        self._of, self._pool = of, pool
        self._positions = None if samples is None else torch.arange(len(samples), device=inputs[0].device)
        self._leaves = {p: _leaf(p, of.weight_gradients) for p in of.chunk.parameters() if p.requires_grad}
        self._inputs = [torch.empty_like(x).requires_grad_(x.requires_grad) for x in inputs]
        self._grads: list[Tensor | None] | None = None  # places of those of the outputs
        self._replay = of.captured(lambda: self._forward(samples), pool, "forward")

    def _forward(self, samples: range | None) -> None:
        chunk, checks = self._of.chunk, DeviceChecks(self._inputs[0].device)
        norms = [(each, len(each.pending)) for each in chunk.modules() if isinstance(each, ParallelBatchNorm)]
        leaves = {f"chunk.{n}": self._leaves[p] for n, p in chunk.named_parameters() if p in self._leaves}
        with checks.collecting(), drawing_for(self._positions):
            self._output = functional_call(_Applied(chunk, self._of.run), leaves, ([*self._inputs], samples))
        output, noted = self._output, checks.noted()
        self.outputs = output if isinstance(output, list) else [*entries_of(output).values()]
        self._norms = [(norm, count) for norm, start in norms for _, _, count in norm.pending[start:]]
        values = [value for norm, start in norms for mean, var, _ in norm.pending[start:] for value in (mean, var)]
        for norm, start in norms:
            del norm.pending[start:]
        self._complaints, self._sizes = [text for _, text in noted], [value.numel() for value in values]
        # Each kind in one tensor, which takes one copy.
        self._flags, self._statistics = _joined([flag for flag, _ in noted]), _joined(values)

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
        made = iter(_Replayed.apply(self, self._of.anchor, *inputs))

        def left(y: Tensor) -> Tensor:
            bits = bits_of(y)
            return remember_bits(next(made), None if bits is None else bits.clone())

        return [left(y) for y in self._output] if isinstance(self._output, list) else map_entries(left, self._output)

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of the inputs, from those of the outputs; those of weights are left for later."""
        of = self._of
        if self._grads is None:
            self._capture_backward(grads)
        assert self._grads is not None
        if [x is None for x in grads] != [x is None for x in self._grads]:
            raise RuntimeError("gradients reach a chunk otherwise than when its CUDA graphs were made")
        _fill(self._grads, grads)
        self._replay_backward()
        for parameter in self._learnt:
            of.weight_gradients.report(parameter)
        if self._tasks:
            of.weight_gradients.leave(self._add_weights)
        return [None if grad is None else grad.clone() for grad in self._found]

    def _capture_backward(self, grads: Sequence[Tensor | None]) -> None:
        self._grads = [None if grad is None else torch.empty_like(grad) for grad in grads]
        self._replay_backward = self._of.captured(self._differentiate, self._pool, "the gradients of inputs")
        if self._tasks:
            what = "the gradients of weights"
            self._replay_weights = self._of.captured(self._run_tasks, self._of.of_weights, what)

    def _differentiate(self) -> None:
        assert self._grads is not None
        pairs = [(y, grad) for y, grad in zip(self.outputs, self._grads, strict=True) if grad is not None]
        learning = [x for x in self._inputs if x.requires_grad]
        wanted = [*learning, *self._leaves.values(), self._of.weight_gradients.anchor]
        outputs, grads = [y for y, _ in pairs], [grad for _, grad in pairs]
        with self._of.weight_gradients.collected() as self._tasks:
            # What forward has kept stays: its memory is no other graph's.
            found = torch.autograd.grad(outputs, wanted, grads, retain_graph=True, allow_unused=True)
        of_inputs = iter(found)
        self._found = [next(of_inputs) if x.requires_grad else None for x in self._inputs]
        of_leaves = zip(self._leaves, found[len(learning) :], strict=False)
        summed = [(parameter, grad) for parameter, grad in of_leaves if grad is not None]
        self._learnt = [parameter for parameter, _ in summed]
        with torch.no_grad():
            for parameter, grad in summed:
                _gradient(parameter).add_(grad)  # as autograd would

    @torch.no_grad()
    def _run_tasks(self) -> None:
        for parameter, add in self._tasks:
            add(_gradient(parameter))

    def _add_weights(self) -> None:
        self._replay_weights()
        for parameter, _ in self._tasks:
            self._of.weight_gradients.report(parameter)


class _Replayed(torch.autograd.Function):
    """Gives the outputs of a chunk that was replayed, and replays its backward."""

    @staticmethod
    def forward(ctx: Any, graphs: _SlotGraphs, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.graphs = graphs
        ctx.set_materialize_grads(False)
        outputs = tuple(y.detach().clone() for y in graphs.outputs)
        learnt = zip(outputs, graphs.outputs, strict=True)
        ctx.mark_non_differentiable(*(output for output, y in learnt if not y.requires_grad))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.graphs.backward(grads)


def why_not(layer: nn.Module) -> str | None:
    """Tells why a layer cannot have graphs, as far as it can be seen from outside."""
    for path, module in layer.named_modules():
        kind = type(module)
        what = f"{path} ({kind.__name__})" if path else kind.__name__
        hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
        if any(hooks) or any(each._backward_hooks for each in module.parameters(recurse=False)):
            return f"{what} has hooks, and no replay calls them"
        if kind.__module__.split(".")[0] not in KNOWN:
            return f"{what} is no module of MegaSNN's or torch's: what it decides in Python would be decided once"
    return None


def _leaf(parameter: Tensor, weight_gradients: WeightGradients) -> Tensor:
    """Leaf for autograd on the memory of a parameter; itself where the layer does not leave its gradient to autograd.

    Autograd adds to a parameter on the stream on which that was used first: a forward without a graph that is under way
    would draw its stream into the capture, which the driver refuses.
    """
    return parameter if weight_gradients.takes(parameter) else parameter.detach().requires_grad_()


class _Applied(nn.Module):
    """Chunk as a module that takes what `run` takes."""

    def __init__(self, chunk: nn.Module, run: Run) -> None:
        super().__init__()
        self.chunk, self._run = chunk, run

    def forward(self, inputs: list[Tensor], samples: range | None) -> Any:
        return self._run(inputs, samples)


def _fill(buffers: Sequence[Tensor | None], values: Sequence[Tensor | None]) -> None:
    for buffer, x in zip(buffers, values, strict=True):
        if buffer is not None and x is not None:
            buffer.data.copy_(x)  # autograd does not see that


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _joined(values: Sequence[Tensor]) -> Tensor | None:
    return torch.cat([each.detach().reshape(-1) for each in values]) if values else None
