"""The converter as a program: weights of others come and go, what it prints, what it refuses, and its exit status."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from spikingjelly.activation_based import neuron
from spikingjelly.activation_based.examples.memopt.models import CIFAR10DVSVGG
from spikingjelly.activation_based.model.spikformer import Spikformer
from torch import Tensor, nn

from megasnn.checkpoint.exchange import largest_difference
from megasnn.checkpoint.folder import checkpoints_to_try, list_checkpoints
from megasnn.checkpoint.format import Progress, read_metadata
from megasnn.checkpoint.load import load_global_tensors, load_globals_into
from megasnn.checkpoint.optimizer_state import LocalState
from megasnn.checkpoint.save import save_checkpoint, save_global_tensors
from megasnn.commands.convert_checkpoint import main
from megasnn.common.files import CheckpointError
from megasnn.models.spikformer.model import Spikformer as Ours
from megasnn.models.spikformer.weight_names import SPIKINGJELLY
from megasnn.models.vgg_dvs.model import VggDvs
from megasnn.models.weight_names import translated_tensors
from megasnn.parallel_state import destroy_model_parallel, initialize_model_parallel
from tests.checkpoint.saved import MODELS, build, identity, model_like, save_whole
from tests.parity.spikingjelly_reference import from_spikingjelly


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    save_whole(folder, MODELS["spikformer"])
    return folder


def answers(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def weights(folder: Path, change: float = 0.0, **others: torch.Tensor) -> Path:
    """A file of SpikingJelly's Spikformer, one element of whose head is changed."""
    torch.manual_seed(0)
    values = spikformer().state_dict() | others
    values["head.weight"] = values["head.weight"].clone()
    values["head.weight"][1, 2] += change
    folder.mkdir(exist_ok=True)
    path = folder / f"{change}{len(others)}.pt"
    torch.save(values, path)
    return path


@pytest.mark.parametrize("name", MODELS)
def test_what_a_checkpoint_is_of_is_said_and_kept(tmp_path, capsys, name):
    path = save_whole(tmp_path / "run", MODELS[name])
    status, text = answers(capsys, "inspect", path)
    assert status == 0 and name in text and "iteration 100, 6400 samples" in text and "AdamW" in text
    status, text = answers(capsys, "verify", path)
    assert status == 0 and name in text
    assert answers(capsys, "reshard", "--load", path, "--save", tmp_path / "new")[0] == 0
    assert answers(capsys, "export", "--load", tmp_path / "new", "--output", tmp_path / "w.pt")[0] == 0
    assert answers(capsys, "import", "--input", tmp_path / "w.pt", "--save", tmp_path / "start")[0] == 0
    assert {read_metadata(checkpoints_to_try(tmp_path / each, None)[0]).model for each in ("new", "start")} == {name}


def test_diff_across_formats(run, tmp_path, capsys):
    original, changed = weights(tmp_path), weights(tmp_path, 0.5)
    save_global_tensors(tmp_path / "ours", from_spikingjelly(torch.load(original, weights_only=True)))
    assert answers(capsys, "diff", tmp_path / "ours", original)[0] == 0
    status, text = answers(capsys, "diff", tmp_path / "ours", changed)
    (line,) = (line for line in text.splitlines() if line.startswith("head.weight"))
    assert status == 1 and "differs  0.5" in line and "1 of 80 tensors" in text
    assert answers(capsys, "diff", tmp_path / "ours", changed, "--tolerance", "2")[0] == 0
    nan, inf = float("nan"), float("inf")
    for one, other, absolute in (([1, 2], [1, 2.5], 0.5), ([nan, 2], [nan, 2], 0), ([nan, 2], [1, 2], inf),
                                 ([inf, 2], [inf, 2], 0), ([inf, 2], [-inf, 2], inf), ([], [], 0)):  # fmt: skip
        assert largest_difference(torch.tensor(one), torch.tensor(other, dtype=torch.float64)) == absolute
    assert answers(capsys, "export", "--load", run, "--output", tmp_path / "weights.pt")[0] == 0
    status, text = answers(capsys, "diff", run, tmp_path / "weights.pt")
    assert status == 1 and "optimizer.exp_avg.head.bias" in text
    assert answers(capsys, "diff", run, tmp_path / "weights.pt", "--model-only")[0] == 0


@pytest.mark.parametrize(("command", "told"), [
    (["inspect", "ABSENT"], "ABSENT"),
    (["verify", "FILE"], "no checkpoint"),
    (["export", "--load", "ODD", "--output", "NEW"], "weight"),
    (["import", "--input", "EXTRA", "--save", "NEW"], "extra"),
    (["export", "--load", "FILE", "--output", "NEW", "--names", "published"], "--names spikingjelly"),
    (["reshard", "--load", "FILE", "--save", "NEW"], "--finetune"),
    (["export", "--load", "RUN", "--output", "FILE"], "--output"),
    (["import", "--input", "FILE", "--save", "LATER"], "--save"),
    (["reshard", "--load", "RUN", "--save", "RUN"], "--save"),
])  # fmt: skip
def test_what_cannot_be_done_is_said_and_leaves_nothing(run, tmp_path, capsys, command, told):
    paths = {name: tmp_path / name for name in ("ABSENT", "NEW", "ODD", "LATER")} | {"RUN": run}
    paths["FILE"], paths["EXTRA"] = weights(tmp_path), weights(tmp_path, extra=torch.zeros(1))
    save_global_tensors(paths["ODD"], {"weight": torch.zeros(2)})
    save_global_tensors(paths["LATER"], {"weight": torch.zeros(2)}, iteration=101)
    before = paths["FILE"].read_bytes()
    status, text = answers(capsys, *(paths.get(word, word) for word in command))
    assert status == 2 and told in text
    assert not paths["NEW"].exists() and not list(tmp_path.glob("*.tmp"))
    assert paths["FILE"].read_bytes() == before and list_checkpoints(paths["LATER"]) == [101]


def test_damage_is_found_and_nothing_is_made_of_it(run, tmp_path, capsys):
    folder = shutil.copytree(run, tmp_path / "run")
    for command in ("inspect", "verify"):
        assert answers(capsys, command, folder)[0] == 0
    file = folder / "iter_0000100" / "rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    path = file.parent
    status, text = answers(capsys, "verify", path)
    assert status == 1 and str(file) in text
    for command in (["reshard", "--load", path, "--save"], ["export", "--load", path, "--output"]):
        status, text = answers(capsys, *command, tmp_path / "new")
        assert status == 2 and str(file) in text and not (tmp_path / "new").exists()


@pytest.mark.parametrize(("part", "field", "value"), [("model", "depth", 1), ("neuron", "tau", 0.5)])
def test_a_configuration_of_another_model_is_found(run, tmp_path, capsys, part, field, value):
    metadata = read_metadata(run / "iter_0000100")
    config = json.loads(json.dumps(metadata.config))
    config[part][field] = value
    tensors = {name: torch.zeros(told.shape) for name, told in metadata.tensors.items()}
    path = save_global_tensors(tmp_path / "odd", tensors, model="spikformer", config=config)
    assert answers(capsys, "reshard", "--load", path, "--save", tmp_path / "new")[0] == 2


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
    back = translated_tensors(SPIKINGJELLY.from_ours(mine), mine)
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
