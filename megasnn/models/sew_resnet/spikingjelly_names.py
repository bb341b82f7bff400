"""Names of SEW-ResNet's tensors in SpikingJelly; the tensors are the same on both sides, shape by shape."""

from __future__ import annotations

from megasnn.models.names import prefix_dialect

SPIKINGJELLY = prefix_dialect(
    "spikingjelly",
    "SpikingJelly's SEW-ResNet",
    marker="layer1.0.bn1.weight",
    prefixes={  # here -> there; {} stands for a number
        "stem.conv": "conv1",
        "stem.norm": "bn1",
        "stem.neuron": "sn1",
        "layer{}.{}.first.conv": "layer{}.{}.conv1",
        "layer{}.{}.first.norm": "layer{}.{}.bn1",
        "layer{}.{}.first.neuron": "layer{}.{}.sn1",
        "layer{}.{}.second.conv": "layer{}.{}.conv2",
        "layer{}.{}.second.norm": "layer{}.{}.bn2",
        "layer{}.{}.second.neuron": "layer{}.{}.sn2",
        "layer{}.{}.shortcut.conv": "layer{}.{}.downsample.0",
        "layer{}.{}.shortcut.norm": "layer{}.{}.downsample.1",
        "layer{}.{}.shortcut.neuron": "layer{}.{}.downsample_sn",
        "head": "fc",
    },
)
