"""ParallelConv on several ranks against nn.Conv2d and nn.Conv1d in float64, option by option."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasnn.layers import BuildContext, ParallelConv, ParallelLinear
from megasnn.layers.shape_inference import mark_spikes
from megasnn.layers.weight_grad import CastWeights
from megasnn.parallel.traffic import traffic
from megasnn.parallel_state import Group
from tests.distributed.whole import (
    build,
    by_one,
    channels_last,
    context,
    everybody,
    mine,
    random,
    require_close,
    run,
    spikes,
)
from tests.parts import Part, assemble

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

    def layer(self, context: BuildContext | None = None) -> ParallelConv:
        return ParallelConv(self.inputs, self.outputs, self.kernel, context, **dict(self.options))

    def reference(self, seed: int) -> nn.Conv1d | nn.Conv2d:
        options = {key: value for key, value in self.options if key not in ("style", "pool", "dims")}
        kind, sizes = nn.Conv1d if self.dims == 1 else nn.Conv2d, (self.inputs, self.outputs, self.kernel)
        conv = kind(*sizes, **{"bias": False, **options}, dtype=torch.float64)
        with torch.no_grad():
            for offset, parameter in enumerate(conv.parameters()):
                parameter.copy_(random(*parameter.shape, seed=1000 + 2 * seed + offset))
        return conv


def case(inputs: int, outputs: int, kernel: int | tuple[int, ...], **options: object) -> Case:
    return Case(inputs, outputs, kernel, tuple(options.items()))


CASES = [
    *(case(8, 16, 3, style=style, padding=2, bias=True) for style in ("column", "row")),
    case(8, 16, 3, style="row", stride=2),
    case(4, 4, 3, style="row", padding=1),  # with four ranks one input channel each, whose memory order is ambiguous
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
WITH_EDGES = [
    case(8, 16, 3, style="column", padding=1, padding_mode="circular", bias=True),
    case(16, 8, 5, style="row", padding=(2, 1), padding_mode="reflect", stride=2),
    case(8, 8, 3, groups=8, padding="same", padding_mode="replicate"),
    case(8, 16, (4, 3), style="column", padding="same", dilation=2),  # more zeros behind than before
    case(3, 16, 2, padding="same", padding_mode="circular"),
    case(8, 16, 3, dims=1, style="row", padding=2, padding_mode="circular", bias=True),
    case(8, 16, 4, dims=1, style="column", padding="same"),
]


def _run_cases() -> list[list[Part]]:
    """In both memory orders."""
    group = everybody()
    return [
        run(
            one.layer(context(group)),
            one.reference(index).state_dict(),
            one.input(index),
            group,
            order=channels_last if index % 2 else torch.clone,
        )
        for index, one in enumerate(CASES + WITH_EDGES)
    ]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_option_against_torch(ranks, size) -> None:
    everyone = ranks(size, _run_cases)
    for index, one in enumerate(CASES + WITH_EDGES):
        conv, pool = one.reference(index), dict(one.options).get("pool", 1)

        def on_frames(x: Tensor, conv: nn.Module = conv, pool: int = pool) -> Tensor:
            images = x.flatten(0, 1)
            return conv(images if pool == 1 else F.avg_pool2d(images, pool)).unflatten(0, (T, N))

        expected = by_one(on_frames, dict(conv.named_parameters()), one.input(index))
        require_close(assemble([rank[index] for rank in everyone]), expected, one, **CLOSE)


def _exchanged_bytes(pool: int) -> tuple[int, int]:
    """(forward, backward) bytes that this rank receives for one layer."""
    group = everybody()
    layer = ParallelConv(8, 16, 3, context(group, torch.float32), padding=1, pool=pool)
    build({"conv": layer}, {})
    x = channels_last(mine(spikes(T, N, 8, 8, 8, dtype=torch.float32), group)).requires_grad_()
    layer(mark_spikes(x.to("meta"), 1))
    traffic.reset()
    with traffic.counting():
        out = layer(x)
        forward = traffic.total().bytes
        out.sum().backward()
    return forward, traffic.total().bytes - forward


def test_pooled_spikes_travel_as_bits_and_their_gradient_pooled(ranks) -> None:
    """A quarter of a spike would need a wider format; what was pooled on arrival is exact with one bit a spike."""
    forward, backward = ranks(2, _exchanged_bytes, 1)[0]
    assert forward == T * N * 4 * 8 * 8 // 8
    assert ranks(2, _exchanged_bytes, 2)[0] == (forward, backward // 4)


FOUR = Group("tp", (0, 1, 2, 3), 1)
REFUSED: list[tuple[Callable[..., nn.Module], tuple[int, ...], dict[str, object], str]] = [
    (ParallelConv, (6, 8, 1), dict(style="row"), "4 equal parts; choose a --tensor-model-parallel-size"),
    (ParallelConv, (8, 6, 1), {}, "out_channels 6 .*--tensor-model-parallel-size 4"),
    (ParallelConv, (8, 8, 1), dict(groups=2), "groups 2 .*--tensor-model-parallel-size 4"),
    (ParallelConv, (8, 8, 1), dict(groups=3), "groups 3"),
    (ParallelConv, (8, 16, 1), dict(blocks=3, bias=True), "3 block"),
    (ParallelConv, (8, 8, 1), dict(style="diagonal"), "style"),
    (ParallelConv, (8, 8, 1), dict(dims=3), "dims"),
    (ParallelConv, (8, 8, (3, 3)), dict(dims=1), r"kernel_size \(3, 3\)"),
    (ParallelLinear, (6, 8), {}, "4 equal parts; choose a --tensor-model-parallel-size"),
    (ParallelLinear, (8, 6), dict(style="column"), "4 equal parts; choose a --tensor-model-parallel-size"),
    (ParallelLinear, (8, 8), dict(style="both"), "style must be"),
]


@pytest.mark.parametrize(("make", "sizes", "options", "names"), REFUSED)
def test_what_does_not_divide_is_refused(make, sizes, options, names) -> None:
    with pytest.raises(ValueError, match=names):
        make(*sizes, context(FOUR), **options)
    ParallelLinear(8, 5, context(FOUR))  # outputs of a row layer are whole on every rank: any number will do


def test_a_single_output_channel_with_the_channels_last_in_memory() -> None:
    layer = ParallelConv(8, 1, 3, context(Group("tp")), padding=1)
    layer.weight = nn.Parameter(torch.empty_strided((1, 8, 3, 3), (72, 1, 24, 8), dtype=torch.float64).fill_(0.5))
    x = random(T, N, 8, SIDE, SIDE)
    layer(x.to("meta"))
    layer(x).sum().backward()
    grad = torch.ones(T * N, 1, SIDE, SIDE, dtype=torch.float64)
    expected = torch.nn.grad.conv2d_weight(x.flatten(0, 1), (1, 8, 3, 3), grad, padding=1)
    torch.testing.assert_close(layer.weight.grad, expected, **CLOSE)


def test_a_weight_is_cast_once_a_step() -> None:
    weights, weight = CastWeights(), torch.nn.Parameter(torch.ones(2, 3, 1, 1))
    assert weights.cast(weight, torch.float32).data_ptr() == weight.data_ptr()
    for value in (1, 2):
        with torch.no_grad():
            weight.fill_(value)
        with weights.caching():
            first = weights.cast(weight, torch.bfloat16)
            assert weights.cast(weight, torch.bfloat16) is first and first.dtype == torch.bfloat16
            assert first[0, 0] == value and not first.requires_grad
    with torch.no_grad():
        weight.fill_(4)
    assert weights.cast(weight, torch.bfloat16)[0, 0] == 4, "not kept outside of a step"


def test_an_input_pixel_reaches_outputs_from_its_copies_in_the_edges() -> None:
    layer = ParallelConv(2, 4, 3, padding=1, padding_mode="circular")
    build({"conv": layer}, {})
    layer(mark_spikes(torch.zeros(T, N, 2, 4, 5, device="meta"), 1))
    # With circular padding every pixel is under each of the 3 x 3 weights once.
    assert torch.equal(layer.times_used((4, 5)), torch.full((4, 5), 9.0 * 4, dtype=torch.float64))


def _gradients_of_padded_spikes() -> tuple[int, Tensor]:
    """Bytes received in the forward, and the weight's whole gradient."""
    group = everybody()
    layer = ParallelConv(8, 16, 3, context(group), style="column", padding=1, padding_mode="circular")
    build({"conv": layer}, {})
    layer(mark_spikes(torch.zeros(T, N, 8 // group.size, 6, 6, device="meta"), 1))
    x = channels_last(mine(spikes(T, N, 8, 6, 6), group)).requires_grad_()
    traffic.reset()
    with traffic.counting():
        y = layer(x)
        received = traffic.total().bytes
    y.square().sum().backward()
    assert layer.weight.grad is not None
    return received, layer.weight.grad


def test_padded_spikes_travel_as_bits(ranks) -> None:
    """The order of the bits is that of the padded image with channels last."""
    whole = ranks(1, _gradients_of_padded_spikes)[0][1]
    found = ranks(2, _gradients_of_padded_spikes)
    assert [received for received, _ in found] == [T * N * 4 * 8 * 8 // 8] * 2
    torch.testing.assert_close(torch.cat([part for _, part in found]), whole, **CLOSE)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"padding_mode": "mirror"}, "zeros, reflect, replicate, circular, got 'mirror'"),
        ({"padding": "full"}, "'same', got 'full'"),
        ({"padding": 1, "padding_mode": "circular", "pool": 2}, "pool=1"),
    ],
)
def test_a_padding_that_it_does_not_know_is_refused(options, named) -> None:
    with pytest.raises(ValueError, match=named):
        ParallelConv(4, 4, 3, **options)
