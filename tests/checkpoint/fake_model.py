"""A small stand-in for a partitioned model: every kind of shard there is, on any grid, with known values.

The value of every tensor follows from its global name (`known`), so that no rank needs to ask another what it
should hold after a load.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megasnn.checkpoint.optimizer_state import LocalState
from megasnn.grid import Grid, Place
from megasnn.parallel.sharding import (
    Cut,
    Initialiser,
    Shard,
    ShardedTensor,
    declare,
    materialise,
    sharded_tensors,
)
from megasnn.random import keyed_generator

CONFIG = {"model": {"embed_dim": 16, "depth": 2}, "neuron": {"tau": 2.0, "v_reset": None}}
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Layout:
    """Ranks count tensor fastest, then data, then pipeline."""

    tensor: int = 1
    data: int = 1
    pipeline: int = 1

    @property
    def world_size(self) -> int:
        return self.tensor * self.data * self.pipeline


def _draw(tensor: Tensor, generator: torch.Generator) -> None:
    tensor.normal_(generator=generator)


def _zero(tensor: Tensor, generator: torch.Generator) -> None:
    tensor.zero_()


def _cut(shape: tuple[int, ...], place: Place, dim: int, blocks: int = 1, *, initialise: Initialiser) -> Shard:
    return Shard(shape, (("tp", Cut(dim, blocks)),), place, initialise=initialise)


class Stem(nn.Module):
    def __init__(self, place: Place, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        declare(self, "weight", _cut((8, 3, 3, 3), place, 0, initialise=_draw), dtype)
        declare(self, "running_mean", _cut((8,), place, 0, initialise=_zero), dtype, is_parameter=False)
        declare(self, "batches", Shard((), place=place, initialise=_zero), torch.int64, is_parameter=False)


class Attention(nn.Module):
    def __init__(self, place: Place, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        qkv = _cut((48, 16, 1), place, 0, 3, initialise=_draw)
        declare(self, "qkv", qkv, dtype)
        declare(self, "projection", _cut((16, 16, 1), place, 1, initialise=_draw), dtype)
        w = Shard((), (), place, True, _zero)
        declare(self, "w", w, dtype)


class Head(nn.Module):
    def __init__(self, place: Place, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        declare(self, "weight", _cut((5, 16), place, 1, initialise=_draw), dtype)
        declare(self, "bias", Shard((5,), place=place, initialise=_zero), dtype)


LAYERS = {"stem": Stem, "blocks.0": Attention, "blocks.1": Attention, "head": Head}


class Rank:
    """What one rank of a layout holds: its layers, their tensors, an AdamW over the parameters."""

    def __init__(self, layout: Layout, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        rank = dist.get_rank() if layout.world_size > 1 else 0
        grid = Grid(pp=layout.pipeline, dp_replicate=layout.data, tp=layout.tensor)
        place = grid.place(rank)
        self.group = dist.group.WORLD if layout.world_size > 1 else None
        per_stage = len(LAYERS) // layout.pipeline
        chosen = list(LAYERS.items())[place.pp * per_stage : (place.pp + 1) * per_stage]
        self.layers = [(name, kind(place, dtype)) for name, kind in chosen]
        materialise(self.layers, CPU, seed)
        self.tensors = list(sharded_tensors(self.layers))
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)

    def parameters(self) -> list[Tensor]:
        return [entry.tensor for entry in self.tensors if entry.is_parameter]

    @property
    def state(self) -> LocalState:
        return LocalState(self.tensors, self.optimizer)

    def everything(self) -> list[ShardedTensor]:
        return self.state.entries()

    def step(self) -> None:
        for parameter in self.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def fill(self) -> None:
        """Puts the known values everywhere, the optimizer's state included."""
        self.step()
        for entry in self.everything():
            entry.tensor.detach().copy_(expected(entry))

    def snapshot(self) -> dict[str, Tensor]:
        return {entry.name: entry.tensor.detach().clone() for entry in self.everything()}


def known(name: str, shape: tuple[int, ...]) -> Tensor:
    """The global value of a tensor: whole numbers below 2^20, exact in every type used here."""
    return torch.randint(0, 1 << 20, shape, generator=keyed_generator("known", name)).double()


def expected(entry: ShardedTensor) -> Tensor:
    """The part of the known value that this rank should hold."""
    return entry.shard.cut(known(entry.name, entry.shard.global_shape)).to(entry.tensor.dtype)


def wrong(rank: Rank) -> list[str]:
    """Names of tensors that differ in any bit from what they should hold; of states that are missing, too."""
    found = {entry.name: entry for entry in rank.everything()}
    states = [f"optimizer.{kind}.{entry.name}" for entry in rank.tensors if entry.is_parameter for kind in STATES]
    missing = [name for name in states if name not in found]
    return missing + [name for name, entry in found.items() if not torch.equal(entry.tensor, expected(entry))]


STATES = ("step", "exp_avg", "exp_avg_sq")
