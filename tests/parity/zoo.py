"""The models that were added through `Model`, each beside SpikingJelly's own of the same sizes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

from spikingjelly.activation_based import functional, neuron
from spikingjelly.activation_based.model import qkformer, spike_driven_transformer
from torch import nn

from megasnn.models.e_spikeformer.model import ESpikeFormer
from megasnn.models.model import Model
from megasnn.models.qkformer.model import QKFormer
from megasnn.models.sew_resnet.model import SewResNet
from megasnn.models.spike_driven.model import SpikeDrivenTransformer
from tests.parity.beside import Case
from tests.parity.e_spikeformer import Published
from tests.parity.spikingjelly_reference import with_other_norms

CLASSES = 5
THEIRS = dict(num_classes=CLASSES, embed_dims=32, mlp_ratio=2.0, detach_reset=True)


def their_sew_resnet(connect: str = "add", depth: int = 18, classes: int = CLASSES, **options: Any) -> nn.Module:
    """SpikingJelly's, whose module asks torchvision for a function that downloads weights, which no test needs."""
    stand_in = ModuleType("torchvision.models.utils")
    stand_in.load_state_dict_from_url = None  # type: ignore[attr-defined]
    packages = {name: ModuleType(name) for name in ("torchvision", "torchvision.models")}
    with mock.patch.dict(sys.modules, {**packages, "torchvision.models.utils": stand_in}):
        from spikingjelly.activation_based.model import sew_resnet
    options = {"cnf": connect.upper(), "spiking_neuron": neuron.LIFNode, "detach_reset": True} | options
    model = getattr(sew_resnet, f"sew_resnet{depth}")(num_classes=classes, **options)
    functional.set_step_mode(model, "m")
    return model


def _case(model: Model, make: Callable[[], nn.Module], firing: float = 0.8) -> Case:
    def reference() -> nn.Module:
        net = with_other_norms(make)
        functional.set_step_mode(net, "m")
        return net

    return Case(model, reference, firing=firing)


def _sew_resnet(connect: Any, depth: int = 18) -> Case:
    model = SewResNet(connect=connect, depth=depth, image_size=32, time_steps=2, num_classes=CLASSES)
    return _case(model, partial(their_sew_resnet, connect, depth))


CASES = {f"sew_resnet-{connect}": _sew_resnet(connect) for connect in ("add", "and", "iand")}
CASES |= {
    "sew_resnet-34": _sew_resnet("add", 34),
    "qkformer": _case(
        QKFormer(
            embed_dim=32, depths="1,1,1", num_heads="2,2,2", mlp_ratio=2.0, image_size=64, time_steps=2,
            num_classes=CLASSES,
        ),
        partial(qkformer.QKFormer, T=2, num_heads=(2, 2, 2), depths=(1, 1, 1), **THEIRS),
    ),
    "spike_driven": _case(
        SpikeDrivenTransformer(
            embed_dim=32, depth=2, mlp_ratio=2.0, pooled_stages="0011", image_size=16, time_steps=3,
            num_classes=CLASSES,
        ),
        partial(
            spike_driven_transformer.SpikeDrivenTransformer, T=3, num_heads=4, depths=2, pooling_stat="0011", **THEIRS
        ),
    ),
    "e_spikeformer": _case(
        ESpikeFormer(
            embed_dims="8,16,24,32", depths="1,1", num_heads=4, mlp_ratio=2.0, image_size=32, time_steps=2,
            num_classes=CLASSES,
        ),
        partial(Published, (8, 16, 24, 32), (1, 1), heads=4, ratio=2, steps=2, classes=CLASSES),
        firing=2.0,  # of the counts, on average
    ),
}  # fmt: skip
