"""Names of QKFormer's tensors in SpikingJelly. Shapes are equal."""

from __future__ import annotations

from megasnn.models.weight_names import conv_norm_prefixes, prefix_dialect

_EMBEDDINGS = {1: ("begin", "down", "last"), 2: ("down", "last"), 3: ("down", "last")}  # by stage
_ATTENTION = {"qk": "qk", "qkv": "qkv", "projection": "proj"}
_CONV_NORMS = {
    **{
        f"patch_embed{stage}.{conv_norm}": (f"patch_embed{stage}", (f"conv{i}", f"bn{i}", f"lif{i}"))
        for stage, conv_norms in _EMBEDDINGS.items()
        for i, conv_norm in enumerate(conv_norms, start=1)
    },
    "patch_embed{}.shortcut": ("patch_embed{}.shortcut", ("0", "1", "2")),
    **{
        f"stage{{}}.{{}}.attention.inner.{ours}": ("stage{}.{}.attn", (f"{x}_conv_bn.0", f"{x}_conv_bn.1", f"{x}_lif"))
        for ours, x in _ATTENTION.items()
    },
    **{f"stage{{}}.{{}}.mlp.fc{i}": ("stage{}.{}.mlp", (f"fc{i}", f"bn{i}", f"lif{i}")) for i in (1, 2)},
}

SPIKINGJELLY = prefix_dialect(
    "spikingjelly",
    "SpikingJelly's QKFormer",
    marker="stage1.0.attn.qk_conv_bn.0.weight",
    prefixes={
        **conv_norm_prefixes(_CONV_NORMS),
        "stage{}.{}.attention.inner.neuron": "stage{}.{}.attn.attn_lif",
        "head": "head",
    },
    lacks={"patch_embedding": "cifar"},
)

DIALECTS = (SPIKINGJELLY,)
