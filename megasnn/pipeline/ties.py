"""Tied tensors: one owner, and copies on other layers' stages.

A step adds each copy's gradient to the owner's, in layer order, so the sum depends neither on stages nor on the
schedule. The owner then sends new values. Every rank visits the pairs of ranks in the same order, so that messages
meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megasnn.layers import ParallelBatchNorm
from megasnn.models.description import ModelDescription
from megasnn.parallel.sharding import ShardedTensor
from megasnn.parallel.sync_batch_norm import StepStatistics
from megasnn.parallel.traffic import traffic
from megasnn.parallel_state import Group, start_messages
from megasnn.pipeline.p2p import linked


@dataclass
class _Pair:
    """One owning rank's tensors with copies on one chunk.

    Attributes:
        owner, copy: pipeline ranks, possibly the same.
        originals, copies: in the same order; empty on other ranks.
        owning_norms, copied_norms: their running statistics are among the tensors.
    """

    owner: int
    copy: int
    originals: list[Tensor] = field(default_factory=list)
    copies: list[Tensor] = field(default_factory=list)
    owning_norms: list[ParallelBatchNorm] = field(default_factory=list)
    copied_norms: list[ParallelBatchNorm] = field(default_factory=list)


class Ties:
    """This rank's tied tensors. All methods are collective over the pipeline.

    Args:
        bounds, placement: each chunk's layers and pipeline rank.
        parts: this rank's part of its tensors, by chunk; the same part for an owner and its copies.
        pipeline: a step's messages must have arrived before.
    """

    def __init__(
        self,
        description: ModelDescription,
        bounds: Sequence[range],
        placement: Sequence[int],
        parts: Mapping[int, Sequence[ShardedTensor]],
        norms: Sequence[ParallelBatchNorm],
        pipeline: Group,
        device: torch.device,
        gradient: Callable[[Tensor], Tensor | None],
    ) -> None:
        self._pipeline = pipeline
        self._device = device
        self._gradient = gradient
        chunk_of: dict[str, int] = {}
        for index, span in enumerate(bounds):
            for number in span:
                chunk_of[description.layers[number].name] = index
        originals: dict[str, Tensor] = {}
        copies: dict[int, Iterator[Tensor]] = {}
        for index, entries in parts.items():
            originals |= {entry.name: entry.tensor for entry in entries if not entry.is_copy}
            copies[index] = iter([entry.tensor for entry in entries if entry.is_copy])
        norm_of = {norm.running_mean: norm for norm in norms if norm.running_mean is not None}
        pairs: dict[tuple[int, int], _Pair] = {}
        for tie in description.ties:
            index = chunk_of[tie.copy]
            owner = placement[chunk_of[tie.owner]]
            copy = placement[index]
            pair = pairs.setdefault((index, owner), _Pair(owner, copy))
            if pipeline.rank == owner:
                pair.originals.append(originals[tie.name])
            if pipeline.rank == copy:
                pair.copies.append(next(copies[index]))
        # Messages start in one order on all ranks: see megasnn/parallel_state.py.
        for low, high in linked((pair.owner, pair.copy) for pair in pairs.values()):
            start_messages(pipeline, low, high, device)
        # Both ranks of a message go through the pairs in one order.
        self._pairs: list[_Pair] = []
        self._copied_norms: set[ParallelBatchNorm] = set()
        for _, pair in sorted(pairs.items()):
            if pipeline.rank not in (pair.owner, pair.copy):
                continue
            self._pairs.append(pair)
            pair.owning_norms = [norm_of[tensor] for tensor in pair.originals if tensor in norm_of]
            pair.copied_norms = [norm_of[tensor] for tensor in pair.copies if tensor in norm_of]
            self._copied_norms.update(pair.copied_norms)

    def sum_gradients(self) -> None:
        """Adds copies' gradients to their owners'. Both are already reduced over the replicas."""
        with torch.no_grad():
            for pair in self._pairs:
                originals = self._gradients_of(pair.originals)
                copies = self._gradients_of(pair.copies)
                arrived = self._moved(copies, originals, pair.copy, pair.owner)
                for gradient, part in zip(originals, arrived, strict=True):
                    gradient.add_(part)

    def _gradients_of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        gradients = []
        for tensor in tensors:
            if not tensor.requires_grad:
                continue
            gradient = self._gradient(tensor)
            # A hook may remove it, but both ranks in a message need the same tensors.
            if gradient is None:
                gradient = tensor.grad = torch.zeros_like(tensor)
            gradients.append(gradient)
        return gradients

    def refresh(self) -> None:
        """Copies the owners' values to the copies."""
        with torch.no_grad():
            for pair in self._pairs:
                values = self._moved(pair.originals, pair.copies, pair.owner, pair.copy)
                for copy, value in zip(pair.copies, values, strict=True):
                    # Within a chunk they share memory.
                    if copy.data_ptr() != value.data_ptr():
                        copy.copy_(value)

    def statistics_of_owners(self, found: Sequence[StepStatistics]) -> list[StepStatistics]:
        """For norms that own their running statistics: their own first, then their copies' in call order."""
        copy_records: dict[ParallelBatchNorm, list[Tensor]] = {norm: [] for norm in self._copied_norms}
        result = []
        for norm, mean, variance in found:
            if norm in copy_records:
                copy_records[norm].append(torch.stack([mean, variance]))
            else:
                result.append((norm, mean, variance))
        for pair in self._pairs:
            like = [_statistics_like(norm) for norm in pair.owning_norms]
            outgoing = [torch.stack(copy_records[norm]) for norm in pair.copied_norms]
            moved = self._moved(outgoing, like, pair.copy, pair.owner)
            for norm, calls in zip(pair.owning_norms, moved, strict=True):
                result += [(norm, mean, variance) for mean, variance in calls]
        return result

    def _moved(self, outgoing: Sequence[Tensor], like: Sequence[Tensor], source: int, target: int) -> Sequence[Tensor]:
        """Moves tensors from pipeline rank `source` to rank `target`.

        Args:
            like: tensors with their shapes and types, on the target.
        Returns:
            Moved tensors; an empty list on other ranks.
        """
        if source == target:
            return outgoing
        pipeline = self._pipeline
        if pipeline.rank == source:
            for tensor in outgoing:
                # Gloo's send refuses other strides (findings/gloo_memory_order.sh).
                message = tensor.detach().contiguous()
                traffic.record("ties", "message", message.nbytes)
                dist.send(message, pipeline.ranks[target], group=pipeline.handle)
        moved: list[Tensor] = []
        if pipeline.rank == target:
            for tensor in like:
                # A new tensor: Gloo's receives do not raise version counters (findings/gloo_version_counter.sh).
                message = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
                dist.recv(message, pipeline.ranks[source], group=pipeline.handle)
                moved.append(message)
        return moved


def _statistics_like(norm: ParallelBatchNorm) -> Tensor:
    assert norm.running_mean is not None
    # A copy is called as often as its owner, which `tie_all` in models/ties.py checks.
    shape = norm.calls, 2, norm.running_mean.numel()
    return norm.running_mean.new_empty(shape, dtype=torch.float64)
