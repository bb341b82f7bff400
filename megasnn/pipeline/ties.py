"""Tensors that several layers have: one owner, and copies on whatever stages the other layers are.

A copy has a gradient of its own, which is added to the owner's once in a step, copy by copy in the order of the layers:
the sum does not depend on which stage has which layer, nor on the schedule. The owner's value goes back to the copies
whenever it has changed. Every rank takes the pairs of ranks in the same order, so that messages meet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megasnn.layers import ParallelBatchNorm
from megasnn.layers.shape_inference import calls_of
from megasnn.models.description import ModelDescription
from megasnn.parallel.collectives import traffic
from megasnn.parallel.sharding import ShardedTensor
from megasnn.parallel.sync_batch_norm import StepStatistics
from megasnn.parallel_state import Group, start_messages
from megasnn.pipeline.chunk import PipelineChunk
from megasnn.pipeline.p2p import linked


@dataclass
class _Pair:
    """Copies that a chunk has of tensors which one rank owns.

    Attributes:
        owner, copy: the two pipeline ranks, which may be the same.
        originals, copies: the tensors, in the same order; empty where they are not on this rank.
        owning_norms, copied_norms: those whose running statistics are among them.
    """

    owner: int
    copy: int
    originals: list[Tensor] = field(default_factory=list)
    copies: list[Tensor] = field(default_factory=list)
    owning_norms: list[ParallelBatchNorm] = field(default_factory=list)
    copied_norms: list[ParallelBatchNorm] = field(default_factory=list)


class Ties:
    """This rank's part in the ties of a model; everything here is collective over the pipeline.

    Args:
        bounds, placement: the layers and the pipeline rank of each chunk.
        pipeline: this rank's group. Whatever its ranks have sent in a step must have arrived.
        device: where messages lie.
        gradient: of a parameter, what this rank has of it, the same of an owner and of its copies.
        local_part: what this rank keeps of a tensor, likewise.
    """

    def __init__(
        self,
        description: ModelDescription,
        bounds: Sequence[range],
        placement: Sequence[int],
        chunks: Mapping[int, PipelineChunk],
        pipeline: Group,
        device: torch.device,
        gradient: Callable[[Tensor], Tensor | None],
        local_part: Callable[[ShardedTensor], ShardedTensor],
    ) -> None:
        self._pipeline, self._device, self._gradient = pipeline, device, gradient
        chunk_of = {description.layers[number].name: index for index, span in enumerate(bounds) for number in span}
        originals = {
            entry.name: local_part(entry).tensor for chunk in chunks.values() for entry in chunk.sharded_tensors()
        }
        copies = {index: iter(chunk.copied_tensors()) for index, chunk in chunks.items()}
        norms = [each for chunk in chunks.values() for each in chunk.modules() if isinstance(each, ParallelBatchNorm)]
        norm_of = {norm.running_mean: norm for norm in norms if norm.running_mean is not None}
        pairs: dict[tuple[int, int], _Pair] = {}
        for tie in description.ties:
            index = chunk_of[tie.copy]
            owner, copy = placement[chunk_of[tie.owner]], placement[index]
            pair = pairs.setdefault((index, owner), _Pair(owner, copy))
            if pipeline.rank == owner:
                pair.originals.append(originals[tie.name])
            if pipeline.rank == copy:
                pair.copies.append(local_part(next(copies[index])).tensor)
        for low, high in linked((pair.owner, pair.copy) for pair in pairs.values()):
            start_messages(pipeline, low, high, device)
        self._pairs = [pair for _, pair in sorted(pairs.items()) if pipeline.rank in (pair.owner, pair.copy)]
        for pair in self._pairs:
            pair.owning_norms = [norm_of[tensor] for tensor in pair.originals if tensor in norm_of]
            pair.copied_norms = [norm_of[tensor] for tensor in pair.copies if tensor in norm_of]
        self._copied_norms = {norm for pair in self._pairs for norm in pair.copied_norms}

    def sum_gradients(self) -> None:
        """Adds the copies' gradients, which are reduced over the replicas, to those of their owners."""
        with torch.no_grad():
            for pair in self._pairs:
                originals = [self._gradient_of(tensor) for tensor in pair.originals if tensor.requires_grad]
                outgoing = [self._gradient_of(tensor) for tensor in pair.copies if tensor.requires_grad]
                for gradient, part in zip(
                    originals, self._moved(outgoing, originals, pair.copy, pair.owner), strict=True
                ):
                    gradient.add_(part)

    def _gradient_of(self, tensor: Tensor) -> Tensor:
        """The gradient, or zeros where a hook has taken it away: both ranks of a message have the same tensors."""
        gradient = self._gradient(tensor)
        if gradient is None:
            gradient = tensor.grad = torch.zeros_like(tensor)
        return gradient

    def refresh(self) -> None:
        """Gives the copies the values of their owners."""
        with torch.no_grad():
            for pair in self._pairs:
                values = self._moved(pair.originals, pair.copies, pair.owner, pair.copy)
                for copy, value in zip(pair.copies, values, strict=True):
                    if copy.data_ptr() != value.data_ptr():  # within a chunk they share their memory
                        copy.copy_(value)

    def statistics_of_owners(self, found: Sequence[StepStatistics]) -> list[StepStatistics]:
        """Statistics of a step of all norms, for those that own their running statistics: behind a norm's own those of
        its copies, in the order in which a forward calls them."""
        of: dict[ParallelBatchNorm, list[Tensor]] = {norm: [] for norm in self._copied_norms}
        for norm, mean, variance in found:
            if norm in of:
                of[norm].append(torch.stack([mean, variance]))
        result = [each for each in found if each[0] not in of]
        for pair in self._pairs:
            like = [_statistics_like(norm) for norm in pair.owning_norms]
            outgoing = [torch.stack(of[norm]) for norm in pair.copied_norms]
            moved = self._moved(outgoing, like, pair.copy, pair.owner)
            for norm, calls in zip(pair.owning_norms, moved, strict=True):
                result += [(norm, mean, variance) for mean, variance in calls]
        return result

    def _moved(self, outgoing: Sequence[Tensor], like: Sequence[Tensor], source: int, target: int) -> Sequence[Tensor]:
        """Moves the tensors `outgoing` from pipeline rank `source` to rank `target`, where they are like those of
        `like`; nothing on other ranks."""
        ranks, group, moved = self._pipeline.ranks, self._pipeline.handle, list[Tensor]()
        if source == target:
            return outgoing
        for tensor in outgoing if self._pipeline.rank == source else ():
            message = tensor.detach().contiguous()
            traffic.record("ties", message.nbytes)
            dist.send(message, ranks[target], group=group)
        for tensor in like if self._pipeline.rank == target else ():
            message = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
            dist.recv(message, ranks[source], group=group)
            moved.append(message)
        return moved


def _statistics_like(norm: ParallelBatchNorm) -> Tensor:
    assert norm.running_mean is not None
    shape = calls_of(norm), 2, norm.running_mean.numel()  # a copy is called as often as its owner
    return norm.running_mean.new_empty(shape, dtype=torch.float64)
