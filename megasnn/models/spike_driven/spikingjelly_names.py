"""Names of the Spike-driven Transformer's tensors in SpikingJelly; the tensors are the same, shape by shape."""

from __future__ import annotations

from megasnn.models.names import prefix_dialect, unit_prefixes

_BLOCK = {
    **{f"attention.inner.{name}": (f"attn.{name}_conv", f"attn.{name}_bn", f"attn.{name}_lif") for name in "qkv"},
    "mlp.fc1": ("mlp.fc1", "mlp.bn1", "mlp.lif1"),
    "mlp.fc2": ("mlp.fc2", "mlp.bn2", "mlp.lif2"),
}
_STEM = "patch_embed"

SPIKINGJELLY = prefix_dialect(
    "spikingjelly",
    "SpikingJelly's Spike-driven Transformer",
    marker="patch_embed.rpe_conv.weight",
    prefixes={
        **unit_prefixes({f"{_STEM}.stages.{{}}": (f"{_STEM}.stages.{{}}", ("0", "1", "2"))}),
        f"{_STEM}.last.conv": f"{_STEM}.final_stage.0",
        f"{_STEM}.last.norm": f"{_STEM}.final_stage.1",
        **unit_prefixes({f"{_STEM}.positional_encoding.inner": (_STEM, ("rpe_conv", "rpe_bn", "final_lif"))}),
        **unit_prefixes({f"blocks.{{}}.{ours}": ("blocks.{}", theirs) for ours, theirs in _BLOCK.items()}),
        "blocks.{}.attention.inner.neuron": "blocks.{}.attn.shortcut_lif",
        "blocks.{}.attention.inner.gate": "blocks.{}.attn.attn_lif",
        "blocks.{}.attention.inner.projection": "blocks.{}.attn.proj_conv",
        "blocks.{}.attention.inner.norm": "blocks.{}.attn.proj_bn",
        "head.neuron": "head_lif",
        "head.linear": "head",
    },
)
