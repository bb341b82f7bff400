"""Context of a build: what every sharded layer needs to know, entered while a model is built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

import torch

from megasnn.common.grid import Axis, ContextCut, Coordinates, Grid
from megasnn.kernels import NeuronSpec
from megasnn.layers.weight_grad import CastWeights, WeightGradients
from megasnn.parallel.sharding import Cut, Initialiser, Shard
from megasnn.parallel_state import Group


@dataclass(frozen=True)
class BuildContext:
    """
    Attributes:
        tp: the tensor-parallel group the layers are cut over.
        held_by: the tensor-parallel ranks that all hold the same, where layers are whole; None where they are cut.
        dtype: of parameters, buffers, optimizer state and gradients.
        compute_dtype: of activations and matrix products; bfloat16 with `--precision bf16`, otherwise `dtype`.
        neuron_backend: a name in megasnn.kernels.BACKENDS, or "auto".
        seed: of what layers draw in training (dropout).
        weight_gradients: where the layers leave the second part of their backward.
        dp: the ranks that hold the same layers for other samples. dp_shard: those that share one copy of the weights.
        cp: the ranks that share a micro-batch. cut: by what they do.
        neuron: of the layers that are not given one of their own.
        time_steps: T. A layer of neurons that is given a single time step takes it for each of them.
        carries: whether neurons go on from the potential that the last call left, until they are reset.
        cast_weights: gives the layers with weights what they multiply by.
        sparse_products: True to sum over spikes in products with few of them.
        traceable: True for functions of torch alone, which torch.export follows; for one rank, without gradients.
    """

    tp: Group = field(default_factory=lambda: Group("tp"))
    dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype = torch.float32
    neuron_backend: str = "auto"
    seed: int = 0
    weight_gradients: WeightGradients = field(default_factory=WeightGradients)
    dp: Group = field(default_factory=lambda: Group("dp"))
    dp_shard: Group = field(default_factory=lambda: Group("dp_shard"))
    cp: Group = field(default_factory=lambda: Group("cp"))
    cut: ContextCut = "samples"
    neuron: NeuronSpec = field(default_factory=NeuronSpec)
    time_steps: int = 1
    carries: bool = False
    cast_weights: CastWeights = field(default_factory=CastWeights)
    sparse_products: bool = False
    traceable: bool = False
    held_by: Group | None = None

    def replicated(self) -> BuildContext:
        """The context of a layer that is whole on every tensor-parallel rank."""
        return self if self.tp.size == 1 else replace(self, tp=Group("tp"), held_by=self.tp)

    @property
    def sharing_samples(self) -> Group:
        """The ranks of which each has other samples of a micro-batch."""
        return self.cp if self.cut == "samples" else Group("cp")

    @property
    def counts_logits(self) -> bool:
        """Tells whether the logits that this rank computes count: of equal ones, those of the first rank do."""
        return self.cut == "samples" or self.cp.rank == 0

    def largest_share(self, samples: int) -> int:
        """Number of samples of a micro-batch of so many that a rank has at most."""
        return -(-samples // self.sharing_samples.size)

    @property
    def coordinates(self) -> Coordinates:
        """This rank among those that hold the same layers, whole or cut."""
        weights, tp = self.dp_shard.size, self.held_by or self.tp
        sizes = Grid(dp_replicate=self.dp.size // weights, dp_shard=weights, cp=self.cp.size, tp=tp.size)
        replica, part = self.dp.rank // weights, self.dp_shard.rank
        return Coordinates(sizes, dp_replicate=replica, dp_shard=part, cp=self.cp.rank, tp=tp.rank)

    def shard(
        self,
        global_shape: tuple[int, ...],
        dim: int | None = None,
        blocks: int = 1,
        *,
        initialise: Initialiser,
        partial_gradient: bool = False,
    ) -> Shard:
        """Describes a parameter or buffer.

        Args:
            dim: the dimension that the tensor-parallel ranks cut; None where each of them holds the whole.
            blocks: see `megasnn.parallel.sharding.Cut`.
            partial_gradient: each tensor-parallel rank sees only its own channels' share of the gradient.
        """
        cuts: tuple[tuple[Axis, Cut], ...] = ()
        if dim is not None and self.held_by is None:
            cuts = (("tp", Cut(dim, blocks)),)
        partial = partial_gradient and self.tp.size > 1
        return Shard(global_shape, cuts, self.coordinates, partial, initialise)


_entered: ContextVar[BuildContext] = ContextVar("BuildContext")


@contextmanager
def building(context: BuildContext) -> Iterator[None]:
    """Around the building of layers: they find this context without being handed it."""
    token = _entered.set(context)
    try:
        yield
    finally:
        _entered.reset(token)


def is_building() -> bool:
    """Tells whether a model is being built, and layers find the context that they are built for."""
    return _entered.get(None) is not None


def context_for(context: BuildContext | None) -> BuildContext:
    """The context of a layer's constructor: the one that it was given, the one that is entered, or one rank's."""
    return context or _entered.get(None) or BuildContext()
