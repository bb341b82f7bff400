"""Refusals of models and flags that name the place, and what to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import megasnn
from megasnn import Engine, layer
from megasnn.layers import ConvNormNeuron
from megasnn.layers.layer import Layer
from megasnn.models.build import describe_model
from tests.models.networks import between

SIZES = {"micro_batch_size": 4, "global_batch_size": 8, "train_iters": 2, "lr": 0.01}


class WithoutValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Applies(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def with_three(module: nn.Module, path: str, gain: float) -> None: ...


def of_a_part(module: nn.Module) -> None:
    nn.init.zeros_(module.conv.weight)


def raises(module: nn.Module) -> None:
    raise KeyError("gain")


def scripted() -> nn.Module:
    return torch.jit.script(nn.ReLU())


VALUES = {
    "item": lambda x: x * x.mean().item(),
    "mask": lambda x: x[x > 0].view(x.shape),
    "branch": lambda x: x if x.sum() > 0 else -x,
    "array": lambda x: torch.from_numpy(x.detach().numpy()),
    "list": lambda x: x * len(x.tolist()),
}
LAYERS: dict[str, tuple[Callable[[], Layer], str]] = {
    "no values": (lambda: layer("own", WithoutValues()), r"initial values of own\.scale: nothing initialises"),
    "deep": (
        lambda: layer("own", nn.Sequential(nn.Identity(), WithoutValues())),
        r"initial values of own\.1\.scale: nothing",
    ),
    "of three": (
        lambda: layer("own", nn.Conv2d(4, 4, 1), initialise=with_three),
        "own: initialise=.* a function of a module, or of a module and its path",
    ),
    "of three, cut": (
        lambda: layer("own", megasnn.shard(nn.Conv2d(4, 4, 1), initialise=with_three)),
        "megasnn.shard: initialise=.* a function of a module",
    ),
    "of a part": (
        lambda: layer("own", ConvNormNeuron(4, 4), initialise=of_a_part),
        r"own\.conv\.weight: AttributeError: .* no attribute 'conv'",
    ),
    "no function": (lambda: layer("own", nn.Conv2d(4, 4, 1), initialise=3), "own: initialise=3"),
    "raises": (lambda: layer("own", nn.Conv2d(4, 4, 1), initialise=raises), r"own\.weight: KeyError: 'gain'"),
    "scripted": (lambda: layer("own", scripted()), "own: .* TorchScript.* give the module from before the compilation"),
    "scripted part": (lambda: layer("own", nn.Sequential(scripted())), r"own: 0 \(.*TorchScript"),
    "scripted, cut": (lambda: layer("own", megasnn.shard(scripted())), "own: .* TorchScript"),
    "scripted beside a segment": (
        lambda: layer("own", nn.Sequential(megasnn.ConvNormNeuron(4, 4), scripted())),
        r"own: 1 \(.*TorchScript",
    ),
}


@pytest.mark.parametrize("case", LAYERS)
def test_a_layer_is_refused_by_name(case: str) -> None:
    make, text = LAYERS[case]
    with pytest.raises(ValueError, match=text):
        Engine(between(lambda: [make()]), **SIZES)


@pytest.mark.parametrize("case", VALUES)
def test_a_block_that_looks_at_values_is_told_what_to_write(case: str) -> None:
    with pytest.raises(ValueError, match="own, given .* must not depend on values") as error:
        describe_model(between(lambda: [layer("own", Applies(VALUES[case]))]))
    assert "meta" not in str(error.value) and "test_ways_out.py" in str(error.value)


def test_a_block_with_tensors_of_another_device_is_told_so() -> None:
    with pytest.raises(ValueError, match="device=x.device"):
        describe_model(between(lambda: [layer("own", Applies(lambda x: x + torch.ones(4, 4)))]))


def test_flags_of_an_engine_name_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = between(tuple)
    with pytest.raises(ValueError, match=r"time_steps is the model's: .* Between\(time_steps=4\)"):
        Engine(model, **SIZES, time_steps=4)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="--micro-batch-size 16, .* or a larger --context-parallel-size"):
        Engine(model, **{**SIZES, "micro_batch_size": 32, "global_batch_size": 32})
    with pytest.raises(ValueError, match="a larger --global-batch-size"):
        Engine(model, **{**SIZES, "micro_batch_size": 1, "global_batch_size": 1})
