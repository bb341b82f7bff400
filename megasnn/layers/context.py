"""Build context: ranks, numerics and shared objects for a model's layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

import torch

from megasnn.common.grid import Axis, ContextCut
from megasnn.config import PretrainConfig
from megasnn.config.training import PRECISIONS
from megasnn.kernels import NeuronSpec
from megasnn.kernels.products import can_be_sparse
from megasnn.layers.weight_grad import CastWeights, WeightGradients
from megasnn.parallel.sharding import Cut, Initialiser, Shard
from megasnn.parallel_state import Group, ParallelState


@dataclass(frozen=True)
class Numerics:
    """Number types and kernels.

    Attributes:
        dtype: for parameters, buffers, optimizer state and gradients.
        compute_dtype: for activations and products; bfloat16 with `--precision bf16`, otherwise `dtype`.
        neuron_backend: a name in megasnn.kernels.BACKENDS, or "auto".
        sparse_products: allow sums over spikes in place of products, if few neurons fire.
        traceable: torch functions only, for torch.export. One rank, without gradients.
        rounds: float32 products may round operands to TF32.
    """

    dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype = torch.float32
    neuron_backend: str = "auto"
    sparse_products: bool = False
    traceable: bool = False
    rounds: bool = False

    @classmethod
    def of_run(cls, config: PretrainConfig, device: torch.device) -> Numerics:
        types = PRECISIONS[config.training.precision]
        products = getattr(torch, types.products)
        return cls(
            dtype=getattr(torch, types.weights),
            compute_dtype=products,
            neuron_backend=config.neuron.neuron_backend,
            sparse_products=config.training.sparse_products == "auto" and can_be_sparse(device, products),
            rounds=types.rounds,
        )


@dataclass(frozen=True)
class BuildContext:
    """Ranks, numerics and shared objects for one model's layers.

    Attributes:
        state: one rank by default.
        context_cut: context-parallel ranks divide a micro-batch by samples, by pixel rows or by tokens.
        time_steps: T. Neurons repeat a single time step T times.
        stateful: keep potentials between calls, until a reset (truncated backpropagation through time).
        seed: key for random numbers (dropout).
        is_whole: every tensor-parallel rank computes the whole layer.
    """

    state: ParallelState = field(default_factory=ParallelState.without_process_groups)
    numerics: Numerics = Numerics()
    context_cut: ContextCut = "samples"
    neuron: NeuronSpec = field(default_factory=NeuronSpec)
    time_steps: int = 1
    stateful: bool = False
    seed: int = 0
    # One queue and one cache for all layers, so that the executor defers, and the step casts, all of them at once.
    weight_gradients: WeightGradients = field(default_factory=WeightGradients)
    cast_weights: CastWeights = field(default_factory=CastWeights)
    is_whole: bool = False

    @property
    def tp(self) -> Group:
        """Ranks that divide a layer's channels; this rank alone for a whole layer."""
        return Group("tp") if self.is_whole else self.state.tp

    @property
    def dtype(self) -> torch.dtype:
        return self.numerics.dtype

    @property
    def sample_group(self) -> Group:
        return self.state.cp if self.context_cut == "samples" else Group("cp")

    @property
    def row_group(self) -> Group | None:
        """Ranks that divide images by rows; None for whole images."""
        return self.state.cp if self.context_cut == "rows" and self.state.cp.size > 1 else None

    @property
    def token_group(self) -> Group | None:
        """Ranks that divide sequences by tokens; None for whole sequences."""
        return self.state.cp if self.context_cut == "tokens" and self.state.cp.size > 1 else None

    @property
    def counts_logits(self) -> bool:
        # Ranks that divide rows have equal logits, which count once. Ranks that divide tokens have their own.
        return self.context_cut != "rows" or self.state.cp.rank == 0

    @property
    def counts_samples(self) -> bool:
        """True on one of the ranks with the same samples."""
        return self.context_cut == "samples" or self.state.cp.rank == 0

    def largest_share(self, samples: int) -> int:
        # Parts differ by one sample at most: `own_span` divides them.
        return -(-samples // self.sample_group.size)

    def replicated(self) -> BuildContext:
        return self if self.tp.size == 1 else replace(self, is_whole=True)

    def shard(
        self,
        global_shape: tuple[int, ...],
        dim: int | None = None,
        blocks: int = 1,
        *,
        even: bool = True,
        initialise: Initialiser,
        partial_gradient: bool = False,
    ) -> Shard:
        """Describes a parameter or buffer.

        Args:
            dim: dimension that tensor parallelism divides; None for none.
            blocks, even: see `megasnn.parallel.sharding.Cut`.
            partial_gradient: a tensor-parallel rank's gradient is from its own channels only.
        """
        cuts: tuple[tuple[Axis, Cut], ...] = ()
        if dim is not None and not self.is_whole:
            cuts = (("tp", Cut(dim, blocks, even)),)
        is_partial = partial_gradient and self.tp.size > 1
        return Shard(global_shape, cuts, self.state.coordinates, is_partial, initialise)


# A context variable: layers made in a user's `Model.layers` need no argument, and threads do not see each other's.
_entered: ContextVar[BuildContext] = ContextVar("BuildContext")


@contextmanager
def building(context: BuildContext) -> Iterator[None]:
    """Makes a context the default inside.

    `megasnn.models.build` sets it around `Model.layers`, and where it converts plain modules.
    """
    token = _entered.set(context)
    try:
        yield
    finally:
        _entered.reset(token)


def is_building() -> bool:
    return _entered.get(None) is not None


def context_for(context: BuildContext | None) -> BuildContext:
    """The argument; else the context in which `megasnn.models.build` calls `Model.layers`; else one rank."""
    return context or _entered.get(None) or BuildContext()
