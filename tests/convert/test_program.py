"""The converter as a program: what it prints, what it refuses, and its exit status."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from megasnn.checkpoint.folder import list_checkpoints, resolve
from megasnn.checkpoint.format import read_metadata
from megasnn.checkpoint.save import save_global_tensors
from megasnn.commands.convert_checkpoint import main
from megasnn.convert.report import largest_difference
from tests.convert.saved import MODELS, save_whole
from tests.convert.test_round_trip import spikformer
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
    assert {read_metadata(resolve(tmp_path / each, None)[0]).model for each in ("new", "start")} == {name}


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
    (["export", "--load", "RUN", "--output", "NEW", "--ema"], "--ema-decay"),
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
