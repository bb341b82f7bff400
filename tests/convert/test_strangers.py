"""Checkpoints and weights of strangers: nothing in them runs, nothing outside their folder is read or changed."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megasnn.checkpoint import (
    CheckpointError,
    DamagedError,
    find_checkpoint,
    load_global_tensors,
    read_metadata,
    read_state_dict,
    save_global_tensors,
    verify_checkpoint,
)
from megasnn.checkpoint.compare import config_differences
from megasnn.checkpoint.folder import LATEST, Retention, superfluous
from megasnn.checkpoint.job import LOCK, JobFolder
from megasnn.checkpoint.pieces import PIECES
from megasnn.commands.convert_checkpoint import main
from megasnn.convert.opening import open_source
from megasnn.convert.rank_files import reshard
from megasnn.convert.target import Target
from megasnn.files.described import in_message
from megasnn.models.names import Made
from tests.checkpoint.crafted import as_format_2, claiming_memory, put, put_format_2, seal, values_of
from tests.convert.saved import MODELS, save_whole

TENSORS = {
    "w": torch.arange(12.0).view(3, 4),
    "large": torch.arange(600_000.0).view(600, 1000),
    "scalar": torch.tensor(3),
    "nothing": torch.zeros(0, 3, dtype=torch.bfloat16),
}


class RunsCode:
    """What a pickle of it does when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self.marker}",))


@pytest.fixture
def path(tmp_path) -> Path:
    (tmp_path / "decoy").write_bytes(b"secret" * 1000)
    return save_global_tensors(tmp_path / "run", TENSORS, iteration=100, extra={"seed": 3})


def same(folder: Path) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = load_global_tensors(folder)
    return loaded.keys() == TENSORS.keys() and all(torch.equal(loaded[name], TENSORS[name]) for name in TENSORS)


def statuses(path: Path) -> list[int]:
    """Of inspect, verify and export."""
    output = path.parent.parent / "out.safetensors"
    export = ["export", "--load", str(path), "--output", str(output), "--format", "safetensors", "--names", "megasnn"]
    return [main(["inspect", str(path)]), main(["verify", str(path)]), main(export)]


def test_a_checkpoint_of_format_2_is_read(path, capsys):
    as_format_2(path)
    assert read_metadata(path).format == 2 and not (path / PIECES).exists()
    assert same(path.parent) and statuses(path)[:2] == [0, 0]
    assert {problem for _, problem in verify_checkpoint(path)} == {None}


def test_a_whole_run_of_format_2_is_laid_out_anew(tmp_path, capsys):
    path = save_whole(tmp_path / "old", MODELS["spikformer"])
    before = load_global_tensors(tmp_path / "old", with_optimizer=True)
    as_format_2(path)
    new = ["reshard", "--load", str(path), "--save", str(tmp_path / "new"), "--target-tensor-parallel-size", "2"]
    assert main(new) == 0 and read_metadata(find_checkpoint(tmp_path / "new", None)).format == 3
    after = load_global_tensors(tmp_path / "new", with_optimizer=True)
    assert all(torch.equal(before[name], after[name]) for name in before) and before.keys() == after.keys()


def test_what_describes_a_checkpoint_runs_nothing(path, tmp_path, capsys):
    marker = tmp_path / "marker"
    evil = pickle.dumps(RunsCode(marker))
    put(path, ".metadata", evil)
    assert same(path.parent)  # nobody here reads it
    put_format_2(path, evil)
    assert statuses(path) == [2, 2, 2]
    assert "system does not belong there" in capsys.readouterr().err
    with pytest.raises(DamagedError, match="system does not belong there"):
        load_global_tensors(path.parent)
    assert not marker.exists()


def test_weights_run_nothing(tmp_path, capsys):
    marker, file = tmp_path / "marker", tmp_path / "w.pt"
    for legacy in (False, True):
        torch.save({"w": RunsCode(marker)}, file, _use_new_zipfile_serialization=not legacy)
        assert main(["inspect", str(file)]) == 2
        with pytest.raises(CheckpointError, match=r"w\.pt"):
            read_state_dict(file)
    assert not marker.exists()


@pytest.mark.parametrize("legacy", [False, True])
def test_weights_take_no_memory_by_what_they_claim(tmp_path, legacy):
    (tmp_path / "w.pt").write_bytes(claiming_memory(legacy))
    with pytest.raises(CheckpointError, match=r"w\.pt: builtins\.bytearray does not belong there"):
        read_state_dict(tmp_path / "w.pt")


