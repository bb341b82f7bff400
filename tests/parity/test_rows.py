"""Models on images whose rows ranks share out, against one rank in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megasnn.kernels import NeuronSpec
from megasnn.layers import BuildContext, ParallelBatchNorm
from megasnn.models.building import describe
from megasnn.models.model import Model
from megasnn.models.qkformer.dimensions import QKFormer
from megasnn.models.sew_resnet.dimensions import SewResNet
from megasnn.models.spike_driven.dimensions import SpikeDrivenTransformer
from megasnn.models.spikformer.dimensions import Spikformer
from megasnn.models.vgg_dvs.dimensions import VggDvs
from megasnn.pipeline.chunk import build_chunk
from tests.distributed.whole import everybody, random

MODELS: dict[str, Model] = {
    "spikformer": Spikformer(
        embed_dim=32, depth=2, num_heads=2, mlp_ratio=2, patch_size=4, image_size=28, time_steps=3
    ),
    "vgg": VggDvs(image_size=36, time_steps=3),
    "qkformer": QKFormer(),
    "sew_resnet": SewResNet(),
    "spike_driven": SpikeDrivenTransformer(),
}


def _run(model: Model, context: BuildContext, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """A step on what this rank has of a micro-batch: logits, this rank's gradients, recorded statistics."""
    description = describe(model, NeuronSpec())
    chunk = build_chunk(description, [range(len(description.layers))], 0, context, torch.device("cpu"), seed=1).train()
    norms = [(name, each) for name, each in chunk.named_modules() if isinstance(each, ParallelBatchNorm)]
    for _, norm in norms:
        norm.recording = True
    for parameter in chunk.parameters():
        parameter.grad = torch.zeros_like(parameter)
    logits = chunk(images, range(len(images)))
    loss = torch.nn.functional.cross_entropy(logits.mean(0), labels)
    (loss * context.counts_logits).backward()
    found = {"logits": logits.detach()}
    for name, norm in norms:
        for call, (mean, variance, count) in enumerate(norm.pending):
            found |= {f"{name} mean {call}": mean, f"{name} variance {call}": variance}
            found[f"{name} count {call}"] = torch.as_tensor(count)
    return found | {f"gradient {name}": each.grad for name, each in chunk.named_parameters()}


def _both(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    group, model = everybody("context"), MODELS[name]
    context = BuildContext(dtype=torch.float64, compute_dtype=torch.float64)
    shape = describe(model, NeuronSpec()).input_shape
    images, labels = random(2, *shape, seed=5).abs(), torch.tensor([1, 3])
    whole = _run(model, context, images, labels)
    return whole, _run(model, replace(context, context=group, cut="rows"), images, labels)


@pytest.mark.parametrize(("name", "size"), [("spikformer", 2), ("spikformer", 3), ("vgg", 2), ("vgg", 3)])
def test_rows_compute_what_one_rank_does(ranks, name, size) -> None:
    found = ranks(size, _both, name)
    whole = found[0][0]
    for expected, cut in found:
        for key in expected:
            if not key.startswith("gradient"):
                torch.testing.assert_close(cut[key], expected[key].to(cut[key].dtype), rtol=1e-9, atol=1e-10, msg=key)
    for key in whole:
        if key.startswith("gradient"):
            total = sum(cut[key] for _, cut in found)
            torch.testing.assert_close(total, whole[key], rtol=1e-9, atol=1e-10, msg=key)
