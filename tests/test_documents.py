"""Links, programs and commands of the pages, the examples and the notebook, as a reader would follow and run them."""

from __future__ import annotations

import contextlib
import csv
import inspect
import io
import json
import os
import re
import runpy
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.run

import megasnn
from megasnn.checkpoint.folder import list_checkpoints
from megasnn.checkpoint.reshard import Target, reshard
from megasnn.checkpoint.source import open_source
from megasnn.config import validate
from megasnn.models.registry import MODELS
from megasnn.pretraining import configuration
from tests.forking import run_program
from tests.training.runs import train

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
LINK = re.compile(r"\]\((?!https?:)([^()\s#]*)(?:#([^()\s]*))?\)")
SHORT = "--train-iters 2 --micro-batch-size 4 --global-batch-size 8 --num-workers 0 --log-interval 1".split()
SMALL = [*SHORT, *"--image-size 8 --in-channels 1 --num-classes 10".split()]


def block(page: str, heading: str, language: str) -> str:
    """First block of code in a language below a heading."""
    text = (ROOT / page).read_text().split(f"# {heading}\n", 1)[1]
    return text.split(f"```{language}\n")[1].split("```")[0]


def commands(page: str, heading: str, lengths: dict[str, str] | None = None) -> list[list[str]]:
    """Words of the command lines below a heading; with `lengths`, of shorter runs than those of the page."""
    text = block(page, heading, "bash").replace("\\\n", " ")
    for long, short in (lengths or {}).items():
        assert f"--train-iters {long} " in text
        text = text.replace(f"--train-iters {long} ", f"--train-iters {short} ")
    return [shlex.split(line) for line in text.splitlines() if line]


def program(page: str, heading: str, folder: Path) -> Path:
    """The Python block below a heading, as a file."""
    path = folder / "program.py"
    path.write_text(block(page, heading, "python"))
    return path


def run(folder: Path, *words: object) -> str:
    """Output of `python WORDS` in a folder."""
    ended = run_program(folder, *words)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def continued(path: str, *argv: str) -> str:
    """Output of a program in its folder, on a rank that has joined the others."""
    rank, printed = str(torch.distributed.get_rank()), io.StringIO()
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(torch.distributed.get_world_size())}
    with mock.patch.dict(os.environ, place), mock.patch.object(sys, "argv", [path, *argv]):
        with contextlib.redirect_stdout(printed), contextlib.chdir(Path(path).parent):
            with pytest.raises(SystemExit) as ended:
                runpy.run_path(path, run_name="__main__")
    assert ended.value.code == 0
    return printed.getvalue()


def follow(ranks: Any, folder: Path, lines: list[list[str]]) -> str:
    """Output of command lines in a folder that has the programs; ranks are not started by torchrun, but its flags are
    read by it."""
    for name in ("tools", "megasnn", "pretrain_spikformer.py"):
        (folder / name).symlink_to(ROOT / name)
    output = ""
    for launcher, *words in lines:
        if launcher == "python":  # without seconds of imports
            output += run(folder, *words)
            continue
        assert launcher == "torchrun"
        asked = torch.distributed.run.parse_args(words)
        path = str(folder / asked.training_script)
        output += ranks(int(asked.nproc_per_node), continued, path, *asked.training_script_args)[0]
    return output


# --- links


def anchors(page: Path) -> set[str]:
    """The headings of a page as links name them: in small letters, with hyphens for spaces, without other signs."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.*)$", text, re.M)}


def dead_links(page: Path) -> list[str]:
    """Links of a page that lead nowhere."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    found = []
    for path, anchor in LINK.findall(prose):
        target = page.parent / path if path else page
        if not target.is_file() or (anchor and anchor not in anchors(target)):
            found.append(f"{path}#{anchor}")
    return found


def test_links_lead_somewhere() -> None:
    assert {page.name: dead for page in PAGES if (dead := dead_links(page))} == {}


# --- commands


def test_programs_in_public_docstrings_are_marked_for_the_site() -> None:
    """Sphinx takes an indented block for a program behind `::` only, and `scripts/docs.sh` fails otherwise."""
    wrong = []
    for name in megasnn.__all__:
        text = inspect.getdoc(getattr(megasnn, name)) or ""
        for before, block in zip(text.split("\n\n"), text.split("\n\n")[1:], strict=False):
            last = before.splitlines()[-1]
            if block.startswith("    ") and not last.startswith(" ") and not last.endswith("::"):
                wrong.append(f"{name}: {last}")
    assert wrong == []


