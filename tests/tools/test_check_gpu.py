"""The check of a GPU, on a CPU with tiny sizes: it runs, it finds what is wrong, and a part that breaks is one row."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from tools import check_gpu
from tools.check_gpu import PARTS, Setting, main

PROGRAM = Path(check_gpu.__file__)
TINY = ["--device", "cpu", "--tiny"]
SETTING = Setting(torch.device("cpu"), tiny=True)


@pytest.mark.slow
@pytest.mark.parametrize("part", [part for part in PARTS if not part.endswith("32")])
def test_a_part_runs_and_meets_its_targets(part: str, tmp_path: Path) -> None:
    assert main([*TINY, "--parts", part, "--output", str(tmp_path / "log")]) == 0
    line = json.loads((tmp_path / "log").read_text())
    assert line["part"] == part and not line["error"] and line["figures"]
    if part.startswith("step"):
        names = [figure["name"].split()[0] for figure in line["figures"]]
        assert names[:2] == ["step", "throughput"] and {"kernel", "operator"} <= set(names)


def test_a_part_that_breaks_is_a_row_with_its_traceback(tmp_path: Path) -> None:
    flags = [*TINY, "--limit-s", "0.5", "--parts", "parity", "step-24", "--output", str(tmp_path / "log")]
    assert main(flags) == 1
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line["part"] for line in lines] == ["parity", "step-24"] and all(line["error"] for line in lines)
    broken = Path(tmp_path / "broken.py")
    broken.write_text("raise RuntimeError('not a program')")
    with mock.patch.object(check_gpu, "__file__", str(broken)):
        assert main([*TINY, "--parts", "versions", "--output", str(tmp_path / "other")]) == 1
    assert "RuntimeError: not a program" in json.loads((tmp_path / "other").read_text())["error"]


def test_a_kernel_that_is_wrong_misses_its_target() -> None:
    right = check_gpu.neuron_multi_step

    def wrong(x, spec, backend, **options):
        spikes, potential = right(x, spec, backend=backend, **options)
        return (1 - spikes if backend != "torch" else spikes), potential

    with mock.patch.object(check_gpu, "neuron_multi_step", wrong):
        found = {figure.name: figure.is_met for figure in check_gpu.kernels(SETTING)}
    assert not found["float64: spikes that differ"]
    assert found["float64: spikes that differ behind a norm"]
    assert not check_gpu.Figure("", float("nan"), most=1.0).is_met


def test_operations_of_convolutions_and_products() -> None:
    images, weight = [2, 3, 8, 8], [16, 3, 3, 3]
    forward = 2 * 2 * 16 * 4 * 4 * 3 * 9  # stride 2: 4 x 4 outputs
    stride_and_padding = ["", "", "", "[2, 2]", "[1, 1]"]
    assert check_gpu._operations("aten::mkldnn_convolution", [images, weight], stride_and_padding) == forward
    on_a_gpu = ["", "", "[1, 1]", "[2, 2]", "[1, 1]"]
    assert check_gpu._operations("aten::cudnn_convolution", [images, weight], on_a_gpu) == forward
    both = ["", "", "", "[16]", "[True, True, False]"]
    assert check_gpu._operations("aten::convolution_backward", [[2, 16, 4, 4], images, weight], both) == 2 * forward
    assert check_gpu._operations("aten::mm", [[5, 6], [6, 7]], []) == 2 * 5 * 6 * 7


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
