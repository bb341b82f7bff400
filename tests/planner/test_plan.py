"""Plans: what is chosen, what is refused and why, and that no torch is needed for it."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from megasnn import MeanLinear, Model, layer
from megasnn.commands.plan import make_plan
from megasnn.common.files import DescriptionError
from megasnn.config import ConfigError
from megasnn.config.validate import validate
from megasnn.models.model import run_config
from megasnn.models.registry import MODELS
from megasnn.planner import analyze
from megasnn.planner.candidates import Prefer
from megasnn.planner.costs_file import Timed, read, write
from megasnn.planner.plan import Plan, apply, command, cuts, plan, sizes_to_choose, table
from megasnn.planner.predict import Predictor
from megasnn.planner.search import AS_FAST, PlanError
from megasnn.pretraining import configuration as from_flags
from tests.planner.models import analysis, cluster, config, layout

MAKE_PLAN = "import sys; from megasnn.commands.plan import make_plan; make_plan(sys.argv[1:]); "


def planned(ranks: int = 8, gigabytes: float = 4.0, prefer: Prefer = "speed") -> Plan:
    return plan(analysis(), config(), cluster(ranks, gigabytes), prefer)


def test_every_candidate_has_a_reason() -> None:
    found = planned(6)
    chosen, *others = found.candidates
    assert chosen.layout == found.layout and not chosen.reason and chosen.simulated
    assert all(each.reason for each in others) and len(set(found.candidates)) == len(found.candidates)
    assert {each.layout.ranks for each in found.candidates} == {1, 2, 4, 6}
    assert found.simulated == sum(each.simulated for each in found.candidates) <= 20
    assert any("--tensor-model-parallel-size" in each.reason for each in others if math.isinf(each.seconds))
    assert str(found.layout) in table(found) and "tensor: 1, 2\n" in cuts(analysis(), 8)


@pytest.mark.parametrize("latency", [0.0, 1e-3, 1.0])
def test_no_preference_is_slower_than_one_device(latency: float) -> None:
    slow = cluster(8)
    link = replace(slow.machine.within, latency=latency)
    slow = replace(slow, machine=replace(slow.machine, within=link, between=link))
    alone = Predictor(analysis(), config(), slow).predict(layout()).time.total
    fast, small, roomy = (plan(analysis(), config(), slow, prefer) for prefer in ("speed", "memory", "capacity"))
    for found in (fast, small, roomy):
        assert found.predicted.time.total <= AS_FAST * alone
        assert latency < 1 or found.layout.ranks == 1
    assert small.bytes <= fast.bytes and fast.predicted.time.total <= small.predicted.time.total
    assert roomy.largest_micro_batch >= fast.largest_micro_batch


def test_the_size_of_micro_batches_is_chosen() -> None:
    """Of sizes that divide the batch; a replica for each device needs a micro-batch for each."""
    run = config(samples=32, micro_batch=4)
    sizes = sizes_to_choose(run, 16)
    assert sorted(sizes) == [1, 2, 4, 8, 16] and sizes[0] == 2
    for device in ("cpu-core", "h100"):
        found = plan(analysis(), run, cluster(16, 80.0, device=device), micro_batch_sizes=sizes)
        given = plan(analysis(), run, cluster(16, 80.0, device=device))
        assert found.predicted.time.total <= AS_FAST * given.predicted.time.total
        assert found.configuration(run).training.micro_batch_size == found.layout.micro_batch_size
        assert {each.layout.micro_batch_size for each in found.candidates} == set(sizes)
    usual = layout(2, pp=2, dp_shard=2, recompute="always")
    of_layout, of_config = (Predictor(analysis(), config(32, size), cluster(4)).predict(usual) for size in (8, 2))
    assert of_layout.time == of_config.time and of_layout.memory == of_config.memory


def test_advice_on_micro_batches_divides_the_batch() -> None:
    """100 samples on 3 stages: four micro-batches a stage are 12 or more, and 8 samples would not divide the batch."""
    run = config(samples=100, micro_batch=20, pipeline_model_parallel_size=3)
    (advice,) = (each for each in plan(analysis(), run, cluster(3)).advice if "--micro-batch-size" in each)
    found = re.search(r"--micro-batch-size (\d+)", advice)
    assert found is not None and int(found[1]) == 5


def test_whole_nodes() -> None:
    """The command starts as many ranks as the plan has, also where nodes have no power of two of devices."""
    nodes = replace(cluster(12), ranks_of_node=6)
    assert nodes.counts() == [1, 2, 4, 6, 12]
    assert replace(cluster(24), ranks_of_node=12).counts() == [1, 2, 4, 8, 12, 24]
    found = plan(analysis(), config(), nodes)
    told = re.search(r"--nnodes (\d+) .*--nproc-per-node (\d+)", command(found, config(), Path("plan.json")))
    assert told is None or int(told[1]) * int(told[2]) == found.layout.ranks
    with pytest.raises(ConfigError, match="--gpus 8"):
        plan(analysis(), config(), replace(cluster(8), ranks_of_node=3))


def test_nothing_fits() -> None:
    with pytest.raises(PlanError, match="--memory"):
        planned(gigabytes=0.1)
    run, small = config(samples=1024, micro_batch=256), cluster(8, program=0.0, memory=1e5)
    with pytest.raises(PlanError) as refused:
        plan(analysis(), run, small)
    told = re.search(r"--memory (\d+)MB", str(refused.value))
    assert told is not None
    enough = replace(small, machine=replace(small.machine, memory=1e6 * float(told[1])))
    assert plan(analysis(), run, enough, prefer="memory").bytes <= 1e6 * float(told[1])


def test_flags_that_are_given_are_kept() -> None:
    found = plan(analysis(), config(pipeline_model_parallel_size=2, pipeline_schedule="zb1p"), cluster(8))
    assert found.layout.grid.pp == 2 and found.layout.schedule == "zb1p"
    for ranks, given in ((64, {"pipeline_model_parallel_size": 64}), (8, {"tensor_model_parallel_size": 4})):
        with pytest.raises(PlanError, match=f"--{next(iter(given)).replace('_', '-')} {next(iter(given.values()))}"):
            plan(analysis(), config(**given), cluster(ranks))


def test_graphs_are_taken_where_they_save_time_and_fit() -> None:
    """A small model's step on a GPU is its launches. The graphs' memory decides where there is little of it."""
    run = config(samples=64, pipeline_model_parallel_size=2, pipeline_schedule="gpipe")
    gpus = cluster(2, 80.0, device="h100", program=0.0)
    found = plan(analysis(), run, gpus)
    assert found.layout.has_graphs and found.configuration(run).training.cuda_graphs == "on"
    assert "--cuda-graphs on" in command(found, run, Path("plan.json"))
    unknown = replace(gpus, machine=replace(gpus.machine, graph_start=None))
    without = plan(analysis(), run, unknown)
    assert not any(each.layout.has_graphs for each in without.candidates)
    assert "--cuda-graphs" not in command(without, run, Path("plan.json"))
    assert found.predicted.time.total < without.predicted.time.total and found.bytes > 1.2 * without.bytes
    little = replace(gpus, machine=replace(gpus.machine, memory=1.1 * without.bytes))
    assert not plan(analysis(), run, little).layout.has_graphs


def test_graphs_that_are_asked_for_are_kept() -> None:
    run = config()
    run = replace(run, training=replace(run.training, cuda_graphs="on"))
    gpus = cluster(8, 80.0, device="h100")
    assert all(each.layout.has_graphs for each in plan(analysis(), run, gpus).candidates)


def test_seconds_of_another_device_are_not_used() -> None:
    """Layers that were measured on one device say nothing of a second one, and the plan says so."""
    known, here = analysis(), replace(cluster(2).machine, name="here")
    seconds = ((1.0, 1.0, 1.0),) * len(known.layers)
    timed = replace(known, timed=(Timed(4, 1, seconds),), machine=here)
    other, same = plan(timed, config(), cluster(2)), plan(timed, config(), replace(cluster(2), machine=here))
    assert other.predicted.time == plan(known, config(), cluster(2)).predicted.time and not same.warnings
    assert same.predicted.time.total > len(known.layers) > other.predicted.time.total
    assert "measured on here" in other.warnings[0]


def test_refusals(tmp_path: Path) -> None:
    other = replace(config(), model=replace(config().model, depth=2))
    with pytest.raises(PlanError, match="model.depth"):
        plan(analysis(), other, cluster())
    with pytest.raises(ValueError, match="Speed"):
        planned(prefer="Speed")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--memory-budget"):
        plan(analysis(), config(memory_budget=10.0), cluster())
    file = tmp_path / "costs.json"
    file.write_text('{"format": 1}')
    with pytest.raises(DescriptionError, match="costs.json"):
        read(file)


@dataclass(frozen=True, kw_only=True)
class Own(Model):
    """A model that is defined in this file."""

    def layers(self):
        yield layer("head", MeanLinear(self.in_channels, self.num_classes))


def test_the_command(tmp_path: Path) -> None:
    found = planned()
    said = apply(found, config(), tmp_path / "flags.json")
    assert f"--nproc-per-node {found.layout.ranks} -m megasnn spikformer --config" in said
    of_file = from_flags(MODELS["spikformer"], ["--config", str(tmp_path / "flags.json")])
    assert of_file == found.configuration(config())
    own = run_config(Own)(model=Own(), training=config().training)
    assert command(found, own, Path("plan.json")).endswith(f"{__file__} --config plan.json --data-path SHARDS")


MODEL_FLAGS = "spikformer --embed-dim 32 --depth 1 --num-heads 2 --image-size 16 --time-steps 2".split()


def test_the_program_needs_no_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs, output = tmp_path / "costs.json", tmp_path / "flags.json"
    write(analysis(), costs)
    assert read(costs) == analysis()
    flags = [*MODEL_FLAGS, *"--global-batch-size 16 --gpus 4 --device-name cpu-core".split()]
    flags += ["--costs", str(costs), "--output", str(output)]
    alone = f"{MAKE_PLAN}assert 'torch' not in sys.modules"
    program = [sys.executable, "-c", alone, *flags, "--memory=2GB", "--micro-batch-size", "4"]
    said = subprocess.run(program, capture_output=True, text=True, check=True, timeout=60).stdout
    assert "plan for 4 x cpu-core" in said and "of 2.00 GB" in said and f"--config {output}" in said
    assert set(re.findall(r"micro-batches of (\d+)", said)) == {"4"}, "the size was given"
    of_file = from_flags(MODELS["spikformer"], ["--config", str(output), "--train-iters", "1"])
    validate(of_file, 4)
    make_plan(flags)
    assert len(set(re.findall(r"micro-batches of (\d+)", capsys.readouterr().out))) > 1


NOT_PLANNED = "--bptt-steps 2", "--weight-gradients scattered", "--tau -1"
REFUSED = {flags: flags for flags in NOT_PLANNED} | {
    "--cuda-graphs on --device-name cpu-core": "no figures of cpu-core with graphs",
    "--gpus 0": "--gpus",
    "--gpus 8 --gpus-per-node 3": "--gpus 6 or 9",
    "--memory 80sheep": "--memory '80sheep'",
    "--memory 80": "--memory '80'",
    "--device-name cpu-core --precision bf16": "--precision bf16",
    "--micro-batch-size 8 --global-batch-size 4": "--micro-batch-size 8",
    "--costs log.jsonl": "log.jsonl",
    "": "spikformer",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_refused_before_anything_is_analysed(flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(analyze, "analyze", None)
    (tmp_path / "log.jsonl").write_text('{"kind": "iteration", "laye')
    with pytest.raises(ValueError, match=REFUSED[flags]):
        make_plan(["spikformer", *flags.split()] if flags else [])