def test_the_quickstart(ranks, tmp_path: Path) -> None:
    follow(ranks, tmp_path, commands("docs/quickstart.md", "Train", {"40": "2", "60": "4"}))
    assert (tmp_path / "spikingjelly.pt").is_file()
    assert {path.name for path in (tmp_path / "runs/first").iterdir()} >= {"log.jsonl", "config.json", "iter_0000004"}


def as_the_page_says(cache: str, folder: Path, flags: list[str]) -> None:
    """A checkpoint of four ranks at iteration 200, of a run that did one iteration."""
    train(cache, *flags, "--mlp-ratio", "4", "--train-iters", "1", "--eval-iters", "0", "--save", str(folder / "one"))
    source = open_source(folder / "one", values=False)
    (folder / "one" / "iter_0000001").rename(folder / "one" / "iter_0000200")
    metadata = replace(source.metadata, iteration=200, consumed_samples=200 * 64)
    source = replace(source, path=folder / "one" / "iter_0000200", metadata=metadata)
    reshard(source, folder / "runs/spikformer_tp2_pp2/checkpoints", Target(2, 2, layout="5|5"))


def test_a_checkpoint_goes_to_other_hardware(ranks, tmp_path: Path) -> None:
    lines = commands("docs/checkpoints.md", "On other hardware, in three commands", {"210": "202"})
    words = lines[-1]
    of_layout = "--standalone --nproc-per-node --tensor-model-parallel-size --load --save --train-iters".split()
    pairs = [pair for pair in zip(words, words[1:], strict=False) if pair[0].startswith("--")]
    flags = [word for pair in pairs if pair[0] not in of_layout for word in pair]
    as_the_page_says(str(tmp_path / "cache"), tmp_path, flags)
    output = follow(ranks, tmp_path, lines)
    assert "0 problems" in output and "a file for each rank, 2 in all" in output
    assert "continuing at iteration 200, 12800 samples consumed" in output
    assert list_checkpoints(tmp_path / "runs/two_ranks/checkpoints") == [200, 202]


def test_one_gpu_computes_what_eight_do() -> None:
    lines = commands("docs/recipes.md", "One GPU computes what eight do")
    flags = [words[words.index("megasnn") + 1 :] for words in lines]
    one, eight = (configuration(MODELS[words[0]], words[1:]) for words in flags)
    assert one == eight
    assert (one.training.global_batch_size, one.training.micro_batch_size) == (256, 32)
    for ranks in (1, 2, 4, 8):
        validate(one, ranks)


# --- programs


def test_the_example_and_the_readmes_model_train(tmp_path: Path) -> None:
    assert "iteration 2/ 2" in run(tmp_path, ROOT / "examples" / "own_model.py", *SHORT)
    run(tmp_path, program("README.md", "Your own model", tmp_path), *SMALL)


@pytest.mark.parametrize(
    ("name", "arguments", "word", "least"),
    [("port_spikingjelly", ["--train-iters", "60"], "accuracy", 75), ("fine_tuning", [], "ten classes", 70)],
)
def test_an_example_learns(monkeypatch, capsys, name: str, arguments: list[str], word: str, least: float) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    assert float(capsys.readouterr().out.split(f"{word} ")[1].split("%")[0]) > least


def test_the_example_of_detection_learns(capsys) -> None:
    runpy.run_path(str(ROOT / "examples" / "detection.py"))["main"](steps=120)
    assert float(capsys.readouterr().out.split("iou ")[1]) > 0.25  # 0 after one step


def test_the_example_with_a_data_set_trains(tmp_path: Path) -> None:
    """Its classes reach a worker, though they are the script's own."""
    flags = "--train-iters 2 --micro-batch-size 8 --global-batch-size 16 --log-interval 1 --eval-iters 2".split()
    output = run(tmp_path, ROOT / "examples" / "own_dataset.py", *flags, "--num-workers", "1")
    assert "iteration 2/ 2" in output
    assert "data: dataset:Digits[1500 indices" in output


def test_the_notebook_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    cells = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())["cells"]
    notebook = ModuleType("notebook")  # dataclasses look their module up
    monkeypatch.setitem(sys.modules, "notebook", notebook)
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "notebook", "exec"), notebook.__dict__)
    accuracy = float(capsys.readouterr().out.split("accuracy ")[1].split("%")[0])
    assert accuracy > 60 and (tmp_path / "notebook_checkpoints").is_dir()


