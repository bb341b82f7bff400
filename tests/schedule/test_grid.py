import pytest
from hypothesis import given
from hypothesis import strategies as st

from megasnn.batching import micro_batch_counts, micro_batch_sizes, micro_batches_of
from megasnn.grid import Grid, Place

sizes = st.integers(1, 5)


def test_the_order_is_megatrons() -> None:
    grid = Grid.fit(16, tp=2, pp=2)
    assert grid == Grid(pp=2, dp_replicate=4, tp=2)
    assert grid.groups("tp")[0] == [0, 1]
    assert grid.groups("dp_replicate")[0] == [0, 2, 4, 6]
    assert grid.groups("pp")[0] == [0, 8]
    assert grid.groups("tp", "pp")[0] == [0, 1, 8, 9]


def test_replicas_that_share_weights_are_neighbours() -> None:
    grid = Grid.fit(16, tp=2, pp=1, dp_shard=4)
    assert grid == Grid(dp_replicate=2, tp=2, dp_shard=4) and grid.replicas == 8
    assert grid.groups("dp_shard")[:3] == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14]]
    assert grid.groups("dp_replicate")[0] == [0, 8]
    assert grid.groups("dp_replicate", "dp_shard")[0] == [0, 2, 4, 6, 8, 10, 12, 14]
    assert grid.place(13) == Place(grid, dp_replicate=1, dp_shard=2, tp=1)
    with pytest.raises(ValueError, match="--weight-parallel-size 3"):
        Grid.fit(16, tp=2, dp_shard=3)


@given(sizes, sizes, sizes, st.sets(st.sampled_from(["pp", "dp_replicate", "tp"])))
def test_groups_part_the_world_by_the_other_axes(pipeline: int, data: int, tensor: int, axes: set) -> None:
    grid = Grid(pp=pipeline, dp_replicate=data, tp=tensor)
    groups = grid.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(grid.world_size))
    for group in groups:
        assert group == sorted(group)
        for axis in {"pp", "dp_replicate", "tp"} - axes:
            assert len({grid.place(rank).index(axis) for rank in group}) == 1


def test_a_world_that_does_not_fit_prints_every_factor() -> None:
    with pytest.raises(ValueError, match="6 .* 4 = --pipeline-model-.*-size 2 .* --tensor-model-parallel-size 2"):
        Grid.fit(6, tp=2, pp=2)


def test_impossible_grids_are_refused() -> None:
    with pytest.raises(ValueError, match="--tensor-model-parallel-size"):
        Grid.fit(4, tp=0)
    with pytest.raises(ValueError, match="world size 0"):
        Grid.fit(0)
    with pytest.raises(ValueError):
        Grid(pp=2, dp_replicate=2).place(4)


@given(st.integers(1, 200), st.integers(1, 50), st.integers(1, 8))
def test_micro_batches_are_shared_out_whole(samples: int, micro: int, replicas: int) -> None:
    micro = min(micro, samples)
    cut = micro_batch_sizes(samples, micro)
    assert sum(cut) == samples and set(cut[:-1]) <= {micro} and 1 <= cut[-1] <= micro
    shares = [micro_batches_of(len(cut), replicas, rank) for rank in range(replicas)]
    assert [index for share in shares for index in share] == list(range(len(cut)))
    counts = sorted({len(share) for share in shares}, reverse=True)
    assert micro_batch_counts(samples, micro, replicas) == tuple(counts) and counts[0] - counts[-1] <= 1
