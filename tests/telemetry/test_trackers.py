"""Experiment trackers, as stand-ins for their packages see them."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

import megasnn
from megasnn.telemetry.operations import LayerOperations
from megasnn.telemetry.records import EvaluationRecord, RunOutline, StepResult
from megasnn.telemetry.reporter import Reporter
from megasnn.telemetry.trackers import Tracker

TRACKERS: list[tuple[type[Tracker], str, list[str]]] = [
    (megasnn.Wandb, "wandb", ["init", "log", "log", "finish"]),
    (megasnn.Trackio, "trackio", ["init", "log", "log", "finish"]),
    (megasnn.MLflow, "mlflow", ["start_run", "log_params", "log_metrics", "log_metrics", "end_run"]),
]
FLAGS = {"lr": 0.1, "optimizer": "adamw"}


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a package that takes every call."""

    def package(name: str) -> mock.Mock:
        calls = mock.Mock()
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module)["__getattr__"] = lambda called: getattr(calls, called)
        monkeypatch.setitem(sys.modules, name, module)
        return calls

    return package


@pytest.mark.parametrize(("tracker", "name", "expected"), TRACKERS)
def test_a_tracker_is_told_flags_losses_and_the_end(package, capsys, tracker, name: str, expected: list[str]) -> None:
    calls = package(name)
    reporter = Reporter(RunOutline(1, 10), is_writer=True, callbacks=[tracker(project="snn")])
    reporter.flags(FLAGS)
    reporter.step(StepResult(2.0, {"top1": 5}, 10, 1.5, 0.1))
    reporter.log(1, 10, {})
    reporter.evaluation(EvaluationRecord(1, 10, 5, 1.0, {"top1": 0.5}), [LayerOperations("a", 8.0, 50.0)])
    reporter.close()
    assert "WARNING" not in capsys.readouterr().out
    told = calls.method_calls
    assert [each[0] for each in told] == expected
    start, *_, logged, evaluated, _ = told
    assert start.kwargs["project"] == "snn"
    flags = told[1].args[0] if name == "mlflow" else start.kwargs["config"]
    assert flags == FLAGS
    assert logged.args[0]["training/loss"] == 2.0 and logged.args[0]["training/accuracy"] == 0.5
    assert evaluated.args[0]["validation/accuracy_top1"] == 0.5
    assert evaluated.args[0]["validation/effective_acs"] == 50 and evaluated.args[0]["validation/energy_mj"] > 0
    assert logged.kwargs == evaluated.kwargs == {"step": 1}


@pytest.mark.parametrize(("tracker", "name", "expected"), TRACKERS)
def test_a_missing_package_is_named_at_once(monkeypatch, tracker, name: str, expected: list[str]) -> None:
    monkeypatch.setattr("megasnn.telemetry.trackers.find_spec", lambda asked: None)
    with pytest.raises(ImportError, match=f"{tracker.__name__} needs.*pip install {name}"):
        tracker()
