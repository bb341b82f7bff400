"""SpikingJelly's and torch's own modules, arranged to do what one call of the kernels does, and what tests share."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from spikingjelly.activation_based import neuron, surrogate
from torch import Tensor, nn

from megasnn.kernels import SURROGATES, NeuronSpec


def spikingjelly_neuron(spec: NeuronSpec, w: Tensor | None = None) -> neuron.BaseNode:
    """The node that ``spec`` describes; a plif node takes the value of ``w``."""
    common = {
        "v_threshold": spec.v_threshold,
        "v_reset": spec.v_reset,
        "detach_reset": spec.detach_reset,
        "surrogate_function": getattr(surrogate, SURROGATES[spec.surrogate][0])(alpha=spec.alpha),
        "step_mode": "m",
    }
    if spec.kind == "if":
        return neuron.IFNode(**common)
    if spec.kind == "lif":
        return neuron.LIFNode(tau=spec.tau, decay_input=spec.decay_input, **common)
    node = neuron.ParametricLIFNode(init_tau=2.0, decay_input=spec.decay_input, **common)
    node.w = nn.Parameter(w.detach().clone())
    return node


def spikingjelly_unit(x: Tensor, norm: nn.Module, node: neuron.BaseNode, pool: bool, time_steps: int) -> Tensor:
    """Norm, pool and neuron with the modules of a SpikingJelly model."""
    x = x.expand(time_steps, *x.shape[1:])
    y = norm(x.flatten(0, 1))
    y = nn.functional.max_pool2d(y, 3, 2, 1) if pool else y
    return node(y.unflatten(0, x.shape[:2]))


def channels_last(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Normal numbers of shape ``[T, N, C, ...]``, channels fastest in memory."""
    generator = torch.Generator().manual_seed(seed)
    memory = [*shape[:2], *shape[3:], shape[2]]
    return torch.randn(memory, generator=generator, dtype=dtype).movedim(-1, 2)


def plif_weight(spec: NeuronSpec, dtype: torch.dtype = torch.float64) -> Tensor | None:
    return torch.tensor(-math.log(1.7), dtype=dtype, requires_grad=True) if spec.kind == "plif" else None


def assert_close(actual: Tensor, expected: Tensor, relative: float = 1e-10) -> None:
    """Largest difference within ``relative`` of the largest value."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    scale = expected.abs().max().item()
    assert (actual - expected).abs().max().item() <= relative * scale, (actual, expected)


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """So many threads of torch, for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def saved_tensors() -> Iterator[list[tuple[torch.dtype, int]]]:
    """Types and sizes of what autograd saves."""
    saved: list[tuple[torch.dtype, int]] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda each: saved.append((each.dtype, each.numel())) or each, lambda each: each
    ):
        yield saved
