"""Descriptions of layers: known counts, operations as torch counts them on SpikingJelly's models, what layers give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from spikingjelly.activation_based.model.qkformer import QKFormer as TheirQKFormer
from spikingjelly.activation_based.model.spikformer import Spikformer as TheirSpikformer
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from megasnn.config import NeuronConfig
from megasnn.kernels.spike_codec import Content
from megasnn.models.build import describe_model
from megasnn.models.description import EntryDescription, LayerDescription
from megasnn.models.e_spikeformer.model import ESpikeFormer
from megasnn.models.model import Model
from megasnn.models.qkformer.model import QKFormer
from megasnn.models.sew_resnet.model import SewResNet
from megasnn.models.spike_lm.model import SpikeLM, SpikeLMNeuronConfig
from megasnn.models.spikformer.model import Spikformer
from tests.models.networks import Tied
from tests.parity.zoo import their_sew_resnet


def summary(model: Model) -> Sequence[LayerDescription]:
    return describe_model(model, NeuronConfig().spec).layers


@pytest.mark.parametrize(
    ("model", "millions"),
    [
        (Spikformer(embed_dim=256, depth=4, num_heads=8), 4.15),  # arXiv 2209.15425, table 3
        (Spikformer(embed_dim=384, depth=4, num_heads=12), 9.32),
        (SewResNet(depth=34), 21.8),  # arXiv 2102.04159
        (SewResNet(depth=18), 11.7),
        (ESpikeFormer(embed_dims="32,64,128,192"), 5.1),  # arXiv 2411.16061, table 2
        (ESpikeFormer(), 10.0),
        (ESpikeFormer(embed_dims="64,128,256,360"), 19.0),
    ],
)
def test_parameters_are_those_of_the_papers(model: Model, millions: float) -> None:
    assert sum(each.parameters for each in summary(model)) / 1e6 == pytest.approx(millions, abs=0.05)


SMALL_QKFORMER = dict(embed_dim=32, depths="1,1,1", num_heads="2,2,2", mlp_ratio=2.0, image_size=64)
OPERATIONS: list[tuple[Model, Callable[[], nn.Module]]] = [
    (SewResNet(image_size=32, time_steps=2, num_classes=7), partial(their_sew_resnet, classes=7)),
    (
        Spikformer(embed_dim=32, depth=1, num_heads=4, mlp_ratio=2.0, image_size=16, num_classes=7, time_steps=2),
        lambda: TheirSpikformer(
            T=2, img_size_h=16, img_size_w=16, patch_size=4, num_classes=7, embed_dims=32, num_heads=4, mlp_ratio=2.0,
            depths=1,
        ),
    ),
    (
        QKFormer(**SMALL_QKFORMER, time_steps=2, num_classes=7),  # type: ignore[arg-type]
        lambda: TheirQKFormer(T=2, num_classes=7, embed_dims=32, num_heads=(2, 2, 2), depths=(1, 1, 1), mlp_ratio=2.0),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("model", "reference"), OPERATIONS, ids=lambda each: getattr(each, "name", ""))
def test_operations_are_those_that_torch_counts(model: Model, reference: Callable[[], nn.Module]) -> None:
    """SpikingJelly's first convolution sees the image at every time step, ours once; its head sees the mean over time,
    ours every step. SpikingJelly's Spikformer has the head at every step."""
    theirs = reference()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        logits = theirs(torch.randn(model.time_steps, 1, *model.input_shape))
    first, *_, head = summary(model)
    ours = sum(each.operations for each in summary(model))
    repeated_first = first.operations if model.name != "qkformer" else 3 * 4 * 9 * 64 * 64
    repeated_head = head.operations // 2 if logits.ndim == 2 else 0
    assert counter.get_total_flops() // 2 == ours + repeated_first - repeated_head


def test_operations_of_a_language_model() -> None:
    words, dim, length, steps = 11, 8, 6, 3
    model = SpikeLM(vocab_size=words, embed_dim=dim, num_heads=2, depth=1, seq_length=length, time_steps=steps)
    by_name = {each.name: each.operations for each in describe_model(model, SpikeLMNeuronConfig().spec).layers}
    # The head multiplies each token's mean over time; attention has two products of all pairs of tokens.
    assert by_name["head"] == length * words * dim
    assert by_name["blocks.0.attention"] == steps * length * (4 * dim * dim + 2 * length * dim)
    assert by_name["blocks.0.mlp"] == steps * length * 8 * dim * dim


def test_what_layers_give() -> None:
    _, stem, *_, block, head = summary(SewResNet(width=8, image_size=32, time_steps=3, num_classes=10))
    for each, shape, content in (
        (stem, (3, 2, 8, 8, 8), Content.SPIKES),
        (block, (3, 2, 64, 1, 1), Content.COUNTS),
        (head, (3, 2, 10), Content.DENSE),
    ):
        assert each.entries[None] == EntryDescription(content, shape)
    assert head.parameters == 650 and head.operations == 3 * 640


def test_a_summary_counts_every_layer_once() -> None:
    """Two layers share the weight of the first."""
    description = describe_model(Tied())
    lines = description.summary().splitlines()
    assert [line.split()[0] for line in lines] == ["layer", *(layer.name for layer in description.layers), "total"]
    total = sum(torch.Size(each.shard.global_shape).numel() for each in description.tensors if each.is_parameter)
    assert lines[-1].split()[1:] == [f"{total:,}", f"{sum(layer.operations for layer in description.layers):,}"]
    assert f" [{description.layers[0].entries[None].shape[0]}, 4, 6, 6] " in lines[1]
    assert len({len(line) for line in lines}) == 1
