"""ParallelConv on several ranks against nn.Conv2d and nn.Conv1d in float64, option by option."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasnn.layers import ParallelConv
from megasnn.layers.shape_inference import mark_spikes
from megasnn.layers.weight_grad import CastWeights
from megasnn.parallel.traffic import statistics
from megasnn.parallel_state import Group, alone
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
        ours = ("style", "pool", "dims")
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
    case(16, 8, 5, style="row", padding=2, bias=True),
    case(8, 16, 4, groups=4, padding=3, dilation=2),
    *(case(8, 16, 3, dims=1, style=style, padding=2, bias=True) for style in ("column", "row")),
    case(8, 16, 4, dims=1, style="row", stride=2, dilation=2, bias=True),
    case(8, 16, (3,), dims=1, groups=4, padding=1, bias=True),
    case(3, 16, 5, dims=1, padding=2),
    case(8, 16, 1, dims=1, style="column"),
]


def _run_cases() -> list:
    group = everybody()
    found = []
    for index, one in enumerate(CASES):
        options = dict(one.options)
        layer = ParallelConv(one.inputs, one.outputs, one.kernel, context(group), initialise=nothing, **options)
        truth = _randomised(one.reference(), index)
        tensors = build({"conv": layer}, {f"conv.{name}": value for name, value in truth.state_dict().items()})
        x = one.input(index)
        whole = one.inputs == 3
        own = x if whole else mine(x, group)
        local = (channels_last(own) if index % 2 else own).requires_grad_(not whole)  # in both memory orders
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
    options = dict(initialise=nothing, padding=1, pool=pool)
    layer = ParallelConv(8, 16, 3, context(group, torch.float32), **options)
    build({"conv": layer}, {})
    x = channels_last(mine(spikes(T, N, 8, 8, 8, dtype=torch.float32), group)).requires_grad_()
    layer(mark_spikes(x.to("meta"), 1))
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
        (dict(inputs=8, outputs=8, dims=3), "dims"),
        (dict(inputs=8, outputs=8, dims=1, kernel_size=(3, 3)), r"kernel_size \(3, 3\)"),
    ],
)
def test_what_does_not_divide_is_refused(arguments, names) -> None:
    options = dict(arguments)
    sizes = options.pop("inputs"), options.pop("outputs"), options.pop("kernel_size", 1)
    with pytest.raises(ValueError, match=names):
        ParallelConv(*sizes, context(Group("tp", (0, 1, 2, 3), 1)), initialise=nothing, **options)


def test_a_single_output_channel_with_the_channels_last_in_memory() -> None:
    layer = ParallelConv(8, 1, 3, context(alone("tp")), padding=1)
    layer.weight = nn.Parameter(torch.empty_strided((1, 8, 3, 3), (72, 1, 24, 8), dtype=torch.float64).fill_(0.5))
    x = random(T, N, 8, SIDE, SIDE)
    layer(x.to("meta"))
    layer(x).sum().backward()
    grad = torch.ones(T * N, 1, SIDE, SIDE, dtype=torch.float64)
    expected = torch.nn.grad.conv2d_weight(x.flatten(0, 1), (1, 8, 3, 3), grad, padding=1)
    torch.testing.assert_close(layer.weight.grad, expected, **CLOSE)


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
