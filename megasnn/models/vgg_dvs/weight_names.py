"""The VGG's tensor names in SpikingJelly's memopt.models.CIFAR10DVSVGG. Shapes are equal."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megasnn.common.files import CheckpointError
from megasnn.models.vgg_dvs.model import parse_channels
from megasnn.models.weight_names import Dialect, ModelValues, NameMap, moved


def _prefixes(pools: Sequence[bool], dropout: bool) -> dict[str, str]:
    """Our module path -> SpikingJelly's. `pools`: True for a convolution after a pooling."""
    # A dropout comes first and shifts the linear layer from 0 to 1.
    prefixes = {"classifier.linear": f"classifier.{int(dropout)}"}
    for index, pool in enumerate(pools):
        conv_norm = f"features.{index}"
        # A pooling comes first, too, and shifts convolution and norm.
        prefixes[f"{conv_norm}.conv"] = f"{conv_norm}.proj_bn.{int(pool)}"
        prefixes[f"{conv_norm}.norm"] = f"{conv_norm}.proj_bn.{int(pool) + 1}"
        prefixes[f"{conv_norm}.neuron"] = f"{conv_norm}.neuron"
    return prefixes


def _incoming(theirs: Collection[str]) -> NameMap:
    blocks = [f"features.{index}.proj_bn" for index in range(len(theirs))]
    # Number 2 is a norm behind a pooling; without one the norm is number 1.
    pools = [f"{block}.2.weight" in theirs for block in blocks if f"{block}.1.weight" in theirs]
    prefixes = _prefixes(pools, dropout="classifier.1.weight" in theirs)
    back = {there: here for here, there in prefixes.items()}
    return moved(theirs, back)


def _outgoing(ours: Collection[str], model: ModelValues | None) -> NameMap:
    if model is None:
        raise CheckpointError("only a configuration says where a VGG pools: export the checkpoint of a run")
    pools = [pool for _, pool in parse_channels(model["channels"])[0]]
    return moved(ours, _prefixes(pools, model["dropout"] > 0))


SPIKINGJELLY = Dialect(
    name="spikingjelly",
    title="SpikingJelly's CIFAR10DVSVGG",
    marker="features.0.proj_bn.1.weight",
    incoming=_incoming,
    outgoing=_outgoing,
)

DIALECTS = (SPIKINGJELLY,)
