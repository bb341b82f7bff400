"""Weights of other programs go through a checkpoint on four ranks and come back; strangers are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from spikingjelly.activation_based import neuron
from spikingjelly.activation_based.examples.memopt.models import CIFAR10DVSVGG
from spikingjelly.activation_based.model.spikformer import Spikformer
from torch import Tensor, nn

from megasnn.checkpoint.format import Progress
from megasnn.checkpoint.load import load_global_tensors, load_globals_into
from megasnn.checkpoint.optimizer_state import LocalState
from megasnn.checkpoint.save import save_checkpoint
from megasnn.commands.convert_checkpoint import main
from megasnn.files import CheckpointError
from megasnn.models.spikformer.model import Spikformer as Ours
from megasnn.models.spikformer.weight_names import SPIKINGJELLY
from megasnn.models.vgg_dvs.model import VggDvs
from megasnn.models.weight_names import values_of
from megasnn.parallel_state import destroy_model_parallel, initialize_model_parallel
from tests.convert.saved import build, identity, model_like
from tests.parity.spikingjelly_reference import from_spikingjelly

CONFIGS = {
    "spikformer": Ours(patch_size=4, embed_dim=16, depth=2, num_heads=2, image_size=32, time_steps=2, num_classes=5),
    "vgg": VggDvs(),
}
NEURONS = {"lif": None, "plif": partial(neuron.ParametricLIFNode, detach_reset=True)}


def spikformer(kind: str = "lif", depth: int = 2) -> Spikformer:
    sizes = dict(img_size_h=32, img_size_w=32, patch_size=4, num_classes=5, embed_dims=16, num_heads=2, depths=depth)
    return Spikformer(T=2, spiking_neuron=NEURONS[kind], **sizes)


def drawn(model: nn.Module) -> dict[str, Tensor]:
    """Weights and statistics of which no two are the same."""
    torch.manual_seed(0)
    return {name: torch.rand_like(x) if x.is_floating_point() else x + 3 for name, x in model.state_dict().items()}


def through_ranks(weights: Path, folder: Path, name: str) -> None:
    """On each of four ranks, tensor 2 x pipeline 2: takes its part of the imported weights and saves it."""
    state = initialize_model_parallel(tp=2, pp=2)
    try:
        model = model_like(CONFIGS[name], neuron="lif")
        half = len(model.layers) // 2
        layers = range(half) if state.pp.rank == 0 else range(half, len(model.layers))
        rank = build(model, 1, state.tp.rank, 2, layers)
        load_globals_into(rank.tensors, load_global_tensors(weights), state.world.handle)
        progress = Progress(1, config=identity(CONFIGS[name], neuron="lif"))
        save_checkpoint(folder, progress, LocalState(rank.tensors), state.world.handle)
    finally:
        destroy_model_parallel()


@pytest.mark.parametrize("name, make", [("spikformer", spikformer), ("vgg", CIFAR10DVSVGG)], ids=["spikformer", "vgg"])
def test_spikingjellys_models(ranks, tmp_path: Path, name: str, make: Callable[[], nn.Module]) -> None:
    original = drawn(make())
    torch.save(original, tmp_path / "in.pt")
    assert main(["import", "--input", str(tmp_path / "in.pt"), "--save", str(tmp_path / "start")]) == 0
    ranks(4, through_ranks, tmp_path / "start", tmp_path / "run", name)
    assert len(list((tmp_path / "run" / "iter_0000001").glob("*.safetensors"))) == 4
    for output in ("out.pt", "out.safetensors"):
        flags = ["--load", str(tmp_path / "run"), "--output", str(tmp_path / output), "--names", "spikingjelly"]
        assert main(["export", *flags]) == 0
        assert main(["diff", str(tmp_path / "in.pt"), str(tmp_path / output)]) == 0
    back = torch.load(tmp_path / "out.pt", weights_only=True)
    make().load_state_dict(back, strict=True)
    assert all(torch.equal(value, back[key]) for key, value in original.items())


@pytest.mark.parametrize("kind", NEURONS)
def test_our_model_takes_and_gives_spikingjellys_weights(kind) -> None:
    """Names and shapes of the table are those of the model itself, which has no table."""
    rank = build(model_like(CONFIGS["spikformer"], neuron=kind))
    state_dict = drawn(spikformer(kind))
    load_globals_into(rank.tensors, from_spikingjelly(state_dict))
    mine = {entry.name: entry.tensor for entry in rank.tensors}
    back = values_of(SPIKINGJELLY.from_ours(mine), mine)
    assert all(torch.equal(value, back[name]) for name, value in state_dict.items())


def test_weights_that_do_not_fit_are_refused_by_name() -> None:
    plif = spikformer("plif").state_dict()
    rank = build(model_like(CONFIGS["spikformer"], neuron="lif"))
    with pytest.raises(CheckpointError, match=r"blocks\.0\.attention\.neuron\.w"):  # no place for time constants
        load_globals_into(rank.tensors, from_spikingjelly(plif))
    with pytest.raises(CheckpointError, match=r"blocks\.1\.mlp\.fc3\.weight: unexpected"):
        from_spikingjelly({**plif, "blocks.1.mlp.fc3.weight": torch.ones(1)})
    rank = build(model_like(CONFIGS["spikformer"], neuron="plif"))
    before = {entry.name: entry.tensor.clone() for entry in rank.tensors}
    with pytest.raises(CheckpointError, match=r"head\.weight: .*\[4, 16\]"):
        load_globals_into(rank.tensors, from_spikingjelly({**plif, "head.weight": plif["head.weight"][:4]}))
    assert all(torch.equal(entry.tensor, before[entry.name]) for entry in rank.tensors)
    del plif["blocks.1.attn.attn_lif.w"]
    with pytest.raises(CheckpointError, match=r"blocks\.1\.attention\.neuron\.w"):
        load_globals_into(rank.tensors, from_spikingjelly(plif))
