"""SpikeLM in plain PyTorch, the benchmark's reference: torch's layers, and the neuron as a loop over time steps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasnn.models.spike_lm.model import SpikeLM


class PlainSpikeLM(nn.Module):
    """Tokens `[N, L]` -> logits of every step `[T, N, L, vocab_size]`, with softmax attention.

    Weights have SpikeLM's names. Raises ValueError for other dimensions of the model than these.
    """

    def __init__(self, model: SpikeLM) -> None:
        super().__init__()
        if model.attention != "softmax" or model.tied:
            raise ValueError("the plain SpikeLM has softmax attention and an output layer of its own")
        dim = model.embed_dim
        self.time_steps = model.time_steps
        self.embedding = nn.Embedding(model.vocab_size, dim)
        self.positions: nn.Parameter | None = None
        if model.positions == "learned":
            self.positions = nn.Parameter(torch.zeros(model.seq_length, dim))
        self.blocks = nn.Sequential(*[_Block(model) for _ in range(model.depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, model.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions
        x = x.expand(self.time_steps, *x.shape)
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


class _Block(nn.Module):
    def __init__(self, model: SpikeLM) -> None:
        super().__init__()
        dim = model.embed_dim
        self.attention = _Attention(dim, model.num_heads, is_rotary=model.positions == "rotary")
        self.mlp = _MLP(dim, int(dim * model.mlp_ratio))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        out: Tensor = x + self.mlp(x)
        return out


class _Attention(nn.Module):
    def __init__(self, dim: int, heads: int, is_rotary: bool) -> None:
        super().__init__()
        self.heads = heads
        self.is_rotary = is_rotary
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.projection = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(bispike(self.norm(x)))
        q, k, v = qkv.flatten(0, 1).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.is_rotary:
            q, k = rotated(q), rotated(k)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.projection(attended.transpose(1, 2).flatten(2).view(x.shape))
        return out


class _MLP(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(F.gelu(self.fc1(bispike(self.norm(x)))))
        return out


def bispike(x: Tensor) -> Tensor:
    """The elastic bi-spiking neuron (arXiv 2406.03287) with amplitude 1, and its gradient 1 for |m| <= 1."""
    spikes: list[Tensor] = []
    m = x[0]
    for step, current in enumerate(x):
        if step > 0:
            m = 0.25 * m * (1 - spikes[-1].detach()) + current
        inside = m.clamp(-1, 1)
        spikes.append((inside.round() - inside).detach() + inside)
    return torch.stack(spikes)


def rotated(x: Tensor) -> Tensor:
    """Rotary positions on `[..., L, d]`: the first half of the channels turns with the second."""
    length, width = x.shape[-2:]
    rates = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64, device=x.device) / width)
    angles = torch.arange(length, dtype=torch.float64, device=x.device).unsqueeze(1) * rates
    cos = angles.cos().to(x.dtype)
    sin = angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
