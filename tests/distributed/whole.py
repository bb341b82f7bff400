"""What the tests of sharded layers share: groups over all ranks, layers with given global weights, whole tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megasnn.common.grid import Grid
from megasnn.common.random import philox, philox_key
from megasnn.layers import BuildContext, Numerics
from megasnn.layers.shape_inference import BoundsInference, mark_spikes
from megasnn.layers.tensors import materialise, sharded_tensors
from megasnn.parallel.sharding import ShardedTensor
from megasnn.parallel_state import Group, ParallelState
from tests.parts import Part, gradients


def everybody(name: str = "tp") -> Group:
    """The group of all ranks."""
    size = dist.get_world_size()
    return Group(name) if size == 1 else Group(name, tuple(range(size)), dist.get_rank(), dist.group.WORLD)


def state_of(group: Group) -> ParallelState:
    """State of ranks along one axis, which have this group."""
    axis = {"dp": "dp_replicate"}.get(group.name, group.name)
    state = ParallelState.without_process_groups(Grid(**{axis: group.size}), group.rank)
    return replace(state, **{group.name: group})


def context(group: Group, dtype: torch.dtype = torch.float64) -> BuildContext:
    return BuildContext(state_of(group), Numerics(dtype, dtype))


def nothing(tensor: Tensor, generator: torch.Generator) -> None:
    """An initialiser for weights that the test sets."""


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def spikes(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return (random(*shape, seed=seed) > 0.3).to(dtype)


def drawn(purpose: str, name: str, sample: int, count: int, seed: int = 0) -> Tensor:
    """The first numbers in [0, 1) that a layer of dropout draws for a sample."""
    low, high = philox_key(seed, purpose, name)
    words = torch.stack(philox(torch.arange(-(-count // 4)), 0, 0, 0, sample ^ low, high), dim=1)
    return (words.flatten()[:count] >> 8).double() / 2**24


def mine(x: Tensor, group: Group, dim: int = 2, blocks: int = 1) -> Tensor:
    """This rank's channels of a whole tensor, of each block."""
    parts = [block.chunk(group.size, dim)[group.rank] for block in x.chunk(blocks, dim)]
    return torch.cat(parts, dim).clone()


def channels_last(x: Tensor) -> Tensor:
    """[T, N, C, *space] with channels last in memory."""
    return x.movedim(2, -1).contiguous().movedim(-1, 2)


def build(layers: dict[str, nn.Module], weights: dict[str, Tensor]) -> list[ShardedTensor]:
    """Gives memory to layers, and the given global values to their tensors (those not given keep initial ones)."""
    materialise(layers.items(), torch.device("cpu"), seed=0)
    tensors = list(sharded_tensors(layers.items()))
    with torch.no_grad():
        for entry in tensors:
            if entry.name in weights:
                entry.tensor.copy_(entry.shard.cut(weights[entry.name].to(entry.tensor.dtype)))
    return tensors


@torch.no_grad()
def fill_mantissas(module: nn.Module) -> None:
    """Gives weights that were drawn in float32 all 53 bits of float64, as training does after a step.

    Sums of spikes with float32 values are exact in float64, in any order: what rounds otherwise would not show.
    """
    for parameter in module.parameters():
        parameter.mul_(1.1)


def digests(values: Mapping[str, Tensor]) -> dict[str, str]:
    """Of the bits of each tensor."""
    return {name: hashlib.sha1(value.detach().numpy().tobytes()).hexdigest() for name, value in values.items()}


# --- layers of which a rank has its channels


def cut_part(name: str, local: Tensor, group: Group, blocks: int = 1) -> Part:
    """This rank's channels of a tensor `[T, N, C, *space]`, of each block, with their places in it."""
    of_rank, channels = local.shape[2] // blocks, local.shape[2] * group.size
    starts = [block * channels // blocks + group.rank * of_rank for block in range(blocks)]
    offsets = [(0, 0, start, *[0] * (local.ndim - 3)) for start in starts]
    shape = (*local.shape[:2], channels, *local.shape[3:])
    return name, shape, list(zip(offsets, local.detach().chunk(blocks, 2), strict=True))


def whole_part(name: str, x: Tensor) -> Part:
    return name, tuple(x.shape), [((0,) * x.ndim, x.detach())]


def run(
    layer: nn.Module,
    given: Mapping[str, Tensor],
    x: Tensor,
    group: Group,
    *,
    whole_output: bool = False,
    holds_spikes: bool = False,
    order: Callable[[Tensor], Tensor] = channels_last,
) -> list[Part]:
    """A layer's output "y", and the gradients of the input "x" and of the parameters, as far as this rank has them.

    Args:
        given: global values of its tensors. x: the whole input, which every rank has where its channels do not divide.
        order: of the input in memory.
    """
    tensors = build({"layer": layer}, {f"layer.{name}": value for name, value in given.items()})
    whole_input = x.shape[2] % group.size > 0
    own = order(x.clone() if whole_input else mine(x, group)).requires_grad_()
    with BoundsInference():
        meta = own.detach().to("meta")
        layer(mark_spikes(meta) if holds_spikes else meta)
    y = layer(own)
    shape = (*y.shape[:2], y.shape[2] * (1 if whole_output else group.size), *y.shape[3:])
    weights = random(*shape, seed=50)
    (y * (weights if whole_output else mine(weights, group))).sum().backward()
    found = [whole_part("y", y) if whole_output else cut_part("y", y, group), *gradients(tensors)]
    return [*found, whole_part("x", own.grad) if whole_input else cut_part("x", own.grad, group)]


def by_one(layer: Callable[[Tensor], Tensor], parameters: Mapping[str, Tensor], x: Tensor) -> dict[str, Tensor]:
    """The same by a layer of torch's, which has these parameters."""
    x = x.clone().requires_grad_()
    y = layer(x)
    (y * random(*y.shape, seed=50)).sum().backward()
    return {"y": y.detach(), "x": x.grad, **{f"layer.{name}": value.grad for name, value in parameters.items()}}


def require_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], about: object, **close: float) -> None:
    assert found.keys() == expected.keys(), about
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, **close, msg=lambda text, at=(about, name): f"{at}: {text}")