def test_the_loop_of_the_page_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(program("docs/python.md", "A loop of your own", tmp_path)))
    accuracy = float(capsys.readouterr().out.split("accuracy ")[1].split("%")[0])
    assert accuracy > 80 and (tmp_path / "checkpoints" / "iter_0000060").is_dir()
    assert "head.weight" in torch.load(tmp_path / "weights.pt")


def test_the_segmentation_of_the_page_learns(tmp_path: Path, capsys) -> None:
    runpy.run_path(str(program("docs/tasks.md", "Other tasks than classes", tmp_path)))
    assert float(capsys.readouterr().out.split("'iou': ")[1].split("}")[0]) > 0.7


def test_a_language_model_writes_as_on_the_page(tmp_path: Path) -> None:
    flags = "--config spike_lm/text --train-iters 2 --lr-warmup-iters 0 --eval-iters 0 --num-workers 0 --save".split()
    run(ROOT, "-m", "megasnn", "spike_lm", *flags, tmp_path / "checkpoints")
    output = run(tmp_path, program("docs/language.md", "Generate text", tmp_path))
    assert output.startswith("The value of ") and len(output) > 60


def printed(path: str, folder: str) -> list[str]:
    """Lines that the loop of the README prints, in a folder of its own."""
    torch.manual_seed(17 + torch.distributed.get_rank())
    Path(folder).mkdir(exist_ok=True)
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as output:
        runpy.run_path(path)
    return output.getvalue().splitlines()


def test_the_loop_of_the_readme_computes_the_same_on_two_ranks(ranks, tmp_path: Path) -> None:
    path = str(program("README.md", "From Python", tmp_path))
    (alone,) = ranks(1, printed, path, str(tmp_path / "1"))
    losses = [float(line) for line in alone[:2]]
    for each in ranks(2, printed, path, str(tmp_path / "2")):
        assert [float(line) for line in each[:2]] == pytest.approx(losses, rel=1e-6)
    assert "torch.Size([8, 10])" in "".join(alone) and (tmp_path / "2" / "checkpoints" / "iter_0000002").is_dir()


MODEL = "Your own network on many devices"


def test_the_model_of_the_page_trains_and_goes_on_on_two_ranks(ranks, tmp_path: Path) -> None:
    path, flags = program("docs/models.md", MODEL, tmp_path), [*SHORT, "--image-size", "8", "--time-steps", "2"]
    alone = run(ROOT, path, *flags, "--eval-iters", "1", "--save", tmp_path)
    assert "SmallSewResNet with" in alone and "validation at iteration 2" in alone
    more = ("--eval-iters", "1", "--load", str(tmp_path), "--train-iters", "3", "--tensor-model-parallel-size", "2")
    first, _ = ranks(2, continued, str(path), *flags, *more)
    assert "continuing at iteration 2" in first and "iteration 3/ 3" in first.replace("  ", " ")


def test_its_fields_are_flags_and_the_models_of_the_registry_train_by_their_name(tmp_path: Path) -> None:
    shown = run(ROOT, program("docs/models.md", MODEL, tmp_path), "--help")
    assert "--blocks INT" in shown and "Channels of the first stage." in shown
    run(ROOT, "-m", "megasnn", "sew_resnet", *SHORT, "--eval-iters", "1", "--width", "8", "--image-size", "32")
    unknown = run_program(ROOT, "-m", "megasnn", "sew_resnett")
    assert unknown.returncode == 2 and "'sew_resnett'" in unknown.stderr


def test_the_tracker_of_the_page_keeps_what_a_run_tells(tmp_path: Path) -> None:
    network = "--patch-size 4 --embed-dim 32 --depth 1 --num-heads 4 --time-steps 2 --save saved".split()
    run(tmp_path, program("docs/python.md", "Callbacks", tmp_path), *SMALL, *network)
    with open(tmp_path / "run.csv", newline="") as file:
        kept = {(name, int(iteration)): value for name, iteration, value in csv.reader(file)}
    assert kept["iterations", 0] == "2" and float(kept["lr", 0]) == 1e-3
    assert 0 < float(kept["training/loss", 1]) and 0 < float(kept["training/loss", 2])
    assert 0 <= float(kept["validation/accuracy_top1", 2]) <= 1
    assert kept["checkpoint", 2] == str(Path("saved/iter_0000002"))
