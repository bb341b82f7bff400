"""What a user has set on plain modules stays: initial values, frozen weights, attributes, hooks, torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megasnn
from megasnn.layers import BuildContext, ConvNormNeuron, MeanLinear
from megasnn.models.building import describe
from megasnn.models.layer import Layer, layer
from megasnn.models.model import Model
from megasnn.pipeline.chunk import PipelineChunk, build_chunk
from tests.models.networks import CLASSES
from tests.models.steps import one_step
from tests.parity.ranks import Layout, assemble

CPU = torch.device("cpu")
KEPT: list[Any] = []


def _part(kind: str) -> nn.Sequential:
    part = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    if kind == "frozen":
        part[0].weight.requires_grad_(False)
        part[1].bias.requires_grad_(False)
    if kind == "tagged":
        part[0].note, part[0].weight.note, part[1].bias.note = "a", ["b"], "c"
        part[0].register_forward_hook(lambda module, given, y: KEPT.append((module.note, tuple(y.shape))))
    if kind == "hooked":
        part[0].weight.register_hook(lambda grad: KEPT.append(float(grad.abs().sum())))
    if kind == "compiled":
        return torch.compile(part, backend=_backend)
    return part


def _backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    KEPT.append("compiled")
    return graph.forward


def _ones(module: nn.Module) -> None:
    if isinstance(module, (nn.Conv2d, nn.BatchNorm2d)):
        nn.init.ones_(module.weight)
    if isinstance(module, nn.BatchNorm2d):
        nn.init.constant_(module.bias, 0.25)


@dataclass(frozen=True, kw_only=True)
class Around(Model):
    """A plain part between layers of ours, whole or given to `shard`."""

    image_size: int = 6
    time_steps: int = 2
    num_classes: int = CLASSES
    kind: str = "usual"
    cut: bool = False

    def layers(self) -> Iterable[Layer]:
        initialise = _ones if self.kind == "initialised" else None
        yield layer("stem", ConvNormNeuron(3, 8))
        part = _part(self.kind)
        if self.cut:
            yield layer("part", megasnn.shard(part, initialise=initialise))
        else:
            yield layer("part", part, initialise=initialise)
        yield layer("head", MeanLinear(8, CLASSES))


def chunk_of(model: Model) -> PipelineChunk:
    return build_chunk(describe(model), [range(3)], 0, BuildContext(), CPU, 0)


def forward_backward(model: Model) -> PipelineChunk:
    chunk = chunk_of(model)
    KEPT.clear()
    images = torch.rand(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    chunk(images, range(2)).square().sum().backward()
    return chunk


BOTH = pytest.mark.parametrize("cut", [False, True], ids=["whole", "shard"])


@BOTH
def test_a_users_initial_values_come_before_the_modules_own(cut: bool) -> None:
    conv, norm = chunk_of(Around(kind="initialised", cut=cut))[1][:2]
    assert torch.equal(conv.weight, torch.ones(8, 8, 3, 3)) and torch.equal(norm.bias, torch.full((8,), 0.25))
    usual = chunk_of(Around(cut=cut))[1][0].weight
    assert usual.std() > 0.05 and torch.equal(usual, chunk_of(Around(cut=not cut))[1][0].weight)


@BOTH
def test_frozen_weights_stay_frozen_and_the_others_learn_the_same(ranks, cut: bool) -> None:
    layout = Layout(tensor=2)
    gradients = [
        assemble(ranks(2, one_step, Around(kind=kind, cut=cut), layout), "gradients") for kind in ("frozen", "usual")
    ]
    frozen, usual = gradients
    assert usual.keys() - frozen.keys() == {"part.0.weight", "part.1.bias"}
    for name, value in frozen.items():
        assert torch.equal(value, usual[name]) and value.abs().max() > 0, name


@BOTH
def test_attributes_and_hooks_of_modules_stay(cut: bool) -> None:
    conv, norm = forward_backward(Around(kind="tagged", cut=cut))[1][:2]
    assert (conv.note, conv.weight.note, norm.bias.note) == ("a", ["b"], "c")
    assert [note for note, shape in KEPT] == ["a"] and KEPT[0][1][-3:] == (8, 6, 6)


def test_hooks_of_whole_parameters_see_the_gradient_and_cut_ones_refuse_them() -> None:
    chunk = forward_backward(Around(kind="hooked"))
    assert KEPT == [float(chunk[1][0].weight.grad.abs().sum())] and KEPT[0] > 0
    with pytest.raises(ValueError, match=r"part: 0\.weight has a hook, .* put it on a module"):
        describe(Around(kind="hooked", cut=True))


def test_a_compiled_module_is_a_layer_with_the_same_names_and_values() -> None:
    compiled = forward_backward(Around(kind="compiled"))
    assert "compiled" in KEPT
    usual = forward_backward(Around())
    found = dict(compiled.named_parameters())
    assert found.keys() == dict(usual.named_parameters()).keys()
    for name, parameter in usual.named_parameters():
        assert torch.equal(found[name], parameter) and torch.equal(found[name].grad, parameter.grad), name
    with pytest.raises(ValueError, match="the network is compiled: torch.compile is for plain layers"):
        describe(Around(kind="compiled", cut=True))


def test_sizes_that_a_formula_divides_by_are_named() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Divided(Model):
        width: int = 0

        def layers(self) -> Iterable[Layer]:
            yield layer("stem", ConvNormNeuron(3, 8))
            yield layer("head", MeanLinear(64 // self.width, self.num_classes))

    with pytest.raises(ValueError, match="the layer behind stem: .*by zero .*--num-classes 10 --width 0"):
        describe(Divided())
