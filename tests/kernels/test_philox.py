"""Philox4x32-10 on each way of computing it: the published answers, and equal choices for every cut of a tensor."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch

from megasnn.common.random import philox, philox_key
from megasnn.kernels.numba.philox import _philox
from megasnn.kernels.philox import kept, kept_by_tensors

# "philox4x32 10" of kat_vectors in Random123 1.14.0: counter, key, answer.
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def sample_keys(samples: int) -> torch.Tensor:
    return torch.tensor([philox_key("test", sample) for sample in range(samples)]).t().contiguous()


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_the_published_answers(counter: list[int], key: list[int], answer: list[int]) -> None:
    words = [*counter, *key]
    assert list(philox(*words)) == list(_philox(*words)) == answer
    assert [each.tolist() for each in philox(*(np.full(2, word) for word in words))] == [[word] * 2 for word in answer]
    assert [each.tolist() for each in philox(*(torch.full((2,), word) for word in words))] == [[w] * 2 for w in answer]


def test_a_value_is_kept_where_the_upper_24_bits_are_at_least_p() -> None:
    for channel, word in enumerate(KNOWN[0][2]):
        for above in (0, 1):
            p, key = ((word >> 8) + above) / 2**24, torch.zeros(2, 1, dtype=torch.int64)
            assert kept(p, key, 1, 1, range(channel, channel + 1), 4).item() is not bool(above)


def test_the_bits_of_a_key_stay_what_they_are() -> None:
    """Runs that are resumed depend on them."""
    assert philox_key(1234, "dropout", "classifier.dropout", 7) == (3389460533, 891113234)


@pytest.mark.parametrize("p", [0.0, 0.3, 1 - 2.0**-30])
@pytest.mark.parametrize(("steps", "pixels", "channels", "whole"), [
    (3, 5, range(0, 7), 7),
    (2, 9, range(6, 9), 12),
    (2, 1, range(1, 2), 5),
    (2, 1, range(2**34 - 7, 2**34), 2**34),  # counters beyond 32 bits
    (2, 3, range(0, 0), 4),
])  # fmt: skip
def test_compiled_loops_and_tensors_give_what_the_stream_has(p, steps, pixels, channels, whole) -> None:
    keys = sample_keys(3)
    compiled = kept(p, keys, steps, pixels, channels, whole)
    assert compiled.shape == (steps, 3, pixels, len(channels)) and compiled.dtype == torch.bool
    with mock.patch("megasnn.kernels.philox._kept_by_loops", kept_by_tensors):
        assert torch.equal(kept(p, keys, steps, pixels, channels, whole), compiled)
    if whole < 2**34:
        counters, count = torch.arange(steps * pixels * whole), steps * pixels * whole
        values = [torch.stack(philox(counters, 0, 0, 0, *key), dim=1).flatten()[:count] for key in keys.t()]
        every = ((torch.stack(values) >> 8) * 2.0**-24 >= p).view(3, steps, pixels, whole).transpose(0, 1)
        assert torch.equal(compiled, every[..., channels.start : channels.stop])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same_bits() -> None:
    here, there = (kept(0.3, sample_keys(3).to(name), 3, 50, range(5, 40), 64) for name in ("cpu", "cuda"))
    assert torch.equal(here, there.cpu())
