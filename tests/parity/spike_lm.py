"""SpikeLM written out in plain PyTorch on whole tensors, by the names of its weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megasnn.models.spike_lm.model import SpikeLM


@dataclass(frozen=True)
class Given:
    """A model with whole weights and buffers by name, and the amplitude of its neurons where it is fixed."""

    model: SpikeLM
    weights: Mapping[str, Tensor]
    amplitude: float = 1.0
    calibrated: dict[str, Tensor] | None = None
    """Receives each neuron's amplitudes, which then follow from this input."""


def bispike(x: Tensor, amplitudes: Tensor) -> Tensor:
    """The neuron of SpikeLM (arXiv 2406.03287): `[T, ...]` -> spikes of -a, 0 and a.

    The gradient of a spike is 1 within the amplitude, and none goes through the reset.
    """
    spikes: list[Tensor] = []
    m = x[0]
    for t, a in enumerate(amplitudes):
        if t > 0:
            m = 0.25 * m * (amplitudes[t - 1] - spikes[-1].detach()) + x[t]
        inside = (m / a).clamp(-1, 1)
        spikes.append(a * ((inside.round() - inside).detach() + inside))
    return torch.stack(spikes)


def calibrated(x: Tensor) -> Tensor:
    """Amplitudes `[T]` as in the authors' code: twice the mean magnitude of the potential in the first batch."""
    amplitudes: list[Tensor] = []
    m = x[0]
    for t in range(len(x)):
        if t > 0:
            a = amplitudes[-1]
            m = 0.25 * m * (a - a * (m / a).clamp(-1, 1).round()) + x[t]
        amplitudes.append(2 * m.abs().mean())
    return torch.stack(amplitudes)


def rotated(x: Tensor) -> Tensor:
    """Rotary positions on `[..., L, d]`, as in GPT-NeoX: the first half of the channels turns with the second."""
    length, d = x.shape[-2:]
    rates = 10000.0 ** (-torch.arange(0, d, 2, dtype=x.dtype) / d)
    angles = torch.arange(length, dtype=x.dtype).unsqueeze(1) * rates
    first, second = x.chunk(2, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


def attention(qkv: Tensor, model: SpikeLM) -> Tensor:
    """Causal attention on `[T, N, L, 3 C]`, with softmax or on spikes."""
    q, k, v = qkv.unflatten(-1, (3, model.num_heads, -1)).permute(3, 0, 1, 4, 2, 5)
    if model.attention == "spiking":
        return 0.125 * ((q @ k.transpose(-1, -2)).tril() @ v).transpose(2, 3).flatten(-2)
    if model.positions == "rotary":
        q, k = rotated(q), rotated(k)
    later = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(later, -math.inf)
    return (scores.softmax(-1) @ v).transpose(2, 3).flatten(-2)


def stream(given: Given, tokens: Tensor) -> Tensor:
    """Logits of every step, `[T, N, L, vocab_size]`, from tokens `[N, L]`."""
    model, weights = given.model, given.weights

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"])

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"].squeeze(-1), weights[f"{name}.bias"])

    def spikes(name: str, x: Tensor, kind: str = "", units: bool = False) -> Tensor:
        x = norm(f"{name}.{kind}norm", x)
        key = f"{name}.{kind}neuron.amplitude"
        amplitudes = weights.get(key, torch.full((model.time_steps,), given.amplitude, dtype=x.dtype))
        if given.calibrated is not None:
            amplitudes = given.calibrated[key] = calibrated(x)
        fired = bispike(x, amplitudes)
        return fired / amplitudes.view(-1, 1, 1, 1) if units else fired

    def attended(name: str, x: Tensor) -> Tensor:
        qkv = linear(f"{name}.qkv", spikes(name, x))
        if model.attention == "softmax":
            return attention(qkv, model)
        return spikes(name, attention(spikes(name, qkv, "qkv_", units=True), model), "output_")

    x = F.embedding(tokens, weights["embedding.weight"])
    if model.positions == "learned":
        x = x + weights["embedding.positions"][: tokens.shape[1]]
    x = x.expand(model.time_steps, *x.shape)
    for block in range(model.depth):
        name = f"blocks.{block}.attention"
        x = x + linear(f"{name}.projection", attended(name, x))
        name = f"blocks.{block}.mlp"
        x = x + linear(f"{name}.fc2", F.gelu(linear(f"{name}.fc1", spikes(name, x))))
    output = weights["embedding.weight" if model.tied else "head.weight"]
    return F.linear(norm("norm", x), output)


def losses(given: Given, tokens: Tensor, targets: Tensor) -> Tensor:
    """Each sample's mean cross-entropy of the logits' mean over time, `[N]`."""
    logits = stream(given, tokens).mean(0)
    return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(1)