def test_weights_take_no_memory_by_sharing_values(tmp_path):
    shared = torch.zeros(100_000)
    torch.save({"a": shared, "tied": shared}, tmp_path / "tied.pt")
    assert read_state_dict(tmp_path / "tied.pt").keys() == {"a", "tied"}
    torch.save({str(name): shared for name in range(40)}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"w\.pt: its 40 tensors take 16000000 bytes, and the file has \d+:"):
        read_state_dict(tmp_path / "w.pt")


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("embed_dim", 2**17, "the model needs"),
        ("time_steps", 100_000, "samples of T x C x H x W = 100000 x"),
        ("image_size", 4096 * 16, "samples of T x C x H x W = "),
        ("mlp_ratio", 1e308, "too many hidden channels"),
    ],
)
def test_no_model_is_tried_out_by_the_sizes_that_a_checkpoint_claims(tmp_path, capsys, field, value, text):
    path = save_whole(tmp_path / "old", MODELS["spikformer"])
    values = values_of(path)
    values["config"]["model"][field] = value
    values["layout"] = None
    seal(path, json.dumps(values, indent=2).encode())
    new = ["reshard", "--load", str(path), "--save", str(tmp_path / "new"), "--target-pipeline-parallel-size", "2"]
    assert main(new) == 2
    assert text in capsys.readouterr().err and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("part", "field", "value", "text"),
    [
        ("model", "depth", "2", "model.depth (--depth) cannot be '2'"),
        ("model", "depth", 1, "blocks.1."),
        ("model", "depth", 2**62, "--depth"),
        ("model", "embed_dim", 2**62, "--embed-dim"),
        ("model", "num_heads", [4], "model.num_heads (--num-heads) cannot be [4]"),
        ("model", "unknown", 1, "unknown name model.unknown"),
        ("model", "time_steps", 2**40, "samples of T x C x H x W = 1099511627776 x"),
        ("neuron", "tau", "\x1b[2J", "neuron.tau (--tau) cannot be"),
        ("neuron", "tau", 0.5, "--tau"),
        ("neuron", "surrogate", "os.system", "neuron.surrogate (--surrogate) cannot be 'os.system'"),
    ],
)
def test_verify_checks_the_configuration_field_by_field(tmp_path, capsys, part, field, value, text):
    path = save_whole(tmp_path / "old", MODELS["spikformer"])
    assert main(["verify", str(path)]) == 0
    values = values_of(path)
    values["config"][part][field] = value
    seal(path, json.dumps(values, indent=2).encode())
    capsys.readouterr()
    assert main(["verify", str(path)]) == 1
    told = capsys.readouterr().out
    assert text in told and "\x1b" not in told and "1 problem(s)" in told


@pytest.mark.parametrize("config", [{"model": 3, "neuron": []}, {"model": {}}, {}])
def test_verify_checks_the_parts_of_the_configuration(tmp_path, capsys, config):
    path = save_whole(tmp_path / "old", MODELS["spikformer"])
    values = values_of(path)
    values["config"] = config
    seal(path, json.dumps(values, indent=2).encode())
    assert main(["verify", str(path)]) == 1
    assert "is not of the model spikformer as it is here" in capsys.readouterr().out


@pytest.mark.parametrize("shape", [[2**62, 2**62, 0], [0, 2**40, 2**40]])
def test_a_shape_that_cannot_be_is_refused_though_it_is_empty(path, capsys, shape):
    values = values_of(path)
    values["tensors"]["nothing"]["shape"] = shape
    seal(path, json.dumps(values, indent=2).encode())
    assert statuses(path) == [2, 2, 2]
    assert "tensors.nothing.shape: " in capsys.readouterr().err


def test_a_checkpoint_of_another_iteration_than_its_folder_is_refused(path, capsys):
    values = values_of(path)
    values["iteration"] = 7
    seal(path, json.dumps(values, indent=2).encode())
    assert statuses(path) == [2, 2, 2]
    assert f"iteration: the folder is called {path.name}, found 7" in capsys.readouterr().err


def test_nothing_is_compared_with_nothing(tmp_path, capsys):
    path = save_whole(tmp_path / "old", MODELS["spikformer"])
    put(path, PIECES, b'{"tensors": []}')
    values = values_of(path)
    values["tensors"] = {}
    seal(path, json.dumps(values, indent=2).encode())
    assert main(["compare", str(path), str(path)]) == 2
    assert "hold no tensor to compare" in capsys.readouterr().err


def test_what_a_message_shows_of_a_stranger_is_short_and_steers_no_terminal():
    (line,) = config_differences({"a\x1b[2J": "\x1b]0;owned\x07" + "A" * 100_000}, {})
    assert line.isprintable() and len(line) < 300
    assert in_message("x\r[rank 0] all is well").isprintable()


def elsewhere(path: Path, name: str) -> None:
    """Lets the pieces lie in another file, which the description lists as well."""
    pieces = json.loads((path / PIECES).read_text())
    for tensor in pieces["tensors"]:
        for piece in tensor["pieces"]:
            piece["file"] = name
    put(path, PIECES, json.dumps(pieces).encode())
    values = values_of(path)
    values["files"][name] = values["files"].pop("__0_0.distcp")
    seal(path, json.dumps(values, indent=2).encode())


