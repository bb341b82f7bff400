"""SpikeLM's blocks: causal attention and MLP, each with a shortcut. Products take ternary spikes."""

from __future__ import annotations

from torch import Tensor, nn

from megasnn.layers import CausalAttention, CausalSpikingAttention, NeuronLayer, ParallelConv
from megasnn.layers.bispike import ParallelBiSpike
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.conv import Style
from megasnn.layers.hidden_layer import linear_gelu_linear
from megasnn.layers.init import trunc_normal, zeros
from megasnn.layers.layer_norm import ParallelLayerNorm
from megasnn.layers.neuron import make_neuron


class AttentionHalf(nn.Module):
    """A block's first half: x + projection(attention(qkv(neuron(norm(x))))), on `[T, N, C_local, L]`.

    Args:
        dim: C, global.
        calibrated: amplitudes of the spikes follow from the first batch.
        rotary: rotary positions in the attention.
    """

    mixes_tokens = False

    def __init__(
        self, dim: int, num_heads: int, calibrated: bool, rotary: bool, context: BuildContext | None = None
    ) -> None:
        super().__init__()
        context = context_for(context)
        self.norm = ParallelLayerNorm(dim, context)
        self.neuron = _neuron(calibrated, context)
        # Style column, then row: in between each rank has whole heads.
        self.qkv = token_linear(dim, 3 * dim, "column", context, blocks=3)
        rotary_base = 10000.0 if rotary else None
        self.attention = CausalAttention(dim, num_heads, context, rotary_base=rotary_base)
        self.projection = token_linear(dim, dim, "row", context)

    def forward(self, x: Tensor) -> Tensor:
        qkv = _linear_of_spikes(self.neuron, self.qkv, self.norm(x))
        return x + self.projection(self.attention(qkv))


class SpikingAttentionHalf(nn.Module):
    """`AttentionHalf` with attention on spikes, without softmax, on `[T, N, C_local, L]`.

    All products take spikes. Norms before the neurons of q, k, v and of the attention's output keep them firing: the
    output's sums grow with the number of tokens.

    Args:
        dim: C, global.
        calibrated: amplitudes of the spikes follow from the first batch.
    """

    mixes_tokens = False

    def __init__(self, dim: int, num_heads: int, calibrated: bool, context: BuildContext | None = None) -> None:
        super().__init__()
        context = context_for(context)
        self.norm = ParallelLayerNorm(dim, context)
        self.neuron = _neuron(calibrated, context)
        # Style column, then row: in between each rank has whole heads.
        self.qkv = token_linear(dim, 3 * dim, "column", context, blocks=3)
        self.qkv_norm = ParallelLayerNorm(3 * dim, context, blocks=3)
        self.qkv_neuron = _neuron(calibrated, context)
        self.attention = CausalSpikingAttention(dim, num_heads, context)
        self.output_norm = ParallelLayerNorm(dim, context)
        self.output_neuron = _neuron(calibrated, context)
        self.projection = token_linear(dim, dim, "row", context)

    def forward(self, x: Tensor) -> Tensor:
        qkv = _linear_of_spikes(self.neuron, self.qkv, self.norm(x))
        # The spikes of q, k and v stay without amplitudes, which the norm behind the attention would cancel.
        attended = self.attention(self.qkv_neuron(self.qkv_norm(qkv)))
        return x + _linear_of_spikes(self.output_neuron, self.projection, self.output_norm(attended))


class MLPHalf(nn.Module):
    """A block's second half: x + fc2(gelu(fc1(neuron(norm(x))))), on `[T, N, C_local, L]`.

    Args:
        dim, hidden: global.
        calibrated: amplitudes of the spikes follow from the first batch.
    """

    mixes_tokens = False

    def __init__(self, dim: int, hidden: int, calibrated: bool, context: BuildContext | None = None) -> None:
        super().__init__()
        context = context_for(context)
        self.norm = ParallelLayerNorm(dim, context)
        self.neuron = _neuron(calibrated, context)
        # Style column, then row: hidden channels stay on their rank.
        self.fc1 = token_linear(dim, hidden, "column", context)
        self.fc2 = token_linear(hidden, dim, "row", context)

    def forward(self, x: Tensor) -> Tensor:
        spikes = self.neuron(self.norm(x))
        # As in `_linear_of_spikes`, the amplitude follows the first product.
        amplitude = self.neuron.scale if isinstance(self.neuron, ParallelBiSpike) else 1.0
        return x + linear_gelu_linear(self.fc1, self.fc2, spikes, amplitude)


def _neuron(calibrated: bool, context: BuildContext) -> NeuronLayer:
    if not calibrated:
        return make_neuron(None, context)
    spec = context.neuron
    if spec.kind != ParallelBiSpike.kind:
        raise ValueError(f"--neuron {spec.kind} has no amplitude: use --amplitude fixed, or --neuron bispike")
    if spec.v_threshold != 1.0:
        raise ValueError(
            f"--v-threshold {spec.v_threshold} is the amplitude of --amplitude fixed, and that of first-batch follows "
            "from data: leave one out"
        )
    return ParallelBiSpike(None, context, calibrated=True)


def token_linear(
    inputs: int, outputs: int, style: Style, context: BuildContext | None = None, blocks: int = 1
) -> ParallelConv:
    """A linear layer for each token."""
    return ParallelConv(
        inputs,
        outputs,
        1,
        context,
        initialise=trunc_normal,
        style=style,
        bias=True,
        dims=1,
        blocks=blocks,
        initialise_bias=zeros,
    )


def _linear_of_spikes(neuron: NeuronLayer, linear: ParallelConv, x: Tensor) -> Tensor:
    """linear(amplitude * neuron(x)), with the bias."""
    spikes = neuron(x)
    if not isinstance(neuron, ParallelBiSpike):
        return linear(spikes)
    # Unit spikes travel as two bits, so the amplitude follows the product.
    y = neuron.apply_amplitude(linear(spikes, add_bias=False))
    assert linear.bias is not None
    return y + linear.bias.to(y.dtype).view(-1, 1)
