"""ParallelLinear in all styles against F.linear in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megasnn.kernels import spike_codec as codec
from megasnn.kernels.spike_codec import remember_bits
from megasnn.layers import ParallelLinear
from megasnn.layers.shape_inference import mark_spikes
from megasnn.parallel_state import Group
from tests.distributed.whole import assemble, build, context, everybody, mine, nothing, parts, random, spikes

T, N, INPUTS, HIDDEN, OUTPUTS = 2, 3, 8, 16, 12
WEIGHTS = {
    "first.weight": random(HIDDEN, INPUTS),
    "first.bias": random(HIDDEN, seed=1),
    "second.weight": random(OUTPUTS, HIDDEN, seed=2),
    "second.bias": random(OUTPUTS, seed=3),
}
STYLES = ["column-row", "row only", "column with spikes"]


def _whole_input(style: str) -> torch.Tensor:
    return spikes(T, N, INPUTS) if "spikes" in style else random(T, N, INPUTS, seed=4)


def _run(style: str) -> list:
    group = everybody()
    inner = context(group)
    x = mine(_whole_input(style), group).requires_grad_()
    if style == "row only":
        layers = {"second": ParallelLinear(INPUTS, OUTPUTS, inner, initialise=nothing)}
    else:
        layers = {
            "first": ParallelLinear(INPUTS, HIDDEN, inner, initialise=nothing, style="column"),
            "second": ParallelLinear(HIDDEN, OUTPUTS, inner, initialise=nothing),
        }
    weights = {**WEIGHTS, "second.weight": WEIGHTS["second.weight"][:, : INPUTS if style == "row only" else HIDDEN]}
    tensors = build(layers, weights)
    if "spikes" in style:
        layers["first"](mark_spikes(x.to("meta"), 1))
    y = x
    for layer in layers.values():
        y = torch.tanh(layer(y))
    # The output is whole, and every rank takes the same loss of it.
    (y * random(T, N, OUTPUTS, seed=5)).sum().backward()
    start = group.rank * INPUTS // group.size
    return parts(tensors, gradients=True) + [
        ("x", (T, N, INPUTS), [((0, 0, start), x.grad)]),
        ("y", (T, N, OUTPUTS), [((0, 0, 0), y.detach())]),
    ]


def _run_all() -> list:
    return [_run(style) for style in STYLES]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_outputs_and_gradients_are_those_of_one_rank(ranks, size) -> None:
    everyone = ranks(size, _run_all)
    for number, style in enumerate(STYLES):
        expected, found = _truth(style), assemble([rank[number] for rank in everyone])
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=lambda t, n=name: f"{n}: {t}")


def _truth(style: str) -> dict[str, torch.Tensor]:
    names = [name for name in WEIGHTS if style != "row only" or name.startswith("second")]
    weights = {name: WEIGHTS[name].clone() for name in names}
    if style == "row only":
        weights["second.weight"] = weights["second.weight"][:, :INPUTS]
    for value in weights.values():
        value.requires_grad_()
    x = _whole_input(style).requires_grad_()
    y = x
    for layer in ("first", "second"):
        if f"{layer}.weight" in weights:
            y = torch.tanh(F.linear(y, weights[f"{layer}.weight"], weights[f"{layer}.bias"]))
    (y * random(T, N, OUTPUTS, seed=5)).sum().backward()
    return {"x": x.grad, "y": y.detach(), **{name: value.grad for name, value in weights.items()}}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(inputs=6, outputs=8), "in_features 6 .*--tensor-model-parallel-size 4"),
        (dict(inputs=8, outputs=6, style="column"), "out_features 6 .*--tensor-model-parallel-size 4"),
        (dict(inputs=8, outputs=8, style="both"), "style must be"),
    ],
)
def test_refusals(arguments, message) -> None:
    options = dict(arguments)
    sizes = options.pop("inputs"), options.pop("outputs")
    with pytest.raises(ValueError, match=message):
        ParallelLinear(*sizes, context(Group("tp", (0, 1, 2, 3), 1)), initialise=nothing, **options)
    # A row layer's outputs are whole on every rank: any number of classes will do.
    ParallelLinear(8, 5, context(Group("tp", (0, 1, 2, 3), 1)), initialise=nothing)


def test_spikes_that_know_their_bits_are_not_packed_again(monkeypatch) -> None:
    layer = ParallelLinear(INPUTS, OUTPUTS, initialise=nothing)
    build({"layer": layer}, {"layer.weight": WEIGHTS["second.weight"][:, :INPUTS], "layer.bias": random(OUTPUTS)})
    x = spikes(T, N, INPUTS)
    layer(mark_spikes(x.to("meta"), 1))

    def gradient_of(x: torch.Tensor) -> torch.Tensor:
        layer.weight.grad = None
        layer(x).sum().backward()
        return layer.weight.grad

    expected, packed = gradient_of(x), codec.pack_bits(x)
    monkeypatch.setattr(codec, "pack_bits", None)
    assert torch.equal(gradient_of(remember_bits(x, packed)), expected)
    turned = remember_bits(x.transpose(0, 1).contiguous().transpose(0, 1), packed)  # bits of another order
    with pytest.raises(TypeError):
        layer(turned)