def elsewhere_in_format_2(path: Path, name: str) -> None:
    def change(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = name

    as_format_2(path, change)


@pytest.mark.parametrize("change", [elsewhere, elsewhere_in_format_2])
@pytest.mark.parametrize("name", ["../../decoy", "/dev/zero", "link", "pipe", "folder", "..", "a\0b", "decoy\x1b[2J"])
def test_pieces_lie_in_files_of_the_folder(path, tmp_path, capsys, change: Callable[[Path, str], None], name):
    os.symlink(tmp_path / "decoy", path / "link")
    os.mkfifo(path / "pipe")
    (path / "folder").mkdir()
    change(path, name)
    assert statuses(path) == [2, 2, 2]
    with pytest.raises(DamagedError, match=str(path)):
        load_global_tensors(path.parent)
    assert "\x1b" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["metadata.json", PIECES, ".metadata", "__0_0.distcp", f"../{LATEST}"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_no_file_may_be_a_link_or_a_pipe(path, tmp_path, name, kind):
    content = (path / name).read_bytes()
    (path / name).unlink()
    (tmp_path / "outside").write_bytes(content)
    (path / name).symlink_to(tmp_path / "outside") if kind == "link" else os.mkfifo(path / name)
    if LATEST in name:
        with pytest.warns(UserWarning, match=f"cannot read .*{LATEST}"):
            assert load_global_tensors(path.parent).keys() == TENSORS.keys()
    else:
        with pytest.raises(DamagedError, match=f"cannot read .*{name}"):
            load_global_tensors(path.parent)


def test_a_link_is_no_checkpoint_of_the_folder(path, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "iter_0000100").symlink_to(path)
    with pytest.raises(CheckpointError, match="iter_0000100 is a link and is passed over"):
        load_global_tensors(tmp_path / "other")


@pytest.mark.parametrize("kind", ["link", "pipe", "device"])
def test_the_lock_and_the_latest_file_are_not_written_elsewhere(path, tmp_path, kind):
    folder, decoy = path.parent, tmp_path / "decoy"
    before = decoy.read_bytes()
    (folder / f".{LATEST}.partial").symlink_to(decoy)
    (folder / "iter_0000200.tmp").symlink_to(tmp_path)
    save_global_tensors(folder, TENSORS, iteration=200)
    assert same(folder) and decoy.read_bytes() == before
    target = {"link": decoy, "device": Path("/dev/null")}
    os.mkfifo(folder / LOCK) if kind == "pipe" else (folder / LOCK).symlink_to(target[kind])
    with pytest.raises(CheckpointError, match=r"cannot write into the folder .*\.lock"):
        JobFolder(folder)
    assert decoy.read_bytes() == before


def test_the_rank_files_are_not_written_elsewhere(tmp_path):
    save_whole(tmp_path / "whole", MODELS["vgg"])
    for name in ("outside", "new"):
        (tmp_path / name).mkdir()
    (tmp_path / "new" / "iter_0000100.tmp").symlink_to(tmp_path / "outside")
    path, _ = reshard(open_source(tmp_path / "whole"), tmp_path / "new", Target(1, 1))
    assert path.name == "iter_0000100" and not path.is_symlink()
    assert not list((tmp_path / "outside").iterdir())


def test_a_serial_of_absurd_size_does_not_spoil_what_is_saved_after_it(path):
    values = values_of(path)
    values["serial"] = 10**15
    seal(path, json.dumps(values, indent=2).encode())
    for iteration in (200, 300):
        save_global_tensors(path.parent, TENSORS, iteration=iteration)
    (path.parent / LATEST).write_text("damaged")
    with pytest.warns(UserWarning, match="should hold an iteration"):
        assert find_checkpoint(path.parent, None).name == "iter_0000300"
    assert [old.name for old in superfluous(path.parent, Retention(last=1))] == ["iter_0000100", "iter_0000200"]
    for _ in range(2):  # the first leaves no lock behind
        with pytest.raises(CheckpointError, match="its serial was altered; move it to another folder"):
            JobFolder(path.parent)


def test_every_field_of_every_description(tmp_path):
    """One after the other takes each of a table of values, in a process of its own; see tests/convert/mutated.py."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.convert.mutated", str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert int(done.stdout.split()[0]) > 2500


@pytest.mark.parametrize(
    "names", [["block.99999999999999.attn.qkv.weight"], [f"block.{'9' * 5000}.x"], ["features.99999999999.x"]]
)
def test_numbers_in_names_are_not_counted_up_to(tmp_path, capsys, names):
    torch.save({name: torch.zeros(2) for name in [*names, "head.weight"]}, tmp_path / "w.pt")
    assert main(["import", "--input", str(tmp_path / "w.pt"), "--save", str(tmp_path / "new")]) == 2
    assert not (tmp_path / "new").exists()


def test_weights_that_do_not_fit_together_are_one_error():
    made = Made(("q", "k"), lambda q, k: torch.cat([q, k]))
    with pytest.raises(CheckpointError, match=r"q \[2, 3\], k \[2, 4\]"):
        made.of([torch.zeros(2, 3), torch.zeros(2, 4)])
