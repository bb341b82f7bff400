"""QKFormer's tensor names in SpikingJelly. Shapes are equal."""

from __future__ import annotations

from megasnn.models.weight_names import conv_norm_prefixes, prefix_dialect

_FIRST = ("conv1", "bn1", "lif1")
_SECOND = ("conv2", "bn2", "lif2")
_THIRD = ("conv3", "bn3", "lif3")
_CONV_NORMS = {
    "patch_embed1.begin": ("patch_embed1", _FIRST),
    "patch_embed1.down": ("patch_embed1", _SECOND),
    "patch_embed1.last": ("patch_embed1", _THIRD),
    "patch_embed2.down": ("patch_embed2", _FIRST),
    "patch_embed2.last": ("patch_embed2", _SECOND),
    "patch_embed3.down": ("patch_embed3", _FIRST),
    "patch_embed3.last": ("patch_embed3", _SECOND),
    "patch_embed{}.shortcut": ("patch_embed{}.shortcut", ("0", "1", "2")),
    "stage{}.{}.attention.inner.qk": ("stage{}.{}.attn", ("qk_conv_bn.0", "qk_conv_bn.1", "qk_lif")),
    "stage{}.{}.attention.inner.qkv": ("stage{}.{}.attn", ("qkv_conv_bn.0", "qkv_conv_bn.1", "qkv_lif")),
    "stage{}.{}.attention.inner.projection": ("stage{}.{}.attn", ("proj_conv_bn.0", "proj_conv_bn.1", "proj_lif")),
    "stage{}.{}.mlp.fc1": ("stage{}.{}.mlp", ("fc1", "bn1", "lif1")),
    "stage{}.{}.mlp.fc2": ("stage{}.{}.mlp", ("fc2", "bn2", "lif2")),
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
    # The authors' CIFAR model, which SpikingJelly lacks.
    lacks={"patch_embedding": "cifar"},
)

DIALECTS = (SPIKINGJELLY,)
