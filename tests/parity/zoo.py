"""The models that were added through `Model`, each beside SpikingJelly's own of the same sizes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from unittest import mock

from spikingjelly.activation_based import functional, neuron
from torch import nn

from megasnn.models.qkformer.model import QKFormer
from megasnn.models.sew_resnet.model import SewResNet
from megasnn.models.spike_driven.model import SpikeDrivenTransformer
from tests.parity.beside import Case
from tests.parity.spikingjelly_reference import with_other_norms

CLASSES = 5


def sew_resnets() -> ModuleType:
    """SpikingJelly's `model.sew_resnet`. It asks torchvision for a function that downloads weights, which no test
    needs."""
    stand_in = ModuleType("torchvision.models.utils")
    stand_in.load_state_dict_from_url = None  # type: ignore[attr-defined]
    packages = {name: ModuleType(name) for name in ("torchvision", "torchvision.models")}
    with mock.patch.dict(sys.modules, {**packages, "torchvision.models.utils": stand_in}):
        from spikingjelly.activation_based.model import sew_resnet
    return sew_resnet


def _multi_step(make: Callable[[], nn.Module]) -> nn.Module:
    model = with_other_norms(make)
    functional.set_step_mode(model, "m")
    return model


def _sew_resnet(connect: str, depth: int = 18) -> Case:
    model = SewResNet(connect=connect, depth=depth, image_size=32, time_steps=2, num_classes=CLASSES)  # type: ignore[arg-type]

    def reference() -> nn.Module:
        return getattr(sew_resnets(), f"sew_resnet{depth}")(
            cnf=connect.upper(), spiking_neuron=neuron.LIFNode, num_classes=CLASSES, detach_reset=True
        )

    return Case(model, partial(_multi_step, reference))


def _qkformer() -> Case:
    model = QKFormer(
        embed_dim=32, depths="1,1,1", num_heads="2,2,2", mlp_ratio=2.0, image_size=64, time_steps=2, num_classes=CLASSES
    )

    def reference() -> nn.Module:
        from spikingjelly.activation_based.model.qkformer import QKFormer as Theirs

        return Theirs(
            T=2,
            num_classes=CLASSES,
            embed_dims=32,
            num_heads=(2, 2, 2),
            depths=(1, 1, 1),
            mlp_ratio=2.0,
            detach_reset=True,
        )

    return Case(model, partial(_multi_step, reference))


def _spike_driven() -> Case:
    model = SpikeDrivenTransformer(
        embed_dim=32, depth=2, mlp_ratio=2.0, pooled_stages="0011", image_size=16, time_steps=3, num_classes=CLASSES
    )

    def reference() -> nn.Module:
        from spikingjelly.activation_based.model.spike_driven_transformer import SpikeDrivenTransformer as Theirs

        return Theirs(
            T=3,
            num_classes=CLASSES,
            embed_dims=32,
            num_heads=4,
            depths=2,
            mlp_ratio=2.0,
            pooling_stat="0011",
            detach_reset=True,
        )

    return Case(model, partial(_multi_step, reference))


CASES = {f"sew_resnet-{connect}": _sew_resnet(connect) for connect in ("add", "and", "iand")}
CASES |= {"sew_resnet-34": _sew_resnet("add", 34), "qkformer": _qkformer(), "spike_driven": _spike_driven()}
