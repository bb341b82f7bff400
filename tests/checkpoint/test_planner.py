"""What a rank reads of a checkpoint that many ranks have written, and what ranks tell each other of it."""

from __future__ import annotations

from unittest import mock

import torch

from megasnn.checkpoint import planner
from megasnn.checkpoint.compare import marked, marks
from megasnn.checkpoint.pieces import SavedPiece, SavedTensor
from megasnn.checkpoint.planner import content_of, pieces_of, plan_reading
from megasnn.grid import Coordinates, Grid, Place
from megasnn.sharded_tensors import ShardedTensor
from megasnn.sharding import Cut, Shard

SHAPE = (3072, 2)
RANKS = 512


def _held(rank: int, ranks: int, blocks: int = 1) -> ShardedTensor:
    """Rows by the replica that owns them, of a tensor that two tensor parallel ranks have in blocks."""
    place = Place(Grid(data=ranks // 2, tensor=2), Coordinates(data=rank // 2, tensor=rank % 2))
    shard = Shard(SHAPE, (("tensor", Cut(0, blocks)),), place).by_rows("data")
    return ShardedTensor("w", torch.zeros(shard.local_shape), shard, True)


def _saved(ranks: int) -> SavedTensor:
    (tensor,) = content_of([pieces_of([_held(rank, ranks)], rank) for rank in range(ranks)], ["w"]).tensors
    return tensor


def test_of_many_pieces_those_are_looked_at_that_a_rank_needs() -> None:
    saved = _saved(RANKS)
    assert len(saved.pieces) == RANKS
    for rank, ranks, blocks in ((0, 6, 1), (5, 6, 3), (3, 4, 1), (300, RANKS, 1)):
        entry = _held(rank, ranks, blocks)
        whole = [each for piece in saved.pieces for box in entry.shard.pieces()
                 for each in planner._common(saved, piece, box, entry.tensor)]  # fmt: skip
        with mock.patch.object(planner, "_common", wraps=planner._common) as compared:
            found = plan_reading([entry], {"w": saved})
        assert [(each.piece, each.start) for each in found] == [(each.piece, each.start) for each in whole]
        assert [each.target.data_ptr() for each in found] == [each.target.data_ptr() for each in whole]
        assert sum(each.target.numel() for each in found) == entry.tensor.numel()
        boxes = len(entry.shard.pieces())
        assert compared.call_count <= boxes * len(whole)


def test_a_number_and_a_tensor_without_elements_are_read_as_well() -> None:
    for shape, elements in (((), 1), ((0, 3), 0)):
        for count in (1, 2):
            pieces = (SavedPiece((0,) * len(shape), shape, "f", 0, 0, "", 0),) * count
            entry = ShardedTensor("w", torch.zeros(shape), Shard(shape), True)
            found = plan_reading([entry], {"w": SavedTensor("w", shape, "float32", pieces)})
            assert sum(each.target.numel() for each in found) == elements * count


def test_ranks_tell_each_other_a_bit_for_each_tensor() -> None:
    saved = [f"blocks.{number}.weight" for number in range(1000)]
    bits = marks([saved[3], saved[999], "another"], saved)
    assert marked(bits, saved) == {saved[3], saved[999]} and marked(marks([], saved), saved) == set()
    assert marked(bits | marks([saved[0]], saved), saved) == {saved[0], saved[3], saved[999]}
    assert (marks(saved, saved).bit_length() + 7) // 8 == 125, "bytes, where their names are 17,000"
