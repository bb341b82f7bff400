"""SpikeLM as a causal language model: dimensions and layers.

The decoder of SpikingJelly's benchmark (benchmark/snn_llm/spikelm.py), with the neuron of SpikeLM (arXiv 2406.03287).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic.dataclasses import dataclass as config_dataclass

from megasnn.common.files import STRICT, CheckpointError
from megasnn.config.checks import Positive, Size
from megasnn.config.neuron import NeuronConfig
from megasnn.kernels import NEURONS
from megasnn.models.model import Model

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from megasnn.layers.layer import Layer
    from megasnn.models.arrays import ArraySpec


@config_dataclass(frozen=True, config=STRICT)
class SpikeLMNeuronConfig(NeuronConfig):
    """Defaults of SpikeLM's neuron."""

    neuron: Annotated[str, NEURONS] = "bispike"


@dataclass(frozen=True, kw_only=True)
class SpikeLM(Model):
    """SpikeLM's dimensions; the defaults are a small model for a byte-level tokenizer."""

    name = "spike_lm"
    marker = "blocks.0.attention.qkv.bias"
    neuron: ClassVar[type[NeuronConfig]] = SpikeLMNeuronConfig
    unused: ClassVar[tuple[str, ...]] = ("image_size", "in_channels", "num_classes")

    embed_dim: Size = 256
    """Channels of the stream."""
    depth: Size = 6
    """Number of blocks, each with an attention and an MLP."""
    num_heads: Size = 8
    """Attention heads, divided among the tensor-parallel ranks."""
    mlp_ratio: Positive = 4.0
    """Hidden channels of the MLP, in multiples of --embed-dim."""
    seq_length: Size = 256
    """Tokens of a sample."""
    vocab_size: Size = 257
    """Number of tokens in the vocabulary; tensor-parallel ranks divide them as evenly as possible, without padding."""
    tied: bool = False
    """The output layer has the weights of the embedding."""
    amplitude: Literal["fixed", "first-batch"] = "fixed"
    """Amplitude of the spikes: --v-threshold, or for each time step twice the mean magnitude of a layer's potentials in
    the first batch."""
    attention: Literal["softmax", "spiking"] = "softmax"
    """Softmax attention; or attention on spikes without softmax, whose cost is linear in the length."""
    positions: Literal["rotary", "learned"] = "rotary"
    """Positions of tokens: rotary embeddings in the attention, or a learned vector for each, added to the embedding."""

    @property
    def inputs(self) -> Mapping[str, ArraySpec]:
        from megasnn.models.arrays import ArraySpec

        return {"tokens": ArraySpec((self.seq_length,), "int", below=self.vocab_size, over_tokens=True)}

    @property
    def target(self) -> ArraySpec:
        from megasnn.models.arrays import ArraySpec

        return ArraySpec((self.seq_length,), "int", below=self.vocab_size, over_tokens=True)

    @property
    def hidden(self) -> int:
        """Hidden channels of the MLP."""
        return int(self.embed_dim * self.mlp_ratio)

    def loss(self, output: Any, target: Tensor) -> Tensor:
        loss: Tensor = output["loss"][0]
        return loss

    def metrics(self, output: Any, target: Tensor) -> Mapping[str, Tensor]:
        return {"top1": output["top1"][0]}

    def from_spikingjelly(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As in `Model`. Raises CheckpointError where the file's model is tied and this one is not, or the reverse."""
        from megasnn.models.spike_lm.weight_names import SPIKINGJELLY

        tensors = super().from_spikingjelly(state_dict)
        if self.tied:
            tensors = SPIKINGJELLY.without_copies(tensors)
            if "head.weight" in tensors:
                raise CheckpointError("lm_head.weight differs from model.embedding.weight: leave out --tied")
        elif "head.weight" not in tensors:
            raise CheckpointError("lm_head.weight is missing, as in a tied model: give it --tied")
        return tensors

    def problems(self, tensor_parallel: int) -> list[str]:
        wrong = super().problems(tensor_parallel)
        if self.embed_dim % self.num_heads:
            wrong.append(f"--embed-dim {self.embed_dim} must be a multiple of --num-heads {self.num_heads}")
        elif self.positions == "rotary" and self.embed_dim // self.num_heads % 2:
            wrong.append(
                f"--positions rotary needs heads of an even size, and --embed-dim {self.embed_dim} with --num-heads "
                f"{self.num_heads} gives {self.embed_dim // self.num_heads} channels: change one, or use learned"
            )
        if self.attention == "spiking" and self.positions == "rotary":
            wrong.append("--attention spiking has spikes, which do not rotate: give it --positions learned")
        ranks = f"--tensor-model-parallel-size {tensor_parallel}"
        if self.num_heads % tensor_parallel:
            wrong.append(f"--num-heads {self.num_heads} does not divide by {ranks}")
        if self.vocab_size < tensor_parallel:
            wrong.append(f"--vocab-size {self.vocab_size} is smaller than {ranks}: each rank needs a token of its own")
        hidden = f"--mlp-ratio {self.mlp_ratio} of --embed-dim {self.embed_dim} gives {self.hidden} hidden channels"
        if self.hidden < 1:
            wrong.append(f"{hidden}: raise it")
        elif self.hidden % tensor_parallel:
            wrong.append(f"{hidden}, which do not divide by {ranks}")
        return wrong

    def layers(self) -> Iterable[Layer]:
        from megasnn.layers.embedding import ParallelEmbedding
        from megasnn.layers.layer import layer
        from megasnn.layers.layer_norm import ParallelLayerNorm
        from megasnn.layers.vocabulary import NextTokenLoss
        from megasnn.models.spike_lm.blocks import AttentionHalf, MLPHalf, SpikingAttentionHalf

        dim = self.embed_dim
        calibrated = self.amplitude == "first-batch"
        length = self.seq_length if self.positions == "learned" else 0
        embedding = ParallelEmbedding(self.vocab_size, dim, length=length)
        yield layer("embedding", embedding)
        for block in range(self.depth):
            name = f"blocks.{block}"
            attention: Module
            if self.attention == "spiking":
                attention = SpikingAttentionHalf(dim, self.num_heads, calibrated)
            else:
                attention = AttentionHalf(dim, self.num_heads, calibrated, rotary=self.positions == "rotary")
            yield layer(f"{name}.attention", attention, layer_group=name)
            yield layer(f"{name}.mlp", MLPHalf(dim, self.hidden, calibrated), layer_group=name)
        yield layer("norm", ParallelLayerNorm(dim), layer_group="head")
        head = NextTokenLoss(dim, self.vocab_size)
        # An assigned parameter is shared, also between pipeline stages.
        if self.tied:
            head.weight = embedding.weight
        # The layer takes the target: it forms the loss chunk by chunk, and logits of all tokens never exist at once.
        yield layer("head", head, takes=("norm", "target"))
