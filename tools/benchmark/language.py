"""SpikeLM in plain PyTorch, as one writes it for one process: the row beside `--model spike_lm`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasnn.models.spike_lm.model import SpikeLM

DECAY = 0.25


class PlainSpikeLM(nn.Module):
    """Tokens `[N, L]` -> logits `[T, N, words, L]`, with softmax attention, rotary positions and unit amplitudes.

    Raises ValueError for other dimensions.
    """

    def __init__(self, model: SpikeLM) -> None:
        super().__init__()
        if (model.attention, model.positions, model.amplitude, model.tied) != ("softmax", "rotary", "fixed", False):
            raise ValueError("the plain SpikeLM has softmax attention, rotary positions, fixed amplitudes, no ties")
        self.time_steps = model.time_steps
        self.embedding = nn.Embedding(model.vocab_size, model.embed_dim)
        self.blocks = nn.ModuleList(_Block(model) for _ in range(model.depth))
        self.norm = nn.LayerNorm(model.embed_dim)
        self.head = nn.Linear(model.embed_dim, model.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x.expand(self.time_steps, *x.shape)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits.transpose(2, 3)


class _Block(nn.Module):
    def __init__(self, model: SpikeLM) -> None:
        super().__init__()
        dim = model.embed_dim
        hidden = int(dim * model.mlp_ratio)
        self.heads = model.num_heads
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.projection = nn.Linear(dim, dim)
        self.mlp_norm = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        time, samples, length, dim = x.shape
        qkv = self.qkv(bispike(self.attention_norm(x)))
        q, k, v = qkv.view(time * samples, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + self.projection(out.transpose(1, 2).reshape(time, samples, length, dim))
        return x + self.fc2(F.gelu(self.fc1(bispike(self.mlp_norm(x)))))


def bispike(x: Tensor) -> Tensor:
    """The neuron of SpikeLM (arXiv 2406.03287) with amplitude 1, step by step, `[T, ...]`."""
    spikes: list[Tensor] = []
    m = x[0]
    for step, current in enumerate(x):
        if step > 0:
            m = DECAY * m * (1 - spikes[-1].detach()) + current
        inside = m.clamp(-1, 1)
        spikes.append((inside.round() - inside).detach() + inside)
    return torch.stack(spikes)


def rotated(x: Tensor) -> Tensor:
    """Rotary positions on `[..., L, d]`."""
    length, d = x.shape[-2:]
    rates = 10000.0 ** (-torch.arange(0, d, 2, dtype=x.dtype, device=x.device) / d)
    angles = torch.arange(length, dtype=x.dtype, device=x.device).unsqueeze(1) * rates
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)
