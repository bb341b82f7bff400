"""SEW-ResNet's tensor names in SpikingJelly and in the published code. Shapes are equal.

Published: arXiv 2102.04159, github.com/fangwei123456/Spike-Element-Wise-ResNet.
"""

from __future__ import annotations

from megasnn.models.weight_names import conv_norm_prefixes, prefix_dialect

# Here -> there; {} stands for a number.
_SPIKINGJELLY = {
    "layer{}.{}.first": ("layer{}.{}", ("conv1", "bn1", "sn1")),
    "layer{}.{}.second": ("layer{}.{}", ("conv2", "bn2", "sn2")),
    "layer{}.{}.shortcut": ("layer{}.{}", ("downsample.0", "downsample.1", "downsample_sn")),
}
_PUBLISHED = {
    "layer{}.{}.first": ("layer{}.{}.conv1.module", ("0", "1")),
    "layer{}.{}.second": ("layer{}.{}.conv2.module", ("0", "1")),
    "layer{}.{}.shortcut": ("layer{}.{}.downsample.0.module", ("0", "1")),
}

SPIKINGJELLY = prefix_dialect(
    "spikingjelly",
    "SpikingJelly's SEW-ResNet",
    marker="layer1.0.bn1.weight",
    prefixes={
        "stem.conv": "conv1",
        "stem.norm": "bn1",
        "stem.neuron": "sn1",
        **conv_norm_prefixes(_SPIKINGJELLY),
        "head": "fc",
    },
)

PUBLISHED = prefix_dialect(
    "published",
    "the published SEW-ResNet",
    marker="layer1.0.conv1.module.0.weight",
    prefixes={
        "stem.conv": "conv1",
        "stem.norm": "bn1",
        **conv_norm_prefixes(_PUBLISHED),
        "head": "fc",
    },
)

DIALECTS = (SPIKINGJELLY, PUBLISHED)
