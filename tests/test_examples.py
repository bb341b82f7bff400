"""The example script, the notebook and the README's model run as a reader would run them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.forking import run_program

ROOT = Path(__file__).parents[1]
SHORT = "--train-iters 2 --micro-batch-size 8 --global-batch-size 16 --num-workers 0 --log-interval 1".split()


def test_the_example_trains(tmp_path: Path) -> None:
    ended = run_program(tmp_path, ROOT / "examples" / "own_model.py", *SHORT)
    assert ended.returncode == 0, ended.stderr
    assert "iteration 2/ 2" in ended.stdout


def test_the_readmes_model_trains(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(from dataclasses.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    program = tmp_path / "own_model.py"
    program.write_text(code)
    sizes = "--image-size 8 --in-channels 1 --num-classes 10".split()
    ended = run_program(tmp_path, program, *SHORT, *sizes)
    assert ended.returncode == 0, ended.stderr


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


@pytest.mark.slow
def test_the_quickstarts_three_commands(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text()
    for name in ("tools", "megasnn", "pretrain_spikformer.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    commands = page.split("```bash\n")[1].split("```")[0]
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": programs, "PYTHONPATH": str(ROOT)}
    shell = ["bash", "-ec", commands]
    ended = subprocess.run(shell, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (tmp_path / "spikingjelly.pt").is_file()
    assert {path.name for path in (tmp_path / "runs/first").iterdir()} >= {"log.jsonl", "config.json", "iter_0000060"}
