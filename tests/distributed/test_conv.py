"""ParallelConv on several ranks against nn.Conv2d and nn.Conv1d in float64: two column-row pairs in a row, and each
option alone."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasnn.kernels.spike_codec import Content
from megasnn.layers import ParallelConv
from megasnn.layers.weight_grad import CastWeights
from megasnn.parallel.collectives import from_rows, gather_columns, sum_and_scatter_columns, to_rows
from megasnn.parallel.traffic import statistics
from megasnn.parallel_state import Group
from tests.distributed.whole import (
    assemble,
    build,
    channels_last,
    context,
    everybody,
    mine,
    nothing,
    parts,
    random,
    spikes,
)

T, N, SIDE = 2, 3, 5
CLOSE = dict(rtol=1e-11, atol=1e-11)


class _Fire(torch.autograd.Function):
    """A threshold with a smooth gradient: what lies between two convolutions of a spiking network."""

    @staticmethod
    def forward(ctx, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return (y > 0.1).to(y.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad / (1 + y * y)


class _Gather(torch.autograd.Function):
    """Forward: channels of all ranks side by side. Backward: the gradients summed, each rank keeps its channels."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        full, _ = gather_columns(to_rows(x), group, Content.DENSE)
        return from_rows(full, x.shape)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return from_rows(sum_and_scatter_columns(to_rows(grad), ctx.group, "backward")(), grad.shape), None


# Two pairs of column and row, with bias, stride and a pointwise convolution among them.
CHAIN: dict[str, dict] = {
    "a": dict(channels=(8, 16), kernel_size=3, padding=1, style="column", bias=True),
    "b": dict(channels=(16, 8), kernel_size=3, padding=1, stride=2, style="row", bias=True),
    "c": dict(channels=(8, 24), kernel_size=1, pointwise=True, style="column", blocks=3),
    "d": dict(channels=(24, 8), kernel_size=1, pointwise=True, style="row", bias=True),
}


def _weights() -> dict[str, Tensor]:
    values = {}
    for seed, (name, spec) in enumerate(CHAIN.items()):
        inputs, outputs = spec["channels"]
        kernel = (1,) if spec.get("pointwise") else (spec["kernel_size"],) * 2
        values[f"{name}.weight"] = random(outputs, inputs, *kernel, seed=seed) / 4
        if spec.get("bias"):
            values[f"{name}.bias"] = random(outputs, seed=10 + seed)
    return values


def _chain(group: Group, layout, frozen: tuple[str, ...] = ()) -> tuple[list, list]:
    """Gradients of all tensors, and of the input."""
    layers: dict[str, nn.Module] = {}
    for name, spec in CHAIN.items():
        options = {key: value for key, value in spec.items() if key not in ("channels", "kernel_size")}
        layers[name] = ParallelConv(
            *spec["channels"],
            spec["kernel_size"],
            context(group),
            initialise=nothing,
            content=Content.SPIKES,
            **options,
        )
    for name in frozen:
        layers[name].weight.requires_grad_(False)
    tensors = build(layers, _weights())
    assert [e.name for e in tensors if not e.tensor.requires_grad] == [f"{name}.weight" for name in frozen]
    x = layout(mine(spikes(T, N, 8, SIDE, SIDE), group)).requires_grad_()
    y = _Fire.apply(layers["a"](x))
    y = _Fire.apply(layers["b"](y))
    y = layers["c"](y)
    y = layers["d"](_in_order(_Fire.apply(y), group))
    (y * mine(random(*y.shape[:2], 8, *y.shape[3:], seed=99), group)).sum().backward()
    input_gradient = [("x", (T, N, 8, SIDE, SIDE), [((0, 0, group.rank * 8 // group.size, 0, 0), x.grad)])]
    return parts(tensors, gradients=True), input_gradient


def _in_order(y: Tensor, group: Group) -> Tensor:
    """Channels cut inside each of three blocks, cut anew as a row convolution takes them: a run of the whole."""
    held = [rank.chunk(3, 2) for rank in _Gather.apply(y, group).chunk(group.size, 2)]
    return mine(torch.cat([rank[block] for block in range(3) for rank in held], 2), group)


def _reference() -> dict[str, Tensor]:
    weights = {name: value.clone().requires_grad_() for name, value in _weights().items()}
    x = spikes(T, N, 8, SIDE, SIDE).requires_grad_()
    y = x.flatten(0, 1)
    for name, spec in CHAIN.items():
        weight = weights[f"{name}.weight"]
        weight = weight.unsqueeze(-1) if weight.ndim == 3 else weight
        y = F.conv2d(y, weight, weights.get(f"{name}.bias"), spec.get("stride", 1), spec.get("padding", 0))
        if name != "d":
            y = _Fire.apply(y)
    (y * random(T, N, *y.shape[1:], seed=99).flatten(0, 1)).sum().backward()
    return {"x": x.grad, **{name: value.grad for name, value in weights.items()}}


def _run_chains() -> list:
    """With channels last in memory, and contiguous; and with frozen weights."""
    group = everybody()
    found = []
    for layout, frozen in ((channels_last, ()), (torch.clone, ()), (channels_last, ("a", "d"))):
        gradients, input_gradient = _chain(group, layout, frozen)
        found.append(gradients + input_gradient)
    return found


@pytest.mark.parametrize("size", [1, 2, 4])
def test_two_pairs_have_every_gradient_of_the_whole_model(ranks, size) -> None:
    """Without the backward sum, gradients before the last pair are wrong. Frozen weights have none."""
    expected = _reference()
    assert all(value.abs().max() > 0.01 for value in expected.values())
    everyone = ranks(size, _run_chains)
    for number, frozen in enumerate([set(), set(), {"a.weight", "d.weight"}]):
        found = assemble([rank[number] for rank in everyone])
        assert expected.keys() - found.keys() == frozen
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], **CLOSE, msg=lambda t, at=(number, name): f"{at}: {t}")


@dataclass(frozen=True)
class Case:
    inputs: int
    outputs: int
    kernel: int | tuple[int, ...]
    options: tuple[tuple[str, object], ...] = ()

    @property
    def dims(self) -> int:
        return dict(self.options).get("dims", 2)

    def input(self, seed: int) -> Tensor:
        return random(T, N, self.inputs, *[7] * self.dims, seed=seed)

    def reference(self) -> nn.Conv1d | nn.Conv2d:
        ours = ("style", "content", "pool", "dims")
        return (nn.Conv1d if self.dims == 1 else nn.Conv2d)(
            self.inputs,
            self.outputs,
            self.kernel,
            **{"bias": False, **{k: v for k, v in self.options if k not in ours}},
            dtype=torch.float64,
        )


def case(inputs: int, outputs: int, kernel: int | tuple[int, ...], **options: object) -> Case:
    return Case(inputs, outputs, kernel, tuple(options.items()))


CASES = [
    *(case(8, 16, 3, style=style, padding=2, bias=True) for style in ("column", "row")),
    case(8, 16, 3, style="row", stride=2),
    case(8, 8, 5, style="column", stride=3, padding=1),
    case(8, 16, 3, groups=4, padding=1, bias=True),
    case(8, 8, 3, groups=8, stride=2),
    case(3, 16, 3, padding=1, bias=True),  # whole on every rank, as images
    case(3, 16, 3, pool=2, padding=1),
    case(8, 16, 1, style="column"),
    case(8, 16, 3, style="column", pool=2, padding=1, bias=True),
    case(16, 8, 3, style="row", pool=3, padding=1),
    case(8, 16, (3, 2), style="column", stride=(2, 1), padding=(0, 1), dilation=(1, 2), bias=True),
    case(16, 8, 5, style="row", padding="same", bias=True),
    case(8, 16, 4, groups=4, padding="same", dilation=2),
    *(case(8, 16, 3, dims=1, style=style, padding=2, bias=True) for style in ("column", "row")),
    case(8, 16, 4, dims=1, style="row", stride=2, dilation=2, padding="valid", bias=True),
    case(8, 16, (3,), dims=1, groups=4, padding="same", bias=True),
    case(3, 16, 5, dims=1, padding="same"),
    case(8, 16, 1, dims=1, style="column"),
]


def _run_cases() -> list:
    group = everybody()
    found = []
    for index, one in enumerate(CASES):
        options = dict(one.options)
        layer = ParallelConv(
            one.inputs, one.outputs, one.kernel, context(group), initialise=nothing, content=Content.DENSE, **options
        )
        truth = _randomised(one.reference(), index)
        tensors = build({"conv": layer}, {f"conv.{name}": value for name, value in truth.state_dict().items()})
        x = one.input(index)
        whole = one.inputs == 3
        local = channels_last(x if whole else mine(x, group)).requires_grad_(not whole)
        layer(local.to("meta"))
        y = layer(local)
        shape = (T, N, one.outputs, *y.shape[3:])
        (y * mine(random(*shape, seed=50), group)).sum().backward()
        result = parts(tensors, gradients=True) + [("y", shape, [(_offset(group, one.outputs, one.dims), y.detach())])]
        if not whole:
            result.append(("x", tuple(x.shape), [(_offset(group, one.inputs, one.dims), local.grad)]))
        found.append(result)
    return found


def _offset(group: Group, channels: int, dims: int) -> tuple[int, ...]:
    """Where this rank's channels begin in a whole tensor `[T, N, C, *space]`."""
    return 0, 0, group.rank * channels // group.size, *[0] * dims


def _randomised(conv: nn.Conv1d | nn.Conv2d, seed: int) -> nn.Conv1d | nn.Conv2d:
    with torch.no_grad():
        for offset, parameter in enumerate(conv.parameters()):
            parameter.copy_(random(*parameter.shape, seed=1000 + 2 * seed + offset))
    return conv


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_option_against_torch(ranks, size) -> None:
    everyone = ranks(size, _run_cases)
    for index, one in enumerate(CASES):
        truth = _randomised(one.reference(), index)
        x = one.input(index).requires_grad_()
        pool = dict(one.options).get("pool", 1)
        images = x.flatten(0, 1)
        y = truth(images if pool == 1 else F.avg_pool2d(images, pool)).unflatten(0, (T, N))
        (y * random(*y.shape, seed=50)).sum().backward()
        expected = {"y": y.detach(), "x": x.grad, **{f"conv.{n}": p.grad for n, p in truth.named_parameters()}}
        found = assemble([rank[index] for rank in everyone])
        assert found.keys() == expected.keys() - ({"x"} if one.inputs == 3 else set())
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], **CLOSE, msg=lambda text, at=(one, name): f"{at}: {text}")


def _exchanged_bytes(pool: int) -> tuple[int, int]:
    """(forward, backward) bytes that this rank receives for one layer."""
    group = everybody()
    options = dict(initialise=nothing, padding=1, content=Content.SPIKES, pool=pool)
    layer = ParallelConv(8, 16, 3, context(group, torch.float32), **options)
    build({"conv": layer}, {})
    x = channels_last(mine(spikes(T, N, 8, 8, 8, dtype=torch.float32), group)).requires_grad_()
    statistics.reset()
    with statistics.counting():
        layer(x).sum().backward()
    traffic = statistics.read()
    return tuple(sum(t.bytes for key, t in traffic.items() if key[2] == way) for way in ("forward", "backward"))


def test_pooled_spikes_travel_as_bits_and_their_gradient_pooled(ranks) -> None:
    """A quarter of a spike would need a wider format; what was pooled on arrival is exact with one bit a spike."""
    forward, backward = ranks(2, _exchanged_bytes, 1)[0]
    assert forward == T * N * 4 * 8 * 8 // 8
    assert ranks(2, _exchanged_bytes, 2)[0] == (forward, backward // 4)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (dict(inputs=6, outputs=8, style="row"), "in_channels 6 .*--tensor-model-parallel-size 4"),
        (dict(inputs=8, outputs=6), "out_channels 6 .*--tensor-model-parallel-size 4"),
        (dict(inputs=8, outputs=8, groups=2), "groups 2 .*--tensor-model-parallel-size 4"),
        (dict(inputs=8, outputs=8, groups=3), "groups 3"),
        (dict(inputs=8, outputs=16, blocks=3, bias=True), "3 block"),
        (dict(inputs=8, outputs=8, style="diagonal"), "style"),
        (dict(inputs=8, outputs=8, pointwise=True, kernel_size=3), "kernel_size"),
        (dict(inputs=8, outputs=8, pool=2, dims=1), "pool"),
        (dict(inputs=8, outputs=8, dims=3), "dims"),
        (dict(inputs=8, outputs=8, dims=1, kernel_size=(3, 3)), r"kernel_size \(3, 3\)"),
        (dict(inputs=8, outputs=8, padding="same", stride=2), "padding 'same'"),
        (dict(inputs=8, outputs=8, padding="same", kernel_size=4), "padding 'same'"),
        (dict(inputs=8, outputs=8, padding="some"), "'some'"),
    ],
)
def test_what_does_not_divide_is_refused(arguments, names) -> None:
    options = dict(arguments)
    sizes = options.pop("inputs"), options.pop("outputs"), options.pop("kernel_size", 1)
    with pytest.raises(ValueError, match=names):
        ParallelConv(*sizes, context(Group("tensor", (0, 1, 2, 3), 1)), initialise=nothing, **options)


def test_a_weight_is_cast_once_a_step() -> None:
    weights, weight = CastWeights(), torch.nn.Parameter(torch.ones(2, 3, 1, 1))
    assert weights.of(weight, torch.float32).data_ptr() == weight.data_ptr()
    for value in (1, 2):
        with torch.no_grad():
            weight.fill_(value)
        with weights.kept():
            first = weights.of(weight, torch.bfloat16)
            assert weights.of(weight, torch.bfloat16) is first and first.dtype == torch.bfloat16
            assert first[0, 0] == value and not first.requires_grad
    with torch.no_grad():
        weight.fill_(4)
    assert weights.of(weight, torch.bfloat16)[0, 0] == 4, "not kept outside of a step"
