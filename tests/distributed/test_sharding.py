"""Every element of a tensor is held, and is one rank's to write, whichever axes cut it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megasnn.common.grid import AXES, HOLDING_AXES, Coordinates, Grid
from megasnn.layers import BuildContext, ConvNormNeuron
from megasnn.layers.layer import layer
from megasnn.models.build import describe_model
from megasnn.parallel.sharding import Cut, Initialiser, Piece, Shard, own_span
from megasnn.parallel_state import ParallelState
from megasnn.pipeline.chunk import build_chunks
from tests.models.networks import between


@st.composite
def cut_tensors(draw) -> tuple[Grid, tuple[int, ...], tuple]:
    """A grid, the shape of a tensor and its cuts, none, one, or both along any dimensions."""
    sizes = {axis: draw(st.integers(1, 3)) for axis in AXES}
    axes = draw(st.permutations(HOLDING_AXES))[: draw(st.integers(0, len(HOLDING_AXES)))]
    cuts = tuple((axis, Cut(draw(st.integers(0, 1)), draw(st.integers(1, 3)))) for axis in axes)
    shape = [draw(st.integers(1, 2)), draw(st.integers(1, 2))]
    for axis, cut in cuts:
        shape[cut.dim] *= cut.blocks * sizes[axis]
    return Grid(**sizes), tuple(shape), cuts


@settings(deadline=None, max_examples=200)
@given(cut_tensors())
def test_primary_ranks_hold_each_element_once_and_sharers_hold_the_same(described) -> None:
    grid, shape, cuts = described
    full = torch.arange(shape[0] * shape[1]).reshape(shape)
    written = torch.zeros(shape, dtype=torch.int64)
    parts: dict[tuple[Piece, ...], torch.Tensor] = {}
    for rank in grid.groups(*HOLDING_AXES)[0]:
        shard = Shard(shape, cuts, grid.coordinates(rank))
        local = shard.cut(full)
        assert tuple(local.shape) == shard.local_shape
        assert sum(torch.Size(piece.sizes).numel() for piece in shard.pieces()) == local.numel()
        assert torch.equal(parts.setdefault(tuple(shard.pieces()), local), local)
        if shard.is_primary():
            for piece in shard.pieces():
                piece.of_global(written).add_(1)
    assert bool((written == 1).all())
    assert sum(part.numel() for part in parts.values()) == full.numel()


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 5), st.integers(1, 2), st.integers(1, 3), st.integers(0, 7), st.booleans())
def test_rows_that_replicas_own_are_written_once(replicas, tensor, blocks, rows, is_number) -> None:
    """Also of rows that are cut in blocks before, and of a number, which is the first replica's."""
    grid = Grid(dp_replicate=replicas, tp=tensor)
    shape = () if is_number else (rows * blocks * tensor, 2)
    full = torch.arange(torch.Size(shape).numel()).reshape(shape)
    written = torch.zeros(shape, dtype=torch.int64)
    sizes = []
    for rank in range(grid.world_size):
        coordinates = grid.coordinates(rank)
        held = Shard(shape, () if is_number else (("tp", Cut(0, blocks)),), coordinates)
        owned = held.by_rows("dp_replicate")
        local = owned.cut(full)
        assert tuple(local.shape) == owned.local_shape and (replicas > 1 or owned == held)
        assert owned.is_cut("dp_replicate") == (replicas > 1)
        own = own_span(1 if is_number else rows * blocks, [replicas], coordinates.index("dp_replicate"))
        whole_here = held.cut(full).reshape(-1, 1 if is_number else 2)
        assert torch.equal(local.reshape(-1), whole_here[own.start : own.stop].reshape(-1))
        if owned.is_primary():
            sizes.append(local.numel())
            for piece in owned.pieces():
                piece.of_global(written).add_(1)
    assert bool((written == 1).all()) and sum(sizes) == full.numel()


def test_a_block_is_cut_by_itself_and_a_later_cut_divides_what_is_left() -> None:
    grid, full = Grid(dp_replicate=2, tp=2), torch.arange(24)
    first = Shard((24,), (("tp", Cut(0, 3)),), grid.coordinates(1))
    assert first.cut(full).tolist() == [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23]
    both = Shard((24,), (*first.cuts, ("dp_replicate", Cut(0))), grid.coordinates(3))
    assert both.cut(full).tolist() == [14, 15, 20, 21, 22, 23]
    assert (first.shared_axes, both.shared_axes) == (("dp_replicate",), ())


def test_who_answers_for_a_whole_tensor() -> None:
    grid = Grid(dp_replicate=2, tp=2)
    shards = [Shard((4,), coordinates=grid.coordinates(rank)) for rank in range(4)]
    assert [shard.is_primary() for shard in shards] == [True, False, False, False]


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ValueError, match=r"6, cannot be cut into 4 equal parts; choose a --tensor-model-parallel-size"):
        Shard((18,), (("tp", Cut(0, 3)),), Coordinates(Grid(tp=4)))
    with pytest.raises(ValueError, match="partial_gradient"):
        Shard((4,), (("tp", Cut(0)),), Coordinates(Grid(tp=2)), True)


def test_a_description_does_not_grow_with_the_ranks() -> None:
    coordinates = Coordinates(Grid(dp_replicate=10**12), dp_replicate=3 * 10**11)
    shard = Shard((10, 4), coordinates=coordinates).by_rows("dp_replicate")
    assert shard.local_shape == (1, 4) and [piece.global_offset for piece in shard.pieces()] == [(3, 0)]


def test_a_stage_gives_memory_to_its_own_parts_of_its_own_layers() -> None:
    drawn: list[int] = []

    def noted(number: int) -> Initialiser:
        def fill(tensor: torch.Tensor, generator: torch.Generator) -> None:
            drawn.append(number)
            tensor.zero_()

        return fill

    def units() -> list[Any]:
        return [layer(f"unit.{n}", ConvNormNeuron(4, 4, initialise=noted(n))) for n in range(3)]

    model, context = describe_model(between(units)), BuildContext(ParallelState.without_process_groups(Grid(tp=2)))
    bounds = [range(0, 2), range(2, 5)]  # the first and the last layer are of `between`
    chunk = build_chunks(model, bounds, [1], context, torch.device("cpu"), 0)[1]
    assert drawn == [1, 2]
    held = {entry.name: entry.tensor for entry in chunk.sharded_tensors()}
    assert held["unit.1.conv.weight"].numel() == 4 * 4 // 2
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in held.values())
