"""Names of the Spike-driven Transformer's tensors in SpikingJelly. Shapes are equal."""

from __future__ import annotations

from megasnn.models.weight_names import conv_norm_prefixes, prefix_dialect

_CONV_NORMS = {
    "patch_embed.stages.{}": ("patch_embed.stages.{}", ("0", "1", "2")),
    "patch_embed.positional_encoding.inner": ("patch_embed", ("rpe_conv", "rpe_bn", "final_lif")),
    **{f"blocks.{{}}.attention.inner.{x}": ("blocks.{}.attn", (f"{x}_conv", f"{x}_bn", f"{x}_lif")) for x in "qkv"},
    **{f"blocks.{{}}.mlp.fc{i}": ("blocks.{}.mlp", (f"fc{i}", f"bn{i}", f"lif{i}")) for i in (1, 2)},
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
