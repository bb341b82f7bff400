"""The check of a GPU: every part on a CPU, at tiny sizes; what becomes of misses and failures; on a GPU, itself."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from itertools import chain, count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.kernels.triton_process import interpreted as interpreted
from tests.kernels.triton_process import without_triton
from tools.benchmark import gpu, gpu_models
from tools.benchmark.gpu import MISSED, NO_GPU, PASSED, Figure, Setting, check, run_parts
from tools.benchmark.gpu_kernels import error_of
from tools.benchmark.gpu_step import _waits
from tools.benchmark.harness import Part as Measured
from tools.benchmark.layouts_flags import LayoutBenchmark
from tools.benchmark.ranks import RankError
from tools.check_gpu import PARTS, main

TINY = Setting(torch.device("cpu"), is_tiny=True)
OF_KERNELS = ("kernels", "speeds")


def kernels_in_there() -> list[tuple[str, float, bool | None]]:
    outcome = run_parts({name: PARTS[name] for name in OF_KERNELS}, TINY)
    assert not outcome.failures, outcome.failures
    return [(each.name, each.value, each.is_met) for figures in outcome.figures.values() for each in figures]


@without_triton
def test_the_parts_of_kernels_interpreted(interpreted) -> None:
    found = interpreted(kernels_in_there)
    assert len(found) == 5 + 2 * 7
    assert {met for _, _, met in found} == {True, None}, found
    assert all(value > 0 for name, value, met in found if met is None)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks", "products_of_before")
def test_every_other_part() -> None:
    outcome = run_parts({name: part for name, part in PARTS.items() if name not in OF_KERNELS}, TINY)
    assert not outcome.failures and outcome.status == PASSED
    assert len(outcome.figures) == len(PARTS) - len(OF_KERNELS) and all(outcome.figures.values())
    figures = {each.name: each.value for of_part in outcome.figures.values() for each in of_part}
    for name in ("spikformer_ti 224", "vgg_dvs 48"):
        assert figures[f"{name}: launches in a micro-batch"] > 50
        assert figures[f"{name} bf16: against SpikingJelly's fastest"] > 0
        assert 0 < figures[f"{name}: measured / predicted"] < 3
        assert figures[f"{name}: gain by graphs"] > 0
    assert figures["dp2"] > 0 and figures["zbv, measured / simulated"] > 0


def test_a_kernel_that_gives_nan_is_no_kernel_without_error() -> None:
    """Python's max keeps the first of two numbers that do not compare."""
    expected = torch.tensor([0.5, 2.0])
    assert error_of(torch.tensor([0.5, 2.5]), expected) == 0.25
    assert max(0.0, error_of(torch.tensor([0.5, float("nan")]), expected)) == float("inf")


class Waiting:
    """A step as torch warns of one: each wait, in backward too."""

    def forward_backward(self) -> float:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
        return 0.0


