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

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megasnn.layers.weight_grad import WeightGradients
from megasnn.pipeline.graph_capture import Capture
from megasnn.pipeline.slot_graphs import GraphedChunk, Run, SlotGraphs

KNOWN = ("megasnn", "torch")
"""Packages whose modules depend on no state of Python that a graph would not see."""


class ChunkGraphs:
    """A chunk's graphs, and its micro-batches' slots.

    Args:
        layers: all modules in the graphs.
    """

    def __init__(self, layers: nn.Module, run: Run, weight_gradients: WeightGradients, capture: Capture) -> None:
        # A leaf that makes the outputs of a replay part of autograd's graph.
        anchor = torch.zeros((), requires_grad=True)
        # Weight gradients keep no tensors in their pool, so their graphs replay in any order.
        weight_pool = capture.pool()
        self._chunk = GraphedChunk(layers, run, weight_gradients, capture, anchor, weight_pool)
        # One pool for each slot: until its backward, a slot's memory holds what its forward saved.
        self._pools: list[Any] = []
        self._graphs = dict[Any, SlotGraphs]()
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
        for tensor in (*self._chunk.layers.parameters(), *self._chunk.layers.buffers()):
            addresses.append(tensor.data_ptr())
            if tensor.grad is not None:
                addresses.append(tensor.grad.data_ptr())
        if self._graphs and addresses != self._addresses:
            raise RuntimeError(
                "weights, buffers or gradients were moved in memory after CUDA graphs were made of their layers: write "
                "into them instead, or use --cuda-graphs off"
            )
        self._addresses = addresses

    def take_slot(self, micro_batch: int) -> bool:
        """Assigns a slot to the micro-batch. False in a step without graphs, where it needs none."""
        if not self._is_on:
            return False
        used = self._slots.values()
        self._slots[micro_batch] = next(slot for slot in range(len(used) + 1) if slot not in used)
        if len(self._pools) < len(self._slots):
            self._pools.append(self._chunk.capture.pool())
        return True

    def free_slot(self, micro_batch: int) -> None:
        """Frees the micro-batch's slot, after the backward's last part."""
        self._slots.pop(micro_batch, None)

    def apply(self, inputs: Sequence[Tensor], samples: range | None, micro_batch: int) -> Any:
        """Replays the forward. A new slot, size or input shape is captured first.

        Raises RuntimeError for an impossible capture.
        """
        slot = self._slots[micro_batch]
        # With the size on all ranks: NCCL wants the ranks of a collective to replay graphs of the same capture.
        size = self._sizes[micro_batch]
        key = slot, size, tuple((x.shape, x.stride(), x.dtype, x.requires_grad) for x in inputs)
        if key not in self._graphs:
            self._graphs[key] = SlotGraphs(self._chunk, inputs, samples, self._pools[slot])
        return self._graphs[key].apply(inputs, samples)


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
