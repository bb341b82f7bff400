"""Names of SEW-ResNet's tensors in SpikingJelly, and in the code published with the paper (arXiv 2102.04159,
github.com/fangwei123456/Spike-Element-Wise-ResNet); the tensors are the same on all sides, shape by shape."""

from __future__ import annotations

from megasnn.models.weight_names import conv_norm_prefixes, prefix_dialect

_BLOCK = {
    "first": ("conv1", "bn1", "sn1"),
    "second": ("conv2", "bn2", "sn2"),
    "shortcut": ("downsample.0", "downsample.1", "downsample_sn"),
}

SPIKINGJELLY = prefix_dialect(
    "spikingjelly",
    "SpikingJelly's SEW-ResNet",
    marker="layer1.0.bn1.weight",
    prefixes={  # here -> there; {} stands for a number
        "stem.conv": "conv1",
        "stem.norm": "bn1",
        "stem.neuron": "sn1",
        **conv_norm_prefixes({f"layer{{}}.{{}}.{ours}": ("layer{}.{}", theirs) for ours, theirs in _BLOCK.items()}),
        "head": "fc",
    },
)

_NAMES = {"first": "conv1", "second": "conv2", "shortcut": "downsample.0"}

PUBLISHED = prefix_dialect(
    "published",
    "the published SEW-ResNet",
    marker="layer1.0.conv1.module.0.weight",
    prefixes={
        "stem.conv": "conv1",
        "stem.norm": "bn1",
        **conv_norm_prefixes(
            {f"layer{{}}.{{}}.{a}": (f"layer{{}}.{{}}.{b}.module", ("0", "1")) for a, b in _NAMES.items()}
        ),
        "head": "fc",
    },
)

DIALECTS = (SPIKINGJELLY, PUBLISHED)
