"""The converter as a program: what it prints, what it refuses, and its exit status."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch

from megasnn.checkpoint import find_checkpoint, list_checkpoints, save_global_tensors, verify_checkpoint
from megasnn.checkpoint.folder import LATEST, remove
from megasnn.checkpoint.job import FolderLock
from megasnn.commands.convert_checkpoint import main
from megasnn.convert.differences import largest_difference
from megasnn.convert.opening import open_source
from megasnn.models.spikformer.spikingjelly_names import from_spikingjelly
from tests.checkpoint.test_interchange import spikformer
from tests.convert.saved import MODELS, save_whole


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
    values = spikformer().state_dict() | others
    values["head.weight"] = values["head.weight"].clone()
    values["head.weight"][1, 2] += change
    folder.mkdir(exist_ok=True)
    path = folder / f"{change}{len(others)}.pt"
    torch.save(values, path)
    return path


def test_inspect_shows_the_tree_and_the_totals(run, capsys):
    status, text = answers(capsys, "inspect", run)
    assert status == 0
    assert "iteration 100, 6400 samples consumed" in text and "embed_dim 32" in text
    assert re.search(
        r"\n {6}qkv\n {8}conv.weight +float32 +12 KiB +\[96, 32, 1\] +3 pieces in 1 files\n {8}neuron.w ", text
    )
    parameters = 5 * 4 + 2 * (4 * 4 + 1) + 2  # units have weight, two of the norm and a time constant
    assert f"optimizer state of AdamW: {3 * parameters} tensors" in text
    status, text = answers(capsys, "inspect", run / "iter_0000100", "--json-output")
    values = json.loads(text)
    assert (status, values["kind"], values["iteration"]) == (0, "megasnn checkpoint", 100)
    told = values["tensors"]["blocks.0.attention.qkv.conv.weight"]
    assert (told["shape"], told["dtype"], told["bytes"]) == ([96, 32, 1], "float32", 4 * 96 * 32)
    assert told["boxes"] == [
        {"file": "__0_0.distcp", "offset": [part * 32, 0, 0], "sizes": [32, 32, 1]} for part in range(3)
    ]
    assert set(values["files"]) == {"__0_0.distcp", ".metadata", "metadata.json", "pieces.json"}


def test_compare_across_formats(tmp_path, capsys):
    original, changed = weights(tmp_path), weights(tmp_path, 0.5)
    save_global_tensors(tmp_path / "ours", from_spikingjelly(torch.load(original, weights_only=True)))
    status, text = answers(capsys, "compare", tmp_path / "ours", original)
    assert status == 0 and "0 of 80 tensors differ by more than 0" in text
    status, text = answers(capsys, "compare", tmp_path / "ours", changed)
    (line,) = (line for line in text.splitlines() if line.startswith("head.weight"))
    assert status == 1 and "differs  0.5 " in line and "1 of 80 tensors differ" in text
    status, text = answers(capsys, "compare", tmp_path / "ours", changed, "--tolerance", "1")
    assert status == 0 and "close" in text


def test_compare_names_what_one_side_lacks(tmp_path, capsys):
    both = {"patch_embed.stages.3.conv.weight": torch.zeros(2), "b": torch.zeros(3)}
    save_global_tensors(tmp_path / "one", both | {"a": torch.zeros(2)})
    save_global_tensors(tmp_path / "other", both | {"b": torch.zeros(4)})
    status, text = answers(capsys, "compare", tmp_path / "one", tmp_path / "other", "--tolerance", "1")
    assert status == 1 and "2 of 3 tensors differ" in text
    assert f"missing in {tmp_path / 'other'}" in text and "shapes [3] and [4]" in text


def test_optimizer_state_is_compared_or_left_aside(run, tmp_path, capsys):
    assert answers(capsys, "export", "--load", run, "--output", tmp_path / "weights.pt")[0] == 0
    status, text = answers(capsys, "compare", run, tmp_path / "weights.pt")
    assert status == 1 and "optimizer.exp_avg.head.bias" in text
    assert answers(capsys, "compare", run, tmp_path / "weights.pt", "--model-only")[0] == 0


@pytest.mark.parametrize(
    "one, other, absolute",
    [
        ([1.0, 2.0], [1.0, 2.5], 0.5),
        ([float("nan"), 2.0], [float("nan"), 2.0], 0.0),
        ([float("nan"), 2.0], [1.0, 2.0], float("inf")),
        ([float("inf"), 2.0], [float("inf"), 2.0], 0.0),
        ([float("inf"), 2.0], [float("-inf"), 2.0], float("inf")),
        ([], [], 0.0),
    ],
)
def test_differences_with_what_is_no_number(one, other, absolute):
    assert largest_difference(torch.tensor(one), torch.tensor(other, dtype=torch.float64))[0] == absolute


def test_a_difference_beyond_the_first_million_elements():
    one = torch.zeros(3, 1 << 20)
    other = one.clone()
    other[2, 5] = -2.0
    assert largest_difference(one, other) == (2.0, 2.0)


def test_what_is_no_checkpoint(tmp_path, capsys):
    for path, reason in (
        (tmp_path / "nowhere", "is not there: name a file"),
        (tmp_path, "holds no checkpoint"),
        (weights(tmp_path / "files", extra=torch.zeros(1)), "extra: unexpected"),
    ):
        status, text = answers(capsys, "import", "--input", path, "--save", tmp_path / "new")
        assert status == 2 and reason in text
    assert not (tmp_path / "new").exists()


def test_nothing_is_overwritten(run, tmp_path, capsys):
    file = weights(tmp_path)
    for arguments in (
        ["export", "--load", file, "--output", file],
        ["export", "--load", file, "--output", file, "--format", "safetensors"],
        ["import", "--input", file, "--save", tmp_path / "new"],
        ["import", "--input", file, "--save", tmp_path / "new"],
    ):
        status, text = answers(capsys, *arguments)
    assert status == 2 and "exists already" in text
    before = file.read_bytes()
    assert answers(capsys, "export", "--load", run, "--output", file)[0] == 2
    assert file.read_bytes() == before


def test_a_folder_that_a_run_saves_in_is_left_alone(run, tmp_path, capsys):
    lock = FolderLock(tmp_path / "busy")
    arguments = ["reshard", "--load", run, "--save", tmp_path / "busy"]
    status, text = answers(capsys, *arguments)
    assert status == 2 and f"process {os.getpid()}" in text and "saves its checkpoints in" in text
    lock.release()
    assert answers(capsys, *arguments)[0] == 0


def test_a_run_does_not_go_back_to_what_is_written_into_its_folder(run, tmp_path, capsys):
    save_global_tensors(tmp_path, {"w": torch.ones(3)}, iteration=101)
    status, text = answers(capsys, "reshard", "--load", run, "--save", tmp_path)
    assert status == 2 and "has come to iteration 101" in text
    assert list_checkpoints(tmp_path) == [101] and find_checkpoint(tmp_path, None).name == "iter_0000101"


def test_a_latest_that_points_nowhere_is_told(run, tmp_path, capsys):
    folder = shutil.copytree(run, tmp_path / "run")
    (folder / LATEST).write_text("99")
    with pytest.warns(UserWarning, match="names iteration 99, which is not there"):
        assert answers(capsys, "inspect", folder)[0] == 0
    with pytest.warns(UserWarning, match="names iteration 99, which is not there"):
        assert answers(capsys, "verify", folder)[0] == 0


def test_nobody_removes_what_is_being_read(run, tmp_path):
    path = shutil.copytree(run, tmp_path / "run") / "iter_0000100"
    source, checks = open_source(path), verify_checkpoint(path)
    assert not remove(path)
    del source
    next(checks)
    assert not remove(path)
    checks.close()
    assert remove(path)


def test_which_published_model_must_be_known(tmp_path, capsys):
    arguments = ["export", "--load", weights(tmp_path), "--output", tmp_path / "out.pt", "--format", "published"]
    status, text = answers(capsys, *arguments)
    assert status == 2 and "published-cifar10 or published-imagenet" in text
    assert answers(capsys, *arguments, "--names", "published-imagenet")[0] == 0
