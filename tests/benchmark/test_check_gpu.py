"""The check of a GPU: every part on a CPU, at tiny sizes; its command; on a GPU, itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.kernels.triton_process import interpreted as interpreted
from tests.kernels.triton_process import without_triton
from tools import check_gpu
from tools.benchmark import gpu_kernels
from tools.benchmark.gpu import MISSED, NO_GPU, PASSED, Outcome, Setting
from tools.check_gpu import PARTS, main

TINY = Setting(torch.device("cpu"), is_tiny=True)
GPU = Setting(torch.device("cuda", 0))
OF_KERNELS = {"kernels": 9, "exactness": 7, "speeds": 14}  # figures


def kernels_in_there() -> dict[str, list[tuple[str, float | None, bool | None]]]:
    """Some of the neurons: test_triton_interpreted.py has all."""
    gpu_kernels.CASES = gpu_kernels.CASES[::3]
    return {name: [(each.name, each.value, each.is_met) for each in PARTS[name].run(TINY, "")] for name in OF_KERNELS}


@without_triton
def test_the_parts_of_kernels_interpreted(interpreted) -> None:
    found = interpreted(kernels_in_there)
    assert {name: len(figures) for name, figures in found.items()} == OF_KERNELS
    for name, value, met in (each for figures in found.values() for each in figures):
        assert met is not False, (name, value)


def rates_in_there() -> list[bool | None]:
    """The interpreter is a thousand times slower than a copy."""
    with mock.patch.object(Setting, "target", lambda self, value: value):
        return [each.is_met for each in PARTS["speeds"].run(TINY, "")]


@without_triton
def test_slow_kernels_are_missed(interpreted) -> None:
    found = interpreted(rates_in_there)
    assert found.count(False) == 2 * 4 and found.count(None) == 2 * 3


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks", "products_of_before")
def test_every_other_part() -> None:
    found = {
        name: [figure for case in part.cases(TINY) for figure in part.run(TINY, case)]
        for name, part in PARTS.items()
        if name not in OF_KERNELS
    }
    assert all(found.values()) and Outcome(found).status == PASSED
    figures = {each.name: each.value for of_part in found.values() for each in of_part}
    for name in ("spikformer_ti 224", "vgg_dvs 48"):
        assert figures[f"{name}: launches in a micro-batch"] > 50
        assert figures[f"{name}: most launches of a unit backward"] > 5
        assert figures[f"{name}: launches in an update"] > 5
        assert figures[f"{name} bf16: against SpikingJelly's fastest"] > 0
        assert 0.5 < figures[f"{name}: need of a step, measured / predicted"] < 2
        assert 0 < figures[f"{name}: peak, measured / predicted"] < 3
        assert figures[f"{name}: gain by graphs"] > 0
        assert 0 < figures[f"{name}: peak, --cuda-graphs auto, measured / predicted"] < 3
    assert figures["dp2"] > 0 and figures["zbv, 2 ranks: measured / simulated"] > 0
    assert figures["dp2: error against SpikingJelly, float64"] < 1e-9


def test_a_folder_that_is_not_there_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "nowhere" / "log.jsonl"
    assert main(["--output", str(output)]) == NO_GPU
    assert f"--output {output}: there is no such folder" in capsys.readouterr().err


@pytest.mark.parametrize(("cuda", "why"), [(None, "is built without CUDA;"), ("13.0", "for CUDA 13.0 and finds none;")])
def test_without_a_gpu_it_says_so(monkeypatch, capsys: pytest.CaptureFixture[str], cuda: str | None, why: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert main([]) == NO_GPU
    told = capsys.readouterr().err
    assert told.startswith("there is no GPU that torch can use, so nothing was checked: torch ") and why in told
    assert main(["--parts", "kernel"]) == NO_GPU
    assert "--parts: kernel is none of versions, kernels" in capsys.readouterr().err


def test_with_a_gpu_parts_are_checked_in_the_order_that_is_asked_for(monkeypatch, tmp_path: Path) -> None:
    """And this process does nothing there."""
    asked, before = list[Any](), torch.cuda.is_initialized()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(check_gpu, "check", lambda *args: asked.append(args) or MISSED)
    output = tmp_path / "log.jsonl"
    assert main(["--parts", "step", "kernels", "--output", str(output)]) == MISSED
    assert asked == [({name: PARTS[name] for name in ("step", "kernels")}, GPU, output)]
    assert list(asked[0][0]) == ["step", "kernels"] and torch.cuda.is_initialized() == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(tmp_path: Path) -> None:
    assert main(["--output", str(tmp_path / "log.jsonl")]) == PASSED
