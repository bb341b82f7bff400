"""Names of the VGG's tensors in SpikingJelly's CIFAR10DVSVGG.

The tensors are the same on both sides, shape by shape; only names differ. In a block of theirs, pooling takes the
first place in front of the convolution; in their classifier, dropout does if there is any:

    here                          spikingjelly.activation_based.examples.memopt.models.CIFAR10DVSVGG
    features.0.conv.weight        features.0.proj_bn.0.weight
    features.2.conv.weight        features.2.proj_bn.1.weight         (behind a pooling)
    features.2.norm.running_var   features.2.proj_bn.2.running_var
    features.2.neuron.w           features.2.neuron.w                 (parametric LIF only)
    classifier.linear.weight      classifier.1.weight                 (classifier.0.weight without dropout)
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from torch import Tensor

from megasnn.files import CheckpointError
from megasnn.models.vgg_dvs.model import CIFAR10_DVS, parse_channels
from megasnn.models.weight_names import (
    NORM_TENSORS,
    Dialect,
    ModelValues,
    Recipe,
    inverse,
    is_parametric,
    rename_all,
    renamed,
)


def spikingjelly_names(pools: Sequence[bool], dropout: bool, parametric: bool) -> dict[str, str]:
    """Our global name -> SpikingJelly's name, for every tensor.

    Args:
        pools: for each block, whether a pooling comes in front of its convolution.
        dropout: whether their classifier has a dropout layer.
        parametric: the neurons are parametric LIF and have a trained time constant `w` each.
    """
    names: dict[str, str] = {}
    for index, pool in enumerate(pools):
        unit = f"features.{index}"
        conv, norm = f"{unit}.proj_bn.{int(pool)}", f"{unit}.proj_bn.{int(pool) + 1}"
        names |= {f"{unit}.conv.{tensor}": f"{conv}.{tensor}" for tensor in ("weight", "bias")}
        names |= {f"{unit}.norm.{tensor}": f"{norm}.{tensor}" for tensor in NORM_TENSORS}
        if parametric:
            names[f"{unit}.neuron.w"] = f"{unit}.neuron.w"
    last = f"classifier.{int(dropout)}"
    return names | {f"classifier.linear.{tensor}": f"{last}.{tensor}" for tensor in ("weight", "bias")}


def vgg_from_spikingjelly(state_dict: Mapping[str, Tensor], pools: Sequence[bool]) -> dict[str, Tensor]:
    """A SpikingJelly VGG's state_dict, with dropout or without, under our global names; no copies.

    Raises:
        CheckpointError: names are missing or unexpected (lists them, as SpikingJelly calls them).
    """
    ours = spikingjelly_names(pools, "classifier.1.weight" in state_dict, is_parametric(state_dict))
    return rename_all(ours, state_dict, "this is not the state_dict of SpikingJelly's VGG with these --channels:")


def vgg_to_spikingjelly(tensors: Mapping[str, Tensor], pools: Sequence[bool], dropout: bool) -> dict[str, Tensor]:
    """Global tensors of a VGG as a state_dict that SpikingJelly's model loads strictly; raises as the other way."""
    ours = spikingjelly_names(pools, dropout, is_parametric(tensors))
    return rename_all(inverse(ours), tensors, "these are not the tensors of a VGG with these --channels:")


def _incoming(theirs: Collection[str]) -> Recipe:
    pools = [f"features.{block}.proj_bn.2.weight" in theirs for block in range(_block_count(theirs))]
    return renamed(spikingjelly_names(pools, "classifier.1.weight" in theirs, is_parametric(theirs)))


def _outgoing(ours: Collection[str], model: ModelValues | None) -> Recipe:
    blocks, _ = parse_channels(model["channels"] if model is not None else CIFAR10_DVS)
    if len(blocks) != _block_count(ours):
        raise CheckpointError(
            f"these are weights of a VGG with {_block_count(ours)} convolutions, and nothing says where it pools; only "
            f"the default --channels ({CIFAR10_DVS}), with {len(blocks)}, are known without a model configuration"
        )
    dropout = model is None or model["dropout"] > 0
    names = spikingjelly_names([block.pool for block in blocks], dropout, is_parametric(ours))
    return renamed(inverse(names))


def _block_count(names: Iterable[str]) -> int:
    found = (re.match(r"features\.(\d+)\.", name) for name in names)
    return len({match[1] for match in found if match})  # counted: a stranger's numbers may be of any size


SPIKINGJELLY = Dialect(
    name="spikingjelly",
    title="SpikingJelly's CIFAR10DVSVGG",
    marker="features.0.proj_bn.1.weight",
    incoming=_incoming,
    outgoing=_outgoing,
)


DIALECTS = (SPIKINGJELLY,)
