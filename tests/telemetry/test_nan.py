from __future__ import annotations

from math import inf, nan

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megasnn.non_finite import NonFinite, NonFiniteWatch, earliest, first_non_finite


def test_first_bad_tensor_with_its_counts():
    named = [
        ("fine", torch.ones(3)),
        ("whole numbers", torch.ones(3, dtype=torch.int64)),
        ("bad", torch.tensor([nan, 1.0, inf, -inf])),
        ("worse", torch.full((2,), nan)),
    ]
    found = first_non_finite(named)
    assert found == NonFinite("bad", nan=1, infinite=2, total=4)
    assert str(found) == "bad: 1 nan and 2 infinite of 4 values"
    assert first_non_finite(named[:2]) is None


class Fire(nn.Module):
    def forward(self, x: Tensor) -> dict[str, tuple[Tensor, ...]]:
        return {"spikes": ((x >= 1).float(),)}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2)
        self.fire = Fire()
        self.third = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.fire(self.second(self.first(x)))["spikes"][0])


def test_watch_finds_the_layer_whose_nan_the_neuron_hides():
    network = Network()
    with torch.no_grad():
        network.second.weight[0, 0] = nan
        network.third.bias.fill_(inf)
    with NonFiniteWatch(network.named_children()) as watch:
        network(torch.ones(5, 2))
    assert watch.found == NonFinite("second", nan=5, infinite=0, total=10)
    with NonFiniteWatch([("fire", network.fire)]) as watch:
        network(torch.ones(5, 2))
    assert watch.found is None


def _find(stages: list[int], bad: list[bool]) -> NonFinite | None:
    rank = dist.get_rank()
    found = NonFinite(f"layer of rank {rank}", 1, 0, 2) if bad[rank] else None
    return earliest(found, stages[rank], dist.group.WORLD)


def test_all_ranks_name_the_lowest_stage(ranks):
    for found in ranks(3, _find, [0, 2, 1], [False, True, True]):
        assert found is not None and found.name == "layer of rank 2"
    assert ranks(3, _find, [0, 2, 1], [False] * 3) == [None] * 3
