"""Names of SEW-ResNet's tensors in SpikingJelly; the tensors are the same on both sides, shape by shape."""

from __future__ import annotations

from megasnn.models.names import prefix_dialect, unit_prefixes

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
        **unit_prefixes({f"layer{{}}.{{}}.{ours}": ("layer{}.{}", theirs) for ours, theirs in _BLOCK.items()}),
        "head": "fc",
    },
)
