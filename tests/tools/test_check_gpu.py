"""The check of a GPU, on a CPU with tiny sizes: it runs, it finds what is wrong, and a part that breaks is one row."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from megasnn.kernels import neuron as unit
from tools import check_gpu
from tools.check_gpu import Setting, main

PROGRAM = Path(check_gpu.__file__)
TINY = ["--device", "cpu", "--tiny"]
SETTING = Setting(torch.device("cpu"), tiny=True)


WITHOUT = """
import sys

MISSING = "pydantic", "pydantic_core", "tyro", "webdataset", "spikingjelly", "safetensors", "PIL"

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ImportError(f"{name} is blocked")


sys.meta_path.insert(0, Blocked())
"""


def test_all_parts_run_without_libraries_of_files_and_command_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an image that has little but torch and Triton."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    parts = ["versions", "kernels", "parity", "step"]
    assert main([*TINY, "--parts", *parts, "--output", str(tmp_path / "log")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line["part"] for line in lines] == parts and all(line["figures"] and not line["error"] for line in lines)
    names = [figure["name"].split()[0] for figure in lines[3]["figures"]]
    assert names[:2] == ["step", "throughput"] and {"kernel", "operator"} <= set(names)


def test_a_part_that_breaks_is_a_row_with_its_traceback(tmp_path: Path) -> None:
    flags = [*TINY, "--limit-s", "0.5", "--parts", "parity", "step", "--output", str(tmp_path / "log")]
    assert main(flags) == 1
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line["part"] for line in lines] == ["parity", "step"] and all(line["error"] for line in lines)
    broken = Path(tmp_path / "broken.py")
    broken.write_text("raise RuntimeError('not a program')")
    with mock.patch.object(check_gpu, "__file__", str(broken)):
        assert main([*TINY, "--parts", "versions", "--output", str(tmp_path / "other")]) == 1
    assert "RuntimeError: not a program" in json.loads((tmp_path / "other").read_text())["error"]


def test_a_kernel_that_is_wrong_misses_its_target() -> None:
    right = unit.neuron_multi_step

    def wrong(x, spec, backend, **options):
        spikes, potential = right(x, spec, backend=backend, **options)
        return (1 - spikes if backend != "torch" else spikes), potential

    with mock.patch.object(unit, "neuron_multi_step", wrong):
        found = {figure.name: figure.is_met for figure in check_gpu.kernels(SETTING)}
    assert not found["float64: spikes that differ"]
    assert found["float64: spikes that differ behind a norm"]
    assert not check_gpu.Figure("", float("nan"), most=1.0).is_met


def test_without_a_gpu_nothing_is_checked(tmp_path: Path) -> None:
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        assert main(["--output", str(tmp_path / "log")]) == 2
    assert not (tmp_path / "log").exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_meets_all_targets(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, str(PROGRAM), "--output", str(tmp_path / "log")], capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout
