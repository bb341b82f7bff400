"""CUDA graphs of a chunk's layers: forward, the gradients of inputs, and those of weights. Never run on a GPU so far.

A graph computes on memory that stays where it is, with numbers that stay what they are. So:

- Micro-batches that are under way at the same time each have a slot, and every slot of a layer has graphs of its own.
- An output of a graph is given to the next layer's graph where it is. Other inputs are copied to a fixed place first,
  and their gradients when they leave: a message may be on its way when the slot is used again.
- Statistics of norms and what checks have found are copied after each replay; keys of random numbers are written
  before it. Gradients of parameters are added inside of the graphs, and counted when those were replayed.

The first training step of a kind runs without graphs, since kernels are compiled and chosen in it; the second one
captures them. What forward keeps, and the dense outputs and gradients of all layers stay in memory for every slot.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from megasnn.bundle import Bundle, entries_of, map_entries
from megasnn.device_checks import DeviceChecks, refuse
from megasnn.kernels.spike_codec import bits_of, remember_bits
from megasnn.layers.dropout import RefilledKeys
from megasnn.layers.norm import ParallelBatchNorm
from megasnn.layers.replicated import apply_layer
from megasnn.layers.weight_grad import WeightGradients

KNOWN = ("megasnn", "torch")  # packages of modules that depend on nothing that Python knows and a graph does not


class Capture(Protocol):
    """Makes graphs, in pools of memory.

    Later captures in a pool keep tensors in memory that earlier ones gave back: graphs of one pool are replayed in the
    order of their captures, or keep nothing in it.
    """

    def pool(self) -> Any: ...

    def __call__(self, work: Callable[[], None], pool: Any) -> Callable[[], None]:
        """Records what `work` starts on the device, without computing it, and returns what starts all of that again."""


class GraphOptions(NamedTuple):
    """Attributes: is_required: a layer that cannot have graphs is an error, and not only told."""

    capture: Capture
    is_required: bool


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
    """Graphs of a chunk's layers, and the slots of its micro-batches.

    Args:
        layers: of the chunk, by name.
        sharing: layers that take what another layer takes too, or take it twice.
        weight_gradients: takes the second part of their backward.
    Raises:
        ValueError: a layer cannot have graphs, and must.
    """

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        sharing: Collection[str],
        weight_gradients: WeightGradients,
        options: GraphOptions,
    ) -> None:
        self.capture, self.weight_gradients = options.capture, weight_gradients
        self.anchor = torch.zeros((), requires_grad=True)  # makes what a graph gives part of autograd's graph
        self.of_weights = self.capture.pool()  # of graphs that keep nothing in it, so that their order is free
        self._pools: list[Any] = []  # by slot: forward and backward go through the layers in one order
        self._layers, self._graphs = dict[str, nn.Module](), dict[Any, _LayerGraphs]()
        self._fixed, self._addresses = set[int](), list[int]()
        self._is_on, self._slots = False, dict[int, int]()
        for name, layer in layers.items():
            why = "its input is taken several times, which orders sums anew" if name in sharing else why_not(layer)
            if why is None:
                self._layers[name] = layer
            elif options.is_required:
                raise ValueError(f"{name} cannot have CUDA graphs: {why} (--cuda-graphs auto leaves it without)")
            else:
                sys.stderr.write(f"WARNING: {name} runs without CUDA graphs: {why}\n")

    def begin(self, is_on: bool) -> None:
        """Begins a training step, with graphs or without. Raises RuntimeError where layers were changed since."""
        self._is_on, self._slots = is_on, {}
        tensors = [t for layer in self._layers.values() for t in (*layer.parameters(), *layer.buffers())]
        addresses = [each.data_ptr() for t in tensors for each in (t, t.grad) if each is not None]
        if self._graphs and addresses != self._addresses:
            raise RuntimeError(
                "weights, buffers or gradients were moved in memory after CUDA graphs were made of their layers: write "
                "into them instead, or use --cuda-graphs off"
            )
        self._addresses = addresses
        for name, layer in self._layers.items() if self._graphs else ():
            if why := why_not(layer):
                raise RuntimeError(f"{name} has CUDA graphs, and now {why}: use --cuda-graphs off")

    def has(self, name: str, micro_batch: int) -> bool:
        """True if a layer runs as graphs now. A micro-batch that comes to its first layer takes a slot."""
        if not self._is_on or name not in self._layers:
            return False
        if micro_batch not in self._slots:
            taken = self._slots.values()
            self._slots[micro_batch] = next(each for each in range(len(taken) + 1) if each not in taken)
            if len(self._pools) < len(self._slots):
                self._pools.append(self.capture.pool())
        return True

    def done(self, micro_batch: int) -> None:
        """Gives a micro-batch's slot back, after all of its backward."""
        self._slots.pop(micro_batch, None)

    def apply(self, name: str, inputs: Sequence[Bundle], samples: range | None, micro_batch: int) -> Bundle:
        """Forward of a layer; a step that captures replays at once. Raises RuntimeError where that cannot be."""
        entries = [entry for x in inputs for entry in entries_of(x).values()]
        slot = self._slots[micro_batch]
        key = name, slot, tuple((x.shape, x.dtype, x.requires_grad) for x in entries), self.places(entries)
        if key not in self._graphs:
            self._graphs[key] = _LayerGraphs(self, name, self._layers[name], inputs, samples, self._pools[slot])
        return self._graphs[key].apply(entries, samples)

    def captured(self, work: Callable[[], None], pool: Any, what: str) -> Callable[[], None]:
        """Graph of some work. Raises RuntimeError, which says what cannot be captured."""
        try:
            return self.capture(work, pool)
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0]  # torch goes on for lines about all of CUDA's errors
            kind = type(error).__name__
            raise RuntimeError(f"{what} cannot be captured ({kind}: {reason}); use --cuda-graphs off") from error

    def fix(self, tensors: Iterable[Tensor]) -> None:
        """Notes that a graph leaves values in the memory of these tensors."""
        self._fixed.update(x.untyped_storage().data_ptr() for x in tensors)

    def is_fixed(self, x: Tensor) -> bool:
        return x.untyped_storage().data_ptr() in self._fixed

    def places(self, tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
        """Memory order of tensors, and their place where that is fixed."""
        return tuple(None if x is None else (x.stride(), x.data_ptr() if self.is_fixed(x) else 0) for x in tensors)


class _Inputs:
    """Memory in which a graph finds what it is given.

    Attributes:
        are_copied: which of the tensors are filled before each replay; the others come from other graphs.
    """

    def __init__(self, chunk: ChunkGraphs, given: Sequence[Tensor]) -> None:
        self.tensors, self.are_copied = list[Tensor](), [not chunk.is_fixed(x) for x in given]
        for x, is_copied in zip(given, self.are_copied, strict=True):
            place = torch.empty_like(x) if is_copied else remember_bits(x.detach(), bits_of(x))
            self.tensors.append(place.requires_grad_(x.requires_grad))

    def fill(self, given: Sequence[Tensor]) -> None:
        for place, x, is_copied in zip(self.tensors, given, self.are_copied, strict=True):
            if is_copied:
                place.data.copy_(x)  # autograd does not see that


class _LayerGraphs:
    """One layer, for micro-batches in one slot. Attributes: outputs: hold what backward needs."""

    def __init__(
        self,
        chunk: ChunkGraphs,
        name: str,
        layer: nn.Module,
        inputs: Sequence[Bundle],
        samples: range | None,
        pool: Any,
    ) -> None:
        self._chunk, self._name, self._pool, self._keys = chunk, name, pool, RefilledKeys()
        self._leaves = {p: _leaf(p, chunk.weight_gradients) for p in layer.parameters() if p.requires_grad}
        self._inputs = _Inputs(chunk, [entry for x in inputs for entry in entries_of(x).values()])
        self._places: tuple[Any, ...] | None = None  # of the gradients that backward was captured for
        places = iter(self._inputs.tensors)
        taken = [map_entries(lambda _: next(places), x) for x in inputs]
        self._replay = chunk.captured(lambda: self._forward(layer, taken, samples), pool, f"{name}: its forward")
        chunk.fix(self.outputs)

    def _forward(self, layer: nn.Module, inputs: Sequence[Bundle], samples: range | None) -> None:
        checks = DeviceChecks(self._inputs.tensors[0].device)
        norms = [(each, len(each.pending)) for each in layer.modules() if isinstance(each, ParallelBatchNorm)]
        leaves = {f"layer.{n}": self._leaves[p] for n, p in layer.named_parameters() if p in self._leaves}
        with checks.collecting(), self._keys.entered():
            self._output = functional_call(_Applied(layer), leaves, (inputs[0], samples, *inputs[1:]))
        self.outputs, noted = list(entries_of(self._output).values()), checks.noted()
        self._norms = [(norm, count) for norm, start in norms for _, _, count in norm.pending[start:]]
        values = [value for norm, start in norms for mean, var, _ in norm.pending[start:] for value in (mean, var)]
        for norm, start in norms:
            del norm.pending[start:]
        self._complaints, self._sizes = [text for _, text in noted], [value.numel() for value in values]
        # Each kind in one tensor, which takes one copy.
        self._flags, self._statistics = _joined([flag for flag, _ in noted]), _joined(values)

    def apply(self, entries: Sequence[Tensor], samples: range | None) -> Bundle:
        self._inputs.fill(entries)
        self._keys.refill(samples)
        self._replay()
        if self._flags is not None:
            for flag, text in zip(self._flags.clone().split(1), self._complaints, strict=True):
                refuse(flag, text)
        if self._statistics is not None:
            values = iter(self._statistics.clone().split(self._sizes))
            for norm, count in self._norms:
                norm.record(next(values), next(values), count)
        made = iter(_Replayed.apply(self, self._chunk.anchor, *entries))
        return map_entries(lambda y: remember_bits(next(made), bits_of(y)), self._output)

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of the inputs, from those of the outputs; those of weights are left for later."""
        chunk, given = self._chunk, [grad for grad in grads if grad is not None]
        if self._places is None:
            self._capture_backward(grads, given)
        if chunk.places(grads) != self._places:
            raise RuntimeError("gradients reach a layer otherwise than when its CUDA graphs were made")
        self._grads.fill(given)
        self._replay_backward()
        for parameter in self._learnt:
            chunk.weight_gradients.added(parameter)
        if self._tasks:
            chunk.weight_gradients.leave(self._add_weights)
        pairs = zip(self._found, self._inputs.are_copied, strict=True)
        return [grad.clone() if grad is not None and is_copied else grad for grad, is_copied in pairs]

    def _capture_backward(self, grads: Sequence[Tensor | None], given: Sequence[Tensor]) -> None:
        chunk, outputs = self._chunk, [y for y, grad in zip(self.outputs, grads, strict=True) if grad is not None]
        self._places, self._grads = chunk.places(grads), _Inputs(chunk, given)
        self._replay_backward = chunk.captured(
            lambda: self._differentiate(outputs), self._pool, f"{self._name}: the gradients of its inputs"
        )
        if self._tasks:
            what = f"{self._name}: the gradients of its weights"
            self._replay_weights = chunk.captured(self._run_tasks, chunk.of_weights, what)
        pairs = zip(self._found, self._inputs.are_copied, strict=True)
        chunk.fix(grad for grad, is_copied in pairs if grad is not None and not is_copied)

    def _differentiate(self, outputs: Sequence[Tensor]) -> None:
        learning = [x for x in self._inputs.tensors if x.requires_grad]
        wanted = [*learning, *self._leaves.values(), self._chunk.weight_gradients.anchor]
        with self._chunk.weight_gradients.collected() as self._tasks:
            # What forward has kept stays: its memory is no other graph's.
            found = torch.autograd.grad(outputs, wanted, self._grads.tensors, retain_graph=True, allow_unused=True)
        of_inputs = iter(found)
        self._found = [next(of_inputs) if x.requires_grad else None for x in self._inputs.tensors]
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
            self._chunk.weight_gradients.added(parameter)


class _Replayed(torch.autograd.Function):
    """Gives the outputs of a layer that was replayed, and replays its backward."""

    @staticmethod
    def forward(ctx: Any, layer: _LayerGraphs, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.layer = layer
        ctx.set_materialize_grads(False)
        outputs = tuple(y.detach() for y in layer.outputs)
        learnt = zip(outputs, layer.outputs, strict=True)
        ctx.mark_non_differentiable(*(output for output, y in learnt if not y.requires_grad))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.layer.backward(grads)


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
    """Layer as a module that takes what `apply_layer` takes."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Bundle, samples: range | None, *more: Bundle) -> Bundle:
        return apply_layer(self.layer, x, samples, *more)


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _joined(values: Sequence[Tensor]) -> Tensor | None:
    return torch.cat([each.detach().reshape(-1) for each in values]) if values else None
