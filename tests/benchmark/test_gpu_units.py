"""The check of a GPU: what fails, dies or hangs is a row and no more; what comes of misses; table and line."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmark import gpu_parts
from tools.benchmark.gpu import MISSED, PASSED, Figure, Outcome, Part, Setting, table_of
from tools.benchmark.gpu_units import check, last_error, run_parts

TINY = Setting(torch.device("cpu"), is_tiny=True)


def test_a_part_that_needs_more_gpus_says_so() -> None:
    outcome = run_parts({"layouts": Part(gpu_parts.gives, 1.0, lambda setting: (), "two GPUs")}, TINY)
    assert outcome.status == PASSED
    assert table_of(outcome).split("\n")[-1].split() == "layouts: not run  -  needs two GPUs".split()


def part(run: Any, *cases: str, limit_s: float = 60.0) -> Part:
    return Part(run, limit_s, lambda setting: cases or ("",))


@pytest.mark.slow
def test_what_breaks_is_a_row_and_the_next_one_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = {
        "raising": part(gpu_parts.raises),
        "killed": part(gpu_parts.is_killed),
        "ended": part(gpu_parts.ends),
        "hanging": part(gpu_parts.hangs, str(tmp_path), limit_s=2.0),
        "whole": part(gpu_parts.gives, "a model", "another"),
    }
    assert check(parts, TINY, tmp_path / "log.jsonl") == MISSED
    *rows, told = capsys.readouterr().out.strip().splitlines()
    (text,) = (tmp_path / "log.jsonl").read_text().splitlines()
    line = json.loads(text)
    assert line == json.loads(told) and line["status"] == MISSED
    assert line["failures"] == {
        "raising": "RuntimeError: CUDA error: an illegal memory access was encountered",
        "killed": "killed by signal 9 (9 is what a machine without free memory sends)",
        "ended": "the process ended with status 3",
        f"hanging: {tmp_path}": "cut off after 'first': its 2 seconds are over",
    }
    for broken, why in line["failures"].items():
        assert f"{broken} failed NO {why}".split() in [row.split() for row in rows]
    assert [len(figures) for figures in line["figures"].values()] == [1, 1, 1, 1, 4]
    assert "whole: share  0.9 x  >= 0.8  yes  of a copy, another".split() in [row.split() for row in rows]
    processes = {each["value"] for each in line["figures"]["whole"] if each["name"] == "process"}
    assert len(processes) == 2 and os.getpid() not in processes
    assert set(line["seconds"]) == {*line["failures"], "whole: a model", "whole: another"}
    assert_gone(int((tmp_path / "started").read_text()))


def assert_gone(process: int) -> None:
    """What a part has started ends with it; perhaps nobody has taken note of that."""
    end = time.monotonic() + 10
    while Path(f"/proc/{process}/stat").exists() and time.monotonic() < end:
        if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    assert not Path(f"/proc/{process}").exists()


def test_a_rate_below_its_target_is_a_miss() -> None:
    outcome = run_parts({"speeds": part(gpu_parts.is_slow)}, TINY)
    assert not outcome.failures and outcome.status == MISSED and "0.79 x  >= 0.8   NO" in table_of(outcome)


def test_the_time_of_all_parts_ends() -> None:
    """What it gave until then is kept; what does not begin any more says so."""
    parts = {"long": part(gpu_parts.raises, limit_s=60.0), "late": part(gpu_parts.gives)}
    outcome = run_parts(parts, TINY, limit_s=-1.0)
    why = "left out: -1 seconds of all parts are over"
    assert outcome.failures == dict.fromkeys(parts, why) and outcome.status == MISSED


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (
            "step failed in next:\nrank 0: Traceback (most recent call last):\n  File a, line 1, in b\n"
            "    raise RankError(text)\ntools.benchmark.ranks.RankError: row megasnn failed in prepare:\n"
            "rank 0: Traceback (most recent call last):\n  File c\n"
            "torch.AcceleratorError: CUDA error: misaligned address\n"
            "Search for `cudaErrorMisalignedAddress' in https://docs.nvidia.com\nCompile with `TORCH_USE_CUDA_DSA`\n",
            "torch.AcceleratorError: CUDA error: misaligned address",
        ),
        (
            "tools.benchmark.ranks.RankError: row dp2 failed in measure:\nrank 1: killed by signal 11\n",
            "tools.benchmark.ranks.RankError: row dp2 failed in measure: rank 1: killed by signal 11",
        ),
        ("step failed in next:\nrank 0: killed by signal 6", "killed by signal 6"),
    ],
)
def test_the_error_that_is_told(told: str, why: str) -> None:
    assert last_error(told) == why


def test_a_figure_without_end_is_json_to_strict_readers(
    tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(constant: str) -> None:
        raise ValueError(constant)

    figures = [Figure("share", float("inf"), least=0.8), Figure("share", None)]
    monkeypatch.setattr(
        "tools.benchmark.gpu_units.run_parts", lambda parts, setting, limit_s: Outcome({"part": figures})
    )
    check({}, TINY, tmp_path / "log.jsonl")
    line = json.loads((tmp_path / "log.jsonl").read_text(), parse_constant=refused)
    assert [each["value"] for each in line["figures"]["part"]] == ["Infinity", None]
    assert json.loads(capsys.readouterr().out.strip().splitlines()[-1], parse_constant=refused) == line


@pytest.mark.parametrize(
    ("figure", "met"),
    [
        (Figure("", 0.81, least=0.8), True),
        (Figure("", 0.79, least=0.8), False),
        (Figure("", 1.06, least=0.95, most=1.05), False),
        (Figure("", float("nan"), most=1.0), False),
        (Figure("", None, most=1.0), False),
        (Figure("", None), None),
    ],
)
def test_the_status_is_that_of_the_targets(figure: Figure, met: bool | None) -> None:
    assert figure.is_met is met
    assert Outcome({"part": [figure]}).status == (MISSED if met is False else PASSED)
