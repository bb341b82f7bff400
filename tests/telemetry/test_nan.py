from __future__ import annotations

from math import inf, nan

import torch
from torch import Tensor, nn

from megasnn.engine.debug import NonFinite, first_non_finite, watched_outputs


def test_first_bad_tensor_with_its_counts() -> None:
    named = [
        ("fine", torch.ones(3)),
        ("whole numbers", torch.ones(3, dtype=torch.int64)),
        ("bad", torch.tensor([nan, 1.0, inf, -inf])),
        ("worse", torch.full((2,), nan)),
    ]
    assert first_non_finite(named) == NonFinite("bad", nan=1, infinite=2, total=4)
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


def test_the_layer_whose_nan_a_neuron_hides_is_found_and_no_hook_stays() -> None:
    network = Network()
    with torch.no_grad():
        network.second.weight[0, 0] = nan
        network.third.bias.fill_(inf)
    with watched_outputs([*network.named_children()]) as found:
        network(torch.ones(5, 2))
    assert [each.name for each in found] == ["second", "third"]
    assert found[0] == NonFinite("second", nan=5, infinite=0, total=10)
    with watched_outputs([("fire", network.fire)]) as found:
        network(torch.ones(5, 2))
    assert found == [] and not any(module._forward_hooks for module in network.modules())