def test_every_wait_counts(monkeypatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    assert len(_waits(Waiting())) == 2 and modes == ["warn", "default"]
    assert not torch.is_warn_always_enabled()


def test_a_row_that_does_not_run_is_left_out(monkeypatch) -> None:
    """SpikingJelly's kernels for CUDA need a compiler, for example."""
    asked: list[tuple[str, ...]] = []

    def measured(flags: LayoutBenchmark) -> list[Measured]:
        asked.append(flags.rows)
        if "spikingjelly-cuda" in flags.rows:
            raise RankError("row spikingjelly-cuda failed in start:\nrank 0: no nvcc")
        return [Measured([{"row": row} for row in flags.rows])]

    monkeypatch.setattr(gpu_models, "measure", measured)
    lines = gpu_models._measured(TINY, "vgg_dvs 48", "bf16", ("spikingjelly-cuda", "spikingjelly-torch", "megasnn"))
    assert list(lines) == ["spikingjelly-torch", "megasnn"] == list(asked[1]) and len(asked) == 2


def fails(setting: Setting) -> Iterator[Figure]:
    yield Figure("first", 1.0, least=0.5)
    raise RuntimeError("the driver is gone")


def gives(value: float) -> Iterator[Figure]:
    yield Figure("share", value, "x", least=0.8, note="of a copy")


def test_a_failure_loses_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = {"broken": fails, "whole": lambda setting: gives(0.9)}
    assert check(parts, TINY, tmp_path / "log.jsonl") == MISSED
    *rows, told = capsys.readouterr().out.strip().splitlines()
    assert "whole: share  0.9 x  >= 0.8  yes  of a copy".split() in [row.split() for row in rows]
    assert "broken failed: RuntimeError: the driver is gone" in rows
    (line,) = (tmp_path / "log.jsonl").read_text().splitlines()
    assert json.loads(line) == json.loads(told)
    assert json.loads(line)["figures"]["broken"][0]["met"] and json.loads(line)["status"] == MISSED


def test_a_gpu_that_a_kernel_has_broken_loses_nothing_else(monkeypatch) -> None:
    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "empty_cache", broken)
    parts = {"broken": fails, "after it": lambda setting: gives(0.9)}
    outcome = run_parts(parts, Setting(torch.device("cuda")))
    assert [len(each) for each in outcome.figures.values()] == [1, 1] and outcome.status == MISSED
    assert outcome.failures["broken"] == "RuntimeError: the driver is gone"
    assert outcome.failures["after it"].startswith("RuntimeError: CUDA error: an illegal memory access")


def test_a_figure_without_end_is_json_to_strict_readers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(constant: str) -> None:
        raise ValueError(constant)

    check({"part": lambda setting: gives(float("inf"))}, TINY, tmp_path / "log.jsonl")
    line = json.loads((tmp_path / "log.jsonl").read_text(), parse_constant=refused)
    assert line["figures"]["part"][0]["value"] == "Infinity"
    assert json.loads(capsys.readouterr().out.strip().splitlines()[-1], parse_constant=refused) == line


@pytest.mark.parametrize(("value", "status"), [(0.81, PASSED), (0.79, MISSED)])
def test_the_status_is_that_of_the_targets(value: float, status: int) -> None:
    assert run_parts({"part": lambda setting: gives(value)}, TINY).status == status


def test_a_part_ends_when_the_time_is_over(monkeypatch) -> None:
    """What it gave until then is kept."""
    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=count().__next__))
    outcome = run_parts({"long": lambda setting: chain(gives(1.0), gives(2.0), gives(3.0))}, TINY, limit_s=2)
    assert [each.value for each in outcome.figures["long"]] == [1.0, 2.0]
    assert outcome.failures == {"long": "ended after 'share': 2 seconds are over"} and outcome.status == MISSED


def test_a_folder_that_is_not_there_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "nowhere" / "log.jsonl"
    assert main(["--output", str(output)]) == NO_GPU
    assert f"--output {output}: there is no such folder" in capsys.readouterr().err


def test_what_has_no_time_left_is_said() -> None:
    outcome = run_parts({"late": lambda setting: gives(1.0)}, TINY, limit_s=-1.0)
    assert outcome.failures == {"late": "left out: -1 seconds are over"} and outcome.status == MISSED


@pytest.mark.parametrize(("cuda", "why"), [(None, "is built without CUDA;"), ("13.0", "for CUDA 13.0 and finds none;")])
def test_without_a_gpu_it_says_so(monkeypatch, capsys: pytest.CaptureFixture[str], cuda: str | None, why: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert main([]) == NO_GPU
    told = capsys.readouterr().err
    assert told.startswith("there is no GPU that torch can use, so nothing was checked: torch ") and why in told
    assert main(["--parts", "kernel"]) == NO_GPU
    assert "--parts: kernel is none of versions, kernels" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.usefixtures("products_of_before")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(tmp_path: Path) -> None:
    assert main(["--output", str(tmp_path / "log.jsonl")]) == PASSED
