"""Weights go to and from SpikingJelly's own Spikformer unchanged; what does not belong is refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from spikingjelly.activation_based import functional, neuron
from spikingjelly.activation_based.model.spikformer import Spikformer

from megasnn.checkpoint import CheckpointError, load_global_tensors, load_globals_into, save_global_tensors
from megasnn.kernels import NeuronSpec
from megasnn.layers import BuildContext
from megasnn.models.building import describe
from megasnn.models.spikformer.dimensions import Spikformer as Ours
from megasnn.models.spikformer.spikingjelly_names import from_spikingjelly, to_spikingjelly
from megasnn.parallel.sharding import materialise, sharded_tensors
from tests.checkpoint.fake_model import Layout, Rank, expected, known

NEURONS = {"lif": None, "plif": partial(neuron.ParametricLIFNode, detach_reset=True)}


def spikformer(kind: str = "lif", depth: int = 2, seed: int = 0) -> Spikformer:
    torch.manual_seed(seed)
    model = Spikformer(
        T=2,
        img_size_h=16,
        img_size_w=16,
        patch_size=4,
        num_classes=5,
        embed_dims=16,
        num_heads=2,
        depths=depth,
        spiking_neuron=NEURONS[kind],
    )
    for parameter in model.parameters():
        parameter.data.add_(0.3 * torch.rand_like(parameter))
    return model


def logits(model: Spikformer, image: torch.Tensor) -> torch.Tensor:
    functional.reset_net(model)
    with torch.no_grad():
        return model.train()(image)


@pytest.mark.parametrize("kind", NEURONS)
@pytest.mark.parametrize("depth", [1, 11])
def test_round_trip_through_a_checkpoint(tmp_path, kind, depth):
    model, other = spikformer(kind, depth), spikformer(kind, depth, seed=1)
    image = torch.rand(3, 3, 16, 16)
    logits(model, image)  # running statistics of its own
    save_global_tensors(tmp_path, from_spikingjelly(model.state_dict(), depth))
    other.load_state_dict(to_spikingjelly(load_global_tensors(tmp_path), depth), strict=True)
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
        assert value.dtype == other.state_dict()[name].dtype
    assert torch.equal(logits(model, image), logits(other, image))


def our_layers(kind: str) -> list[tuple[str, torch.nn.Module]]:
    """Our model of the same dimensions, whole."""
    config = Ours(embed_dim=16, depth=2, num_heads=2, patch_size=4, image_size=16, time_steps=2, num_classes=5)
    return describe(config, NeuronSpec(kind=kind)).named_layers(BuildContext())


@pytest.mark.parametrize("kind", NEURONS)
def test_our_model_takes_and_gives_spikingjellys_weights(kind):
    """Names and shapes of the table are those of the model itself, which has no table."""
    layers = our_layers(kind)
    materialise(layers, torch.device("cpu"), seed=1)
    tensors = list(sharded_tensors(layers))
    state_dict = spikformer(kind).state_dict()
    load_globals_into(tensors, from_spikingjelly(state_dict, 2))
    back = to_spikingjelly({entry.name: entry.tensor for entry in tensors}, 2)
    assert all(torch.equal(value, back[name]) for name, value in state_dict.items())


def test_weights_of_another_neuron_are_refused():
    """A model of plain LIF neurons has no place for trained time constants, and must not just drop them."""
    tensors = sharded_tensors(our_layers("lif"))
    weights = from_spikingjelly(spikformer("plif").state_dict(), 2)
    with pytest.raises(CheckpointError, match=r"blocks\.0\.attention\.neuron\.w: given"):
        load_globals_into(tensors, weights)


def test_names_are_the_documented_ones():
    names = from_spikingjelly(spikformer("plif").state_dict())
    assert len(names) == 5 * 7 + 2 * (4 * 7 + 1) + 2
    for name, shape in {
        "patch_embed.stages.0.conv.weight": (2, 3, 3, 3),
        "patch_embed.positional_encoding.norm.running_var": (16,),
        "blocks.1.attention.qkv.conv.weight": (48, 16, 1),
        "blocks.1.attention.qkv.neuron.w": (),
        "blocks.1.attention.neuron.w": (),
        "blocks.1.attention.projection.norm.num_batches_tracked": (),
        "blocks.0.mlp.fc1.conv.weight": (64, 16, 1),
        "blocks.0.mlp.fc2.neuron.w": (),
        "head.bias": (5,),
    }.items():
        assert tuple(names[name].shape) == shape
    assert not [name for name in from_spikingjelly(spikformer("lif").state_dict()) if "neuron" in name]


def test_missing_and_unexpected_names_are_listed():
    state_dict = spikformer("plif").state_dict()
    del state_dict["blocks.1.attn.attn_lif.w"]
    state_dict["blocks.0.attn.relative_bias"] = torch.zeros(3)
    with pytest.raises(CheckpointError) as raised:
        from_spikingjelly(state_dict)
    assert "blocks.1.attn.attn_lif.w: missing" in str(raised.value)
    assert "blocks.0.attn.relative_bias: unexpected" in str(raised.value)


def test_another_depth_is_refused_both_ways():
    state_dict = spikformer(depth=2).state_dict()
    with pytest.raises(CheckpointError, match=r"blocks\.1\.mlp\.fc1\.0\.weight: unexpected"):
        from_spikingjelly(state_dict, depth=1)
    with pytest.raises(CheckpointError, match=r"blocks\.2\.mlp\.fc1\.conv\.weight: missing"):
        to_spikingjelly(from_spikingjelly(state_dict), depth=3)


def test_a_long_list_is_cut():
    with pytest.raises(CheckpointError, match=r"\.\.\. and 50 more"):
        from_spikingjelly({}, depth=2)


def known_values(change: str = "") -> dict[str, torch.Tensor]:
    values = {entry.name: known(entry.name, entry.shard.global_shape) for entry in Rank(Layout()).tensors}
    if change == "missing":
        del values["blocks.1.w"]
    elif change == "unexpected":
        values["blocks.1.extra"] = torch.zeros(2)
    elif change == "shape":
        values["blocks.1.qkv"] = values["blocks.1.qkv"][:24]
    return values


def loads_known_values(layout: Layout, values: dict[str, torch.Tensor]) -> list[str]:
    rank = Rank(layout, seed=1)
    load_globals_into(rank.tensors, values, rank.group)
    return [entry.name for entry in rank.tensors if not torch.equal(entry.tensor, expected(entry))]


def refuses_values(layout: Layout, values: dict[str, torch.Tensor]) -> str:
    rank = Rank(layout, seed=1)
    before = rank.snapshot()
    with pytest.raises(CheckpointError) as raised:
        load_globals_into(rank.tensors, values, rank.group)
    assert all(torch.equal(value, before[name]) for name, value in rank.snapshot().items())
    return str(raised.value)


def test_every_rank_takes_its_part(ranks):
    assert ranks(4, loads_known_values, Layout(tensor=2, pipeline=2), known_values()) == [[]] * 4
    assert loads_known_values(Layout(), known_values()) == []


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape"])
def test_values_of_another_model_are_refused_on_every_rank(ranks, change):
    first, second = ranks(2, refuses_values, Layout(pipeline=2), known_values(change))
    assert first == second
    assert {
        "missing": "blocks.1.w: missing",
        "unexpected": "blocks.1.extra: given, but this model has no such tensor",
        "shape": "blocks.1.qkv: has shape [24, 16, 1], this model needs [48, 16, 1]",
    }[change] in first
