"""The Spike-driven Transformer's tensor names in SpikingJelly. Shapes are equal."""

from __future__ import annotations

from megasnn.models.weight_names import conv_norm_prefixes, prefix_dialect

_CONV_NORMS = {
    "patch_embed.stages.{}": ("patch_embed.stages.{}", ("0", "1", "2")),
    "patch_embed.positional_encoding.inner": ("patch_embed", ("rpe_conv", "rpe_bn", "final_lif")),
    "blocks.{}.attention.inner.q": ("blocks.{}.attn", ("q_conv", "q_bn", "q_lif")),
    "blocks.{}.attention.inner.k": ("blocks.{}.attn", ("k_conv", "k_bn", "k_lif")),
    "blocks.{}.attention.inner.v": ("blocks.{}.attn", ("v_conv", "v_bn", "v_lif")),
    "blocks.{}.mlp.fc1": ("blocks.{}.mlp", ("fc1", "bn1", "lif1")),
    "blocks.{}.mlp.fc2": ("blocks.{}.mlp", ("fc2", "bn2", "lif2")),
}

SPIKINGJELLY = prefix_dialect(
    "spikingjelly",
    "SpikingJelly's Spike-driven Transformer",
    marker="patch_embed.rpe_conv.weight",
    prefixes={
        **conv_norm_prefixes(_CONV_NORMS),
        "patch_embed.last.conv": "patch_embed.final_stage.0",
        "patch_embed.last.norm": "patch_embed.final_stage.1",
        "blocks.{}.attention.inner.neuron": "blocks.{}.attn.shortcut_lif",
        "blocks.{}.attention.inner.gate": "blocks.{}.attn.attn_lif",
        "blocks.{}.attention.inner.projection": "blocks.{}.attn.proj_conv",
        "blocks.{}.attention.inner.norm": "blocks.{}.attn.proj_bn",
        "head.neuron": "head_lif",
        "head.linear": "head",
    },
)

DIALECTS = (SPIKINGJELLY,)
