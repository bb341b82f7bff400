"""Pieces of a tensor hold each of its elements exactly once: found for any boxes, and soon for many."""

from __future__ import annotations

import random
import time
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest

from megasnn.checkpoint import pieces
from megasnn.checkpoint.pieces import covers_once
from megasnn.sharding import row_bounds

Box = tuple[tuple[int, ...], tuple[int, ...]]


def cut(draw: random.Random, box: Box, depth: int) -> list[Box]:
    """The box in parts, cut again and again along any dimension."""
    offsets, sizes = box
    dim = draw.randrange(len(sizes))
    if not depth or sizes[dim] < 2:
        return [box]
    first = draw.randint(1, sizes[dim] - 1)
    low = sizes[:dim] + (first,) + sizes[dim + 1 :]
    high = sizes[:dim] + (sizes[dim] - first,) + sizes[dim + 1 :]
    behind = offsets[:dim] + (offsets[dim] + first,) + offsets[dim + 1 :]
    return cut(draw, (offsets, low), depth - 1) + cut(draw, (behind, high), depth - 1)


def counted(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    held = np.zeros(shape, int)
    for offsets, sizes in boxes:
        held[tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))] += 1
    return bool((held == 1).all())


@pytest.mark.parametrize("most_starts", [0, 64], ids=["by-pairs", "by-starts"])
def test_it_is_found_for_any_boxes(most_starts: int) -> None:
    draw, found = random.Random(0), []
    with mock.patch.object(pieces, "_MOST_STARTS", most_starts):
        for _ in range(400):
            shape = tuple(draw.randint(1, 6) for _ in range(draw.randint(1, 4)))
            boxes = cut(draw, ((0,) * len(shape), shape), draw.randint(0, 4))
            if draw.random() < 0.5:  # another place, where it may lie on others
                number = draw.randrange(len(boxes))
                _, sizes = boxes[number]
                places = tuple(draw.randint(0, whole - size) for whole, size in zip(shape, sizes, strict=True))
                boxes[number] = places, sizes
            boxes.append(((0,) * len(shape), (0,) * len(shape)))
            found.append(covers_once(shape, boxes))
            assert found[-1] == counted(shape, boxes), (shape, boxes)
        assert covers_once((), [((), ())]) and not covers_once((), [((), ()), ((), ())]) and not covers_once((2,), [])
    assert 100 < sum(found) < 390


def test_a_thousand_ranks_with_rows_of_two_hundred_tensors() -> None:
    boxes = [((begin, 0), (end - begin, 512)) for begin, end in pairwise(row_bounds(2048, 1000))]
    began = time.monotonic()
    assert all(covers_once((2048, 512), boxes) for _ in range(200))
    twice = [*boxes[:-1], boxes[-3]]
    assert not covers_once((2048, 512), twice)
    assert time.monotonic() - began < 5
