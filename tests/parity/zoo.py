"""The models that were added through `Model`, each beside SpikingJelly's own of the same sizes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from unittest import mock

import torch
from spikingjelly.activation_based import functional, neuron
from torch import Tensor, nn

from megasnn.checkpoint import load_globals_into
from megasnn.engine.distributed_model import DistributedModel
from megasnn.kernels import NeuronSpec
from megasnn.layers import BuildContext
from megasnn.models.building import describe
from megasnn.models.model import Model
from megasnn.models.qkformer.dimensions import QKFormer
from megasnn.models.sew_resnet.dimensions import SewResNet
from megasnn.models.spike_driven.dimensions import SpikeDrivenTransformer
from megasnn.parallel_state import destroy_model_parallel, initialize_model_parallel
from megasnn.schedule import plan_schedule
from megasnn.schedule.partition import balanced_bounds
from tests.parity.ranks import Layout, RankStep, record_step

SIZES = [2, 2, 1]
CLASSES = 5


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        model: ours. reference: makes SpikingJelly's.
    """

    model: Model
    reference: Callable[[], nn.Module]


def sew_resnets() -> ModuleType:
    """SpikingJelly's `model.sew_resnet`. It asks torchvision for a function that downloads weights, which no test
    needs."""
    stand_in = ModuleType("torchvision.models.utils")
    stand_in.load_state_dict_from_url = None  # type: ignore[attr-defined]
    packages = {name: ModuleType(name) for name in ("torchvision", "torchvision.models")}
    with mock.patch.dict(sys.modules, {**packages, "torchvision.models.utils": stand_in}):
        from spikingjelly.activation_based.model import sew_resnet
    return sew_resnet


def _sew_resnet(connect: str, depth: int = 18) -> Case:
    model = SewResNet(connect=connect, depth=depth, image_size=32, time_steps=2, num_classes=CLASSES)  # type: ignore[arg-type]

    def reference() -> nn.Module:
        return getattr(sew_resnets(), f"sew_resnet{depth}")(
            cnf=connect.upper(), spiking_neuron=neuron.LIFNode, num_classes=CLASSES, detach_reset=True
        )

    return Case(model, reference)


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

    return Case(model, reference)


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

    return Case(model, reference)


CASES = {f"sew_resnet-{connect}": _sew_resnet(connect) for connect in ("add", "and", "iand")}
CASES |= {"sew_resnet-34": _sew_resnet("add", 34), "qkformer": _qkformer(), "spike_driven": _spike_driven()}


def data(model: Model, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Images and labels of a global batch."""
    generator = torch.Generator().manual_seed(7)
    images = torch.randn(sum(SIZES), *model.input_shape, generator=generator, dtype=torch.float64)
    return images.to(dtype), torch.randint(0, CLASSES, (sum(SIZES),), generator=generator)


def build(case: Case) -> nn.Module:
    """SpikingJelly's model on images that are shown at every step."""
    model = with_other_norms(case.reference)
    functional.set_step_mode(model, "m")
    model.register_forward_pre_hook(lambda _, inputs: inputs[0].expand(case.model.time_steps, *inputs[0].shape))
    # Theirs takes the mean over time before a linear head, ours behind it.
    model.register_forward_hook(lambda _, inputs, y: y if y.ndim == 3 else y.unsqueeze(0))
    return model


def with_other_norms(make: Callable[[], nn.Module]) -> nn.Module:
    """A model with norm parameters away from their initial values, so that errors in them show; in float64."""
    torch.manual_seed(1)
    model = make().double()
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            nn.init.uniform_(module.weight, 0.8, 1.6)
            nn.init.uniform_(module.bias, 0.2, 1.2)
    return model


def one_step(
    name: str, layout: Layout, weights: dict[str, Tensor] | None, dtype: torch.dtype = torch.float64
) -> RankStep:
    """One of our steps, on every rank of an initialised world."""
    state = initialize_model_parallel(layout.tensor, layout.pipeline)
    try:
        case = CASES[name]
        model = describe(case.model, NeuronSpec())
        context = BuildContext(state.tensor, dtype, dtype)
        plan = plan_schedule(layout.schedule, layout.pipeline, layout.chunks)
        bounds = balanced_bounds([1.0] * len(model.layers), len(plan.placement), allow_empty=True)
        engine = DistributedModel(model, state, context, bounds, plan)
        if weights is not None:
            load_globals_into(engine.tensors, case.model.from_spikingjelly(weights), state.world.handle)
        return record_step(engine, state, *data(case.model, dtype), SIZES[0])
    finally:
        destroy_model_parallel()
