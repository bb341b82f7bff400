"""A small stand-in for a partitioned model: every kind of shard there is, on any grid, with known values.

The value of every tensor follows from its global name (`known`), so that no rank needs to ask another what it
should hold after a load.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megasnn.checkpoint.optimizer_state import LocalState
from megasnn.common.grid import Coordinates, Grid
from megasnn.common.random import keyed_generator
from megasnn.layers.tensors import declare, materialise, sharded_tensors
from megasnn.parallel.sharding import Cut, Shard, ShardedTensor

ONE = Grid()
CONFIG = {"model": {"embed_dim": 16, "depth": 2}, "neuron": {"tau": 2.0, "v_reset": None}}
STATES = ("step", "exp_avg", "exp_avg_sq")
_ATTENTION = {"qkv": ((48, 16, 1), Cut(0, 3)), "projection": ((16, 16, 1), Cut(1)), "w": ((), None)}
LAYERS = {
    "stem": {"weight": ((8, 3, 3, 3), Cut(0)), "running_mean": ((8,), Cut(0)), "batches": ((), None)},
    "blocks.0": _ATTENTION,
    "blocks.1": _ATTENTION,
    "head": {"weight": ((5, 16), Cut(1)), "bias": ((5,), None)},
}
"""Shapes of tensors, and how tensor parallel ranks cut them."""


def layer(name: str, coordinates: Coordinates, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A layer on the meta device."""
    module = nn.Module()
    for tensor, (shape, cut) in LAYERS[name].items():
        partial, cuts = tensor == "w", () if cut is None else (("tp", cut),)
        shard = Shard(shape, cuts, coordinates, partial, lambda value, generator: value.normal_(generator=generator))
        if tensor == "batches":
            shard = Shard(shape, cuts, coordinates, initialise=lambda value, generator: value.zero_())
            declare(module, tensor, shard, torch.int64, is_parameter=False)
        else:
            declare(module, tensor, shard, dtype, is_parameter=tensor != "running_mean")
    return module


class Rank:
    """What one rank of a grid holds: its layers, their tensors, an AdamW over the parameters."""

    def __init__(self, grid: Grid = ONE, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        coordinates = grid.coordinates(dist.get_rank() if grid.world_size > 1 else 0)
        self.group = dist.group.WORLD if grid.world_size > 1 else None
        per_stage = len(LAYERS) // grid.pp
        mine = [*LAYERS][coordinates.pp * per_stage : (coordinates.pp + 1) * per_stage]
        layers = [(name, layer(name, coordinates, dtype)) for name in mine]
        materialise(layers, torch.device("cpu"), seed)
        self.tensors = list(sharded_tensors(layers))
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
