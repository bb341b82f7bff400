"""A run that is given the costs file of its plan takes the cut and the order that were planned."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megasnn.config import ConfigError, PretrainConfig
from megasnn.config.training import Length
from megasnn.config.validate import validate
from megasnn.engine import Engine
from megasnn.engine.planning import planned_costs
from megasnn.grid import Grid
from megasnn.models.model import run_config
from megasnn.planner.analysis import Analysis, LayerSeconds, Timed, write
from megasnn.planner.apply import configuration
from megasnn.planner.layout import Layout, with_layout
from megasnn.planner.plan import plan
from megasnn.planner.step import Predictor
from megasnn.schedule import Schedule
from megasnn.telemetry.memory import device_name
from tests.planner.models import MODEL, analysis, cluster, config

HERE = device_name(torch.device("cpu"))
ZBV = Layout(Grid(pipeline=2), schedule="zbv", chunks=2)
SHARED = Layout(Grid(pipeline=2, weight=2), schedule="zbv", chunks=2)
AGAIN = Layout(Grid(pipeline=2), schedule="zbv", chunks=2, recompute="always")


def measured(*weight_gradients: float, device: str = HERE) -> Analysis:
    """Costs in which each layer's weight gradient takes so many seconds, in turn; all else takes one."""
    known = analysis()
    seconds = tuple(
        LayerSeconds(1.0, 1.0, weight_gradients[number % len(weight_gradients)], 1.0, 0.0, 0.0)
        for number in range(len(known.layers))
    )
    machine = replace(cluster().machine, name=device)
    return replace(known, timed=(Timed(1, 1, "samples", 4, 2, seconds),), machine=machine)


def with_costs(path: Path, layout: Layout = ZBV, bounds: tuple[range, ...] | None = None) -> PretrainConfig:
    run = with_layout(config(), layout, bounds)
    return replace(run, parallel=replace(run.parallel, layer_costs=str(path)))


def order_of_run(path: Path, layout: Layout) -> tuple[tuple[range, ...], Schedule]:
    with Engine(with_costs(path, layout), length=Length(9)) as engine:
        return engine.plan.bounds, engine.plan.schedules.training(engine.plan.micro_batches)


@pytest.mark.parametrize("layout", [ZBV, SHARED, AGAIN], ids=str)
def test_cut_and_order_are_those_of_the_plan(ranks, tmp_path: Path, layout: Layout) -> None:
    """Two files with other seconds, which one machine cannot both measure."""
    orders = []
    for number, known in enumerate((measured(0.1, 3.0), measured(9.0, 0.1, 0.1))):
        path = tmp_path / f"{number}.json"
        write(known, path)
        assert known.machine is not None
        where = replace(cluster(layout.ranks), machine=known.machine)
        predicted = Predictor(known, config(), where).predict(layout)
        for bounds, schedule in ranks(layout.ranks, order_of_run, path, layout):
            assert bounds == predicted.bounds
            assert schedule.actions == predicted.schedule.actions
        orders.append(predicted.schedule.actions)
    assert orders[0] != orders[1]


def test_what_does_not_serve(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    run = with_costs(file)

    def refused(known: Analysis | None, message: str, run: PretrainConfig = run, grid: Grid = ZBV.grid) -> None:
        if known is not None:
            write(known, file)
        with pytest.raises(ValueError, match=message):
            planned_costs(run, grid, 2, HERE)

    refused(None, "cannot read .*costs.json")
    refused(analysis(), "--layer-costs .*costs.json has no seconds: it was made without --measure; measure it here")
    refused(measured(1.0, device="another"), f"was measured on another, and this is {re.escape(HERE)}")
    other = replace(run, model=replace(MODEL, depth=2))
    refused(measured(1.0), "is of another spikformer: model.depth is 1 in the costs and 2 here", other)
    refused(measured(1.0), "does not have this layout: tensor 7: was not asked for", grid=Grid(tensor=7))


def test_refusals_are_of_all_ranks(ranks, tmp_path: Path) -> None:
    write(analysis(), tmp_path / "costs.json")
    for said in ranks(2, refusal_of_run, tmp_path / "costs.json"):
        assert "has no seconds" in said


def refusal_of_run(path: Path) -> str:
    with pytest.raises(ValueError) as found, Engine(with_costs(path), length=Length(9)):
        pass
    return str(found.value)


def test_flags_that_exclude_it() -> None:
    run = with_costs(Path("costs.json"))
    budget = replace(run, parallel=replace(run.parallel, memory_budget=9.0))
    with pytest.raises(ConfigError, match="--memory-budget 9 with --layer-costs costs.json: a budget is kept by"):
        validate(budget, 2)
    windows = replace(run, training=replace(run.training, bptt_steps=1))
    with pytest.raises(ConfigError, match="--layer-costs costs.json with --bptt-steps 1: costs are of all time steps"):
        validate(windows, 2)
    with pytest.raises(ConfigError, match="--layer-costs is decided by the plan"):
        plan(analysis(), run, cluster())


def test_apply_names_the_file_where_the_order_follows_it() -> None:
    asked = run_config(type(MODEL))(
        model=MODEL,
        training=config().training,
        parallel=replace(with_layout(config(), ZBV).parallel, pipeline_model_parallel_layout=None),
    )
    found = plan(measured(1.0), asked, replace(cluster(2), machine=replace(cluster().machine, name=HERE)))
    assert found.layout.schedule == "zbv"
    file = Path("costs.json")
    assert configuration(found, config(), file).parallel.layer_costs == str(file.absolute())
    assert configuration(found, config()).parallel.layer_costs is None
    fixed = replace(found, layout=replace(found.layout, schedule="interleaved"))
    assert configuration(fixed, config(), file).parallel.layer_costs is None
