"""What a boundary carries is known before it is there: models of MegaSNN's layers send no descriptors, on any layout."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import megasnn
from megasnn import Engine
from megasnn.comm.codec import Content
from megasnn.layers import BuildContext, ConvNormNeuron, MeanLinear
from megasnn.models.building import describe
from megasnn.models.description import Carried
from megasnn.models.layer import layer
from megasnn.models.model import Model
from megasnn.models.spikformer.dimensions import Spikformer
from megasnn.models.vgg_dvs.dimensions import VggDvs
from megasnn.pipeline.boundaries import Boundaries
from megasnn.pipeline.p2p import TensorDescriptor
from tests.models.networks import between
from tests.parity.zoo import CASES

SMALL = {
    "spikformer": Spikformer(
        image_size=16, num_classes=10, patch_size=4, embed_dim=32, depth=2, num_heads=4, time_steps=2, mlp_ratio=2.0
    ),
    "vgg_dvs": VggDvs(channels="4,P,8,8,P", image_size=16, time_steps=3, num_classes=10, dropout=0.4),
    **{name: CASES[name].model for name in ("sew_resnet-add", "qkformer", "spike_driven")},
}
LAYOUTS = {
    "bf16": (2, {"precision": "bf16"}),
    "plain-neurons": (2, {"neuron_backend": "torch", "grad_wire_dtype": "bf16"}),
    "frozen": (2, {"freeze": "*"}),
    "tensor": (4, {"tensor_model_parallel_size": 2}),
    "rows": (4, {"context_parallel_size": 2, "context_parallel_cut": "rows"}),
    "samples": (4, {"context_parallel_size": 2}),
}


def _headers(name: str, flags: dict[str, object]) -> int:
    """How many descriptors this rank has sent in a step, one of fewer samples, and an evaluation of a single one."""
    sent, to_header = [], TensorDescriptor.to_header

    def told(descriptor: TensorDescriptor) -> Tensor:
        sent.append(descriptor)
        return to_header(descriptor)

    model, layout = SMALL[name], {"pipeline_model_parallel_size": 2, **flags}
    with (
        mock.patch.object(TensorDescriptor, "to_header", told),
        Engine(model, micro_batch_size=4, global_batch_size=10, train_iters=2, **layout) as engine,
    ):
        shape = engine.distributed.model.input_shape
        for samples in (10, 7):
            images = torch.rand(samples, *shape, generator=torch.Generator().manual_seed(0))
            engine.train_step(images, torch.arange(samples) % 5)
        engine.evaluate(images[:1], torch.zeros(1, dtype=torch.long))
    return len(sent)
