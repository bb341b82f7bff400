"""Sequences whose tokens ranks share out: attention computes what one rank does, and exchanges as little as it says."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from megasnn.common.recompute import Cache, recording_collectives, replaying_collectives
from megasnn.layers import BuildContext, Numerics
from megasnn.layers.causal_attention import CausalAttention
from megasnn.layers.causal_spiking_attention import CausalSpikingAttention
from megasnn.layers.context import building
from megasnn.layers.shape_inference import BoundsInference, mark_spikes
from megasnn.layers.token_context import divide_tokens, own_tokens
from megasnn.parallel.traffic import traffic
from tests.distributed.whole import channels_last, everybody, mine, random, spikes, state_of

T, N, HEADS, WIDTH = 2, 3, 2, 4
DIM = HEADS * WIDTH
LENGTH = 13  # tokens, which no number of ranks divides
CLOSE = dict(rtol=1e-12, atol=1e-12)
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "softmax": partial(CausalAttention, DIM, HEADS),
    "no positions": partial(CausalAttention, DIM, HEADS, rotary_base=None),
    "torch's softmax": partial(CausalAttention, DIM, HEADS),
    "spiking": partial(CausalSpikingAttention, DIM, HEADS),
    "small chunks": partial(CausalSpikingAttention, DIM, HEADS, chunk=2),
    "ternary": partial(CausalSpikingAttention, DIM, HEADS, chunk=3),
}
ON_SPIKES = ("spiking", "small chunks", "ternary")
ONE = BuildContext(numerics=Numerics(torch.float64, torch.float64))


@given(length=st.integers(1, 40), ranks=st.integers(1, 9))
def test_tokens_are_shared_evenly(length: int, ranks: int) -> None:
    if length < ranks:
        with pytest.raises(ValueError, match=f"may be {length} at most"):
            divide_tokens(length, ranks)
        return
    spans = divide_tokens(length, ranks)
    assert [token for span in spans for token in span] == list(range(length))
    assert max(map(len, spans)) - min(map(len, spans)) <= 1


def made(name: str, context: BuildContext, length: int = LENGTH) -> nn.Module:
    """A layer after its dry run on whole sequences."""
    channels = 3 * DIM // context.tp.size
    with building(context):
        layer = LAYERS[name]()
    if name == "torch's softmax":
        layer.blockwise = False  # as on a GPU
    with BoundsInference():
        x = torch.empty(T, N, channels, length, device="meta", dtype=torch.float64)
        layer(mark_spikes(x, lowest=-1 if name == "ternary" else 0))
    return layer


def given_to(name: str, length: int = LENGTH) -> Tensor:
    if name == "ternary":
        # 0.0, as neurons give it, in place of -0.0.
        return random(T, N, 3 * DIM, length, seed=3).clamp(-1, 1).round() + 0.0
    values = spikes if name in ON_SPIKES else random
    return values(T, N, 3 * DIM, length, seed=3)


@dataclass
class Found:
    """A rank's output, its input's gradient, and received bytes in forward and backward."""

    y: Tensor
    x: Tensor
    forward: int = 0
    backward: int = 0


def computed(layer: nn.Module, x: Tensor, weights: Tensor) -> Found:
    x = channels_last(x).requires_grad_()
    traffic.reset()
    with traffic.counting():
        y = layer(x)
        forward = traffic.total().bytes
        (y * weights).sum().backward()
    return Found(y.detach(), x.grad, forward, traffic.total().bytes - forward)


def _of_one(name: str, length: int = LENGTH) -> Found:
    return computed(made(name, ONE, length), given_to(name, length), random(T, N, DIM, length, seed=4))


def _of_own_tokens(length: int = LENGTH) -> dict[str, Found]:
    group = everybody("cp")
    context = replace(ONE, state=state_of(group), context_cut="tokens")
    weights = own_tokens(random(T, N, DIM, length, seed=4), group)
    found = {}
    for name in LAYERS:
        layer = made(name, context, length)
        found[name] = computed(layer, own_tokens(given_to(name, length), group), weights)
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_tokens_of_what_one_rank_computes(ranks, size: int) -> None:
    everyone = ranks(size, _of_own_tokens)
    for name in LAYERS:
        whole = _of_one(name)
        y = torch.cat([each[name].y for each in everyone], 3)
        x = torch.cat([each[name].x for each in everyone], 3)
        if name in ON_SPIKES:
            assert torch.equal(y, whole.y) and y.any(), name
        torch.testing.assert_close(y, whole.y, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")
        torch.testing.assert_close(x, whole.x, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


def test_only_states_travel_and_their_bytes_do_not_grow_with_the_length(ranks) -> None:
    entries = T * N * HEADS * WIDTH * WIDTH
    for length in (LENGTH, 4 * LENGTH):
        for rank, found in enumerate(ranks(3, _of_own_tokens, length)):
            # A state from each earlier rank, of two bytes an entry, and the gradient of one from each later rank.
            assert (found["spiking"].forward, found["spiking"].backward) == (
                2 * entries * rank,
                8 * entries * (2 - rank),
            )
            # Keys and values of earlier tokens, twice, and the gradients of the own ones.
            spans = divide_tokens(length, 3)
            keys = 2 * 8 * T * N * DIM * sum(len(span) for span in spans[:rank])
            returned = 2 * 8 * T * N * DIM * len(spans[rank]) * (2 - rank)
            for name in ("softmax", "torch's softmax"):
                assert (found[name].forward, found[name].backward) == (keys, keys + returned)


def _of_own_heads() -> dict[str, Found]:
    group = everybody("tp")
    context = replace(ONE, state=state_of(group))
    weights = mine(random(T, N, DIM, LENGTH, seed=4), group)
    found = {}
    for name in LAYERS:
        found[name] = computed(made(name, context), mine(given_to(name), group, blocks=3), weights)
    return found


def test_heads_of_what_one_rank_computes(ranks) -> None:
    everyone = ranks(2, _of_own_heads)
    for name in LAYERS:
        whole = _of_one(name)
        for rank, found in enumerate(everyone):
            own = found[name]
            assert own.forward == own.backward == 0
            torch.testing.assert_close(own.y, whole.y.chunk(2, 2)[rank], **CLOSE)
            of_blocks = [block.chunk(2, 2)[rank] for block in whole.x.chunk(3, 2)]
            torch.testing.assert_close(own.x, torch.cat(of_blocks, 2), **CLOSE)


def _computed_again() -> None:
    """A recomputed forward has the same bits; the spiking one exchanges nothing."""
    group = everybody("cp")
    context = replace(ONE, state=state_of(group), context_cut="tokens")
    for name in LAYERS:
        layer = made(name, context)
        x = channels_last(own_tokens(given_to(name), group))
        cache: Cache = deque()
        with torch.no_grad(), recording_collectives(cache):
            first = layer(x)
        traffic.reset()
        x.requires_grad_()
        with traffic.counting(), replaying_collectives(cache):
            again = layer(x)
        assert torch.equal(first, again), name
        assert traffic.total().calls == (name not in ON_SPIKES), name
        again.sum().backward()
        assert x.grad is not None and x.grad.any(), name


def test_a_recomputed_forward_has_the_same_bits(ranks) -> None:
    ranks(2, _computed_again)


def _with_other_tokens() -> None:
    context = replace(ONE, state=state_of(everybody("cp")), context_cut="tokens")
    for name in ("softmax", "spiking"):
        with pytest.raises(ValueError, match="of each sequence got 3"):
            made(name, context)(spikes(T, N, 3 * DIM, 3))


def test_tokens_of_another_rank_are_refused(ranks) -> None:
    ranks(2, _with_other_tokens)


def _in_bfloat16() -> dict[str, tuple[Found, Found]]:
    """One rank's result and this rank's part, of values in bfloat16."""
    group = everybody("cp")
    one = replace(ONE, numerics=Numerics(torch.float32, torch.bfloat16))
    shared = replace(one, state=state_of(group), context_cut="tokens")
    weights = random(T, N, DIM, LENGTH, seed=4, dtype=torch.bfloat16)
    found = {}
    for name in ("softmax", "torch's softmax", "ternary"):
        x = given_to(name).bfloat16()
        whole = computed(made(name, one), x, weights)
        part = computed(made(name, shared), own_tokens(x, group), own_tokens(weights, group))
        found[name] = whole, part
    return found


def test_in_bfloat16_sums_are_float32(ranks) -> None:
    everyone = ranks(3, _in_bfloat16)
    for name, (whole, _) in everyone[0].items():
        parts = [found[name][1] for found in everyone]
        y = torch.cat([part.y for part in parts], 3)
        assert y.dtype == torch.bfloat16
        if name == "ternary":
            assert torch.equal(y, whole.y)
        torch.testing.assert_close(y, whole.y, rtol=0.02, atol=0.02)
        torch.testing.assert_close(torch.cat([part.x for part in parts], 3), whole.x, rtol=0.02, atol=0.05)
