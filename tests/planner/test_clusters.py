"""Plans for clusters: whole nodes, what is refused before a model is analysed, and what would fit."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from megasnn.commands.plan import main
from megasnn.config import ConfigError
from megasnn.grid import Grid
from megasnn.planner import analyze
from megasnn.planner.apply import command
from megasnn.planner.layout import Layout
from megasnn.planner.plan import plan
from megasnn.planner.search import PlanError, layouts
from megasnn.planner.states import states_of
from megasnn.planner.step import Predictor
from tests.planner.models import analysis, cluster, config


def test_whole_nodes() -> None:
    """The command starts as many ranks as the plan has, also where nodes have no power of two of devices."""
    nodes = replace(cluster(12), ranks_of_node=6)
    assert nodes.counts() == [1, 2, 4, 6, 12]
    assert replace(cluster(24), ranks_of_node=12).counts() == [1, 2, 4, 8, 12, 24]
    assert cluster(64).counts() == [1, 2, 4, 8, 16, 32, 64]
    found = plan(analysis(), config(), nodes)
    told = re.search(r"--nnodes (\d+) --nproc-per-node (\d+)", command(found, config(), Path("plan.json")))
    assert told is None or int(told[1]) * int(told[2]) == found.layout.ranks
    with pytest.raises(ConfigError, match="--gpus 8 are not whole nodes of --gpus-per-node 3.*take --gpus 6 or 9"):
        plan(analysis(), config(), replace(cluster(8), ranks_of_node=3))


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--gpus", "8", "--gpus-per-node", "3"], "take --gpus 6 or 9"),
        (["--bptt-steps", "2"], "--bptt-steps 2 is not planned"),
        (["--weight-gradients", "scattered"], "--weight-gradients scattered is not planned, and changes what a rank"),
        (["--cuda-graphs", "auto"], "--cuda-graphs auto is not planned, and changes what a rank"),
        (["--tau", "-1"], "--tau -1 should be greater than 0"),
        (["--num-workers", "-1"], "--num-workers -1 should be greater than or equal to 0"),
        (["--output", "."], r"--output \. is a folder: name a file"),
        (["--rates", "none.jsonl"], r"--rates none\.jsonl: there is no such file"),
        (["--rates", "log.jsonl"], r"--rates log\.jsonl is no log\.jsonl of a run"),
        (["--memory", "80"], "--memory '80' is no size with a unit; it looks like 80GB"),
        (["--memory", "80GiB"], "--memory '80GiB' is no size with a unit"),
        (["--memory=-3GB"], "--memory must be greater than 0, got -3"),
        (["--memory", "1MB"], "--memory 1MB: programs and libraries alone take 1.50 GB of a rank on h100"),
        (["--device-name", "cpu-core", "--precision", "bf16"], "--precision bf16: one core .* take another device"),
        (["--device-name", "h100", "--measure"], "--measure is of the device that is here: .* --device-name h100, out"),
        (["--gpus", "8", "--tensor-model-parallel-size", "3"], "--tensor-.*-size 3: none of 1, 2, 4, 8 device"),
        (["--micro-batch-size", "8", "--global-batch-size", "4"], "--micro-batch-size 8 is larger than"),
        (["--output", "a.json", "--json", "./a.json"], r"--output and --json are both a\.json: name two files"),
        (["--costs", "a.json", "--picture", "a.svg", "--json", "a.svg"], "--json and --picture are both"),
        (["--json", "/proc/a.json"], "--json /proc/a.json: cannot write into /proc: "),
        (["--costs", "log.jsonl"], r"log\.jsonl: .*; make it anew with `analyze`"),
    ],
)
def test_refused_before_anything_is_analysed(
    flags: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(analyze, "analyze", None)
    (tmp_path / "log.jsonl").write_text('{"kind": "iteration", "laye')
    with pytest.raises(ValueError, match=told):
        main(["spikformer", *flags])


def test_what_is_said_to_fit_does() -> None:
    """The memory that a plan asks for where nothing fits is enough: simulated, and no bound that nothing reaches."""
    run, small = config(samples=1024, micro_batch=256), cluster(8)
    small = replace(small, machine=replace(small.machine, program=0.0, memory=1e5))
    with pytest.raises(PlanError) as refused:
        plan(analysis(), run, small)
    told = re.search(r"what would do: --memory (\d+)MB", str(refused.value))
    assert told is not None
    enough = replace(small, machine=replace(small.machine, memory=1e6 * float(told[1])))
    assert plan(analysis(), run, enough, prefer="memory").bytes <= 1e6 * float(told[1])


def test_what_does_not_help_is_not_said() -> None:
    """Programs and libraries alone take more than there is: neither more devices nor fewer samples would do."""
    with pytest.raises(PlanError, match=r"what would do: --memory \d+MB for each device$"):
        plan(analysis(), config(), cluster(8, gigabytes=0.1))


def test_flags_that_no_layout_has_are_named() -> None:
    given = config()
    given = replace(given, parallel=replace(given.parallel, pipeline_model_parallel_size=64))
    with pytest.raises(PlanError, match="none has --pipeline-model-parallel-size 64; leave some of these out"):
        plan(analysis(), given, cluster(64))
    with pytest.raises(ConfigError, match="-parallel-size 64: none of 1, 2, 4, 8 device.* change --gpus"):
        plan(analysis(), given, cluster(8))
    given = replace(given, parallel=replace(config().parallel, tensor_model_parallel_size=4))
    with pytest.raises(PlanError, match="-parallel-size 4 is not in the costs, which have 1, 2, 3: analyze with that"):
        plan(analysis(), given, cluster(8))


def test_states_that_are_shared_between_layouts_are_those_of_each() -> None:
    """What is computed once for layouts that hold the same is what each of them by itself would have."""
    predictor = Predictor(analysis(), config(), cluster(16))
    possible = [each for each in layouts(analysis(), config(), cluster(16)) if not isinstance(each, tuple)]
    for layout in possible[::11]:
        counted = analysis().of(layout.grid.tensor, 1, "samples")
        assert counted is not None, "it can be"
        bounds = predictor.bounds(layout)
        for rank in range(layout.grid.pipeline):
            spans = [bounds[chunk] for chunk in layout.chunks_of(rank)]
            chunks = [[each for i in span for each in counted.tensors[i]] for span in spans]
            own = states_of(chunks, layout, config().optimizer, on_gpu=False)
            assert predictor.states(layout)[rank] == own, layout


def test_ranks_of_a_node_sum_gradients_in_memory() -> None:
    """Over other nodes, of rows that have owners, and where the machine has no such memory, they cross links."""
    inside = cluster(2)
    for layout, grows in (
        (Layout(Grid(data=2)), True),
        (Layout(Grid(context=2)), True),
        (Layout(Grid(data=2), shards_optimizer=True), False),
        (Layout(Grid(data=2, weight=2)), False),
        (Layout(Grid(tensor=2)), False),
    ):
        slow = replace(inside.machine, summed=inside.machine.summed + 1.0)  # a second for each byte
        gradients = max(each.reduced for each in Predictor(analysis(), config(), inside).states(layout))
        times = [
            Predictor(analysis(), config(), replace(inside, machine=machine)).predict(layout).time.reduction
            for machine in (inside.machine, slow)
        ]
        assert times[1] - times[0] == pytest.approx(gradients if grows else 0.0), layout
    apart = replace(inside, ranks_of_node=1)
    assert inside.sums_in_memory(Layout(Grid(data=2))) and not apart.sums_in_memory(Layout(Grid(data=2)))
    on_gpus = cluster(2, device="h100")
    assert not on_gpus.sums_in_memory(Layout(Grid(data=2)))
