"""Shares of a device's peak rates, fitted to steps that are made up, and a short run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megasnn.planner.machines import DEVICES, REACHED
from tools.benchmark import devices
from tools.benchmark.devices_fit import Example, fitted, foreseen
from tools.benchmark.models import dimensions_of
from tools.benchmark.program import main
from tools.benchmark.two_ranks import LAYOUTS, Run


def test_shares_are_found_again() -> None:
    made_up = replace(REACHED["cpu"], operations=0.3, moved=0.2)
    run = Run(dimensions_of("spikformer_ti"), 4, 4)
    known = run.counted()
    examples = []
    for size in (1, 4):
        config = replace(run, micro_batch_size=size).configuration()
        for layout in (LAYOUTS["one"], LAYOUTS["dp2"]):
            nothing = Example(known, config, layout, 1.0)
            examples.append(replace(nothing, seconds=foreseen(nothing, made_up)))
    found = fitted(examples[1:])
    assert foreseen(examples[0], REACHED["cpu"]) != pytest.approx(examples[0].seconds, rel=0.1)
    assert foreseen(examples[0], found) == pytest.approx(examples[0].seconds, rel=0.01)
    assert found.program == made_up.program


def test_a_machine_has_the_shares_that_are_given() -> None:
    core, half = DEVICES["cpu-core"], replace(REACHED["cpu"], operations=0.5, alone=1.5)
    machine = core.machine("cpu-core", "fp32", half)
    assert machine.operations == pytest.approx(0.5 * core.operations["fp32"]) and machine.alone == 1.5


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGASNN_CACHE", str(tmp_path))
    log = tmp_path / "log.jsonl"
    small = "--models spikformer_ti --sizes 1 --micro-batches 2 --layouts one dp2 --steps 1"
    assert main(["--fit-device", *small.split(), "--output", str(log)]) == 0
    dp2, one = map(json.loads, log.read_text().splitlines())
    assert (dp2["fitted_to"], one["fitted_to"]) == (True, False)
    assert dp2["foreseen_ms"] == pytest.approx(dp2["step_ms"]["median"], rel=0.05)
    assert "foreseen: 1 rows, error" in capsys.readouterr().out
    monkeypatch.setattr(devices, "start_row", None)  # nothing is measured a second time
    assert main(["--fit-device", *small.split(), "--resume", "--output", str(log)]) == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["step_ms"] for line in lines[2:]] == [dp2["step_ms"], one["step_ms"]]


def test_flags_without_sense(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--fit-device", "--models", "vgg_dvs", "--sizes", "0", "--layouts", "dp3"]) == 2
    told = capsys.readouterr().err
    assert "--sizes 0: a micro-batch has a sample at least" in told and "--layouts dp3: known are one" in told
    assert main(["--fit-device", "--models", "vgg_dvs", "--sizes", "1", "--layouts", "one"]) == 2
    assert "1 row(s): one half is fitted to and the other is foreseen" in capsys.readouterr().err
