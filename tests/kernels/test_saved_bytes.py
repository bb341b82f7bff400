"""What the backends keep for backward: bytes for each value, counted with saved-tensor hooks."""

from __future__ import annotations

import pytest
import torch

from megasnn.kernels import NeuronSpec
from megasnn.kernels.unit import neuron_multi_step, norm_pool_neuron
from tests.kernels.models import channels_last
from tests.kernels.triton_process import interpreted as interpreted
from tests.kernels.triton_process import without_triton

STEPS, CHANNELS = 4, 16


def kept_bytes(backend: str, dtype: torch.dtype, pool: bool, norm: bool) -> float:
    """For each value of the input; what is kept twice counts once, what has a value for each channel not at all."""
    x = channels_last(STEPS, 2, CHANNELS, 8, 8, dtype=torch.float32).to(dtype).requires_grad_()
    kept: dict[int, int] = {}

    def keep(saved: torch.Tensor) -> torch.Tensor:
        if saved.numel() > CHANNELS:
            storage = saved.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(saved)
        return saved

    alive: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        if norm:
            weight = torch.ones(CHANNELS, requires_grad=True)
            norm_pool_neuron(x, weight, weight, spec=NeuronSpec(), training=True, pool=pool, backend=backend)
        else:
            neuron_multi_step(x, NeuronSpec(), backend=backend)
    return sum(kept.values()) / x.numel()


def bytes_of_triton() -> list[float]:
    return [
        kept_bytes("triton", dtype, pool, norm)
        for dtype in (torch.float32, torch.bfloat16)
        for pool, norm in ((False, True), (True, True), (False, False))
    ]


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_the_kernels_of_the_cpu_keep_their_input_alone(dtype: torch.dtype, size: int) -> None:
    for pool, norm in ((False, True), (True, True), (False, False)):
        assert kept_bytes("fused", dtype, pool, norm) == pytest.approx(size, rel=0.02)


@without_triton
def test_so_do_those_of_triton(interpreted) -> None:
    assert interpreted(bytes_of_triton) == [4.0, 4.0, 4.0, 2.0, 2.0, 2.0]


@pytest.mark.parametrize(("dtype", "sizes"), [(torch.float32, [4.0, 4.0, 8.0]), (torch.bfloat16, [2.0] * 3)])
def test_the_reference_keeps_what_it_says(dtype: torch.dtype, sizes: list[float]) -> None:
    """Potentials of neurons alone and what their surrogates need, of every step; in bfloat16 and behind a norm it
    computes them again."""
    assert [
        kept_bytes("torch", dtype, pool, norm) for pool, norm in ((False, True), (True, True), (False, False))
    ] == sizes
