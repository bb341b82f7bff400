"""Plans: what is chosen, what is refused and why, and that no torch is needed for it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from megasnn import MeanLinear, Model, layer
from megasnn.commands.plan import main
from megasnn.config import ConfigError
from megasnn.config.validate import validate
from megasnn.files import DescriptionError
from megasnn.models.model import run_config
from megasnn.models.registry import MODELS
from megasnn.planner.analysis import LayerSeconds, Timed, read, write
from megasnn.planner.apply import apply, command, configuration
from megasnn.planner.candidates import Prefer
from megasnn.planner.energy import energy, measured_rates
from megasnn.planner.machines import DEVICES
from megasnn.planner.pictures import draw, fastest
from megasnn.planner.plan import Plan, plan
from megasnn.planner.report import as_json, cuts, table
from megasnn.planner.search import PlanError
from megasnn.planner.step import Predictor
from megasnn.pretraining import configuration as from_flags
from tests.planner.models import analysis, cluster, config

WITHOUT_TORCH = """
import sys


class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError("torch is blocked")


sys.meta_path.insert(0, Blocked())
from pathlib import Path
from megasnn.models.spikformer.model import Spikformer
from megasnn.planner.analysis import read
from megasnn.planner.apply import apply
from megasnn.planner.machines import DEVICES
from megasnn.planner.plan import plan
from megasnn.planner.report import table
from megasnn.planner.cluster import Cluster
from megasnn.pretraining import configuration
flags = "--embed-dim 32 --depth 1 --num-heads 2 --image-size 16 --time-steps 2 --micro-batch-size 4".split()
config = configuration(Spikformer, [*flags, "--global-batch-size", "16"])
found = plan(read(Path(sys.argv[1])), config, Cluster(8, 8, DEVICES["h100"].machine("h100", "fp32")))
print(table(found))
print(apply(found, config, Path(sys.argv[2])))
"""


def planned(ranks: int = 8, gigabytes: float = 4.0, prefer: Prefer = "speed") -> Plan:
    return plan(analysis(), config(), cluster(ranks, gigabytes), prefer)


def test_without_torch(tmp_path: Path) -> None:
    costs, flags = tmp_path / "costs.json", tmp_path / "flags.json"
    write(analysis(), costs)
    assert read(costs) == analysis()
    program = [sys.executable, "-c", WITHOUT_TORCH, str(costs), str(flags)]
    said = subprocess.run(program, capture_output=True, text=True, check=True, timeout=60).stdout
    assert "plan for 8 x h100" in said and "MegaSNN was not measured on a GPU" in said
    assert f"--config {flags}" in said.splitlines()[-1]
    of_file = from_flags(MODELS["spikformer"], ["--config", str(flags), "--train-iters", "1"])
    validate(of_file, 8)


def test_what_can_be_cut() -> None:
    said = cuts(analysis())
    assert "tensor: 1, 2\n" in said and "not 3: --num-heads 2 must be a multiple" in said
    assert "context by rows: 2\n" in said and "--context-parallel-size may be" in said  # 8 ranks have too few rows


def test_every_candidate_has_a_reason() -> None:
    found = planned(6)
    chosen, *others = found.candidates
    assert chosen.layout == found.layout and not chosen.reason and chosen.simulated
    assert all(each.reason for each in others) and len(set(found.candidates)) == len(found.candidates)
    assert {each.layout.ranks for each in found.candidates} == {1, 2, 4, 6}
    assert found.simulated == sum(each.simulated for each in found.candidates) <= 20
    refused = [each.reason for each in found.candidates if each.seconds is None]
    assert any("must be a multiple of --tensor-model-parallel-size" in reason for reason in refused)
    assert any("micro-batch(es), but there are 6" in reason for reason in refused)
    assert json.loads(json.dumps(as_json(found)))["layout"]["ranks"] == found.layout.ranks
    assert "looked at" in table(found)


def test_bounds_are_bounds() -> None:
    """No simulated step is faster than its bound; its memory is no less either."""
    predictor = Predictor(analysis(), config(), cluster(4))
    for each in [each for each in planned(4).candidates if each.seconds is not None and each.layout.ranks > 1][::7]:
        seconds, need = predictor.least(each.layout)
        predicted = predictor.predict(each.layout)
        total = 1e6 * max(memory.total - memory.program for memory in predicted.memory)
        assert predicted.time.total >= seconds * (1 - 1e-9), each.layout
        assert predictor.with_program(total) >= need * (1 - 1e-9), each.layout


def test_what_is_preferred() -> None:
    fast, small, roomy = (planned(prefer=prefer) for prefer in ("speed", "memory", "capacity"))
    assert small.bytes < fast.bytes and fast.predicted.time.total < small.predicted.time.total
    assert roomy.largest_micro_batch >= fast.largest_micro_batch


def test_one_device_is_an_answer() -> None:
    """Where links are slow, one device is faster than several, and taken."""
    slow = cluster(8)
    crawling = replace(slow.machine.within, latency=1.0)
    slow = replace(slow, machine=replace(slow.machine, within=crawling, between=crawling))
    found = plan(analysis(), config(), slow)
    assert found.layout.ranks == 1 and any("left out" in advice for advice in found.advice)


def test_slower_ranks_are_waited_for() -> None:
    even, uneven = cluster(8), replace(cluster(8), spread=0.1)
    layout = planned().layout
    predicted = [Predictor(analysis(), config(), each).predict(layout).time.pipeline for each in (even, uneven)]
    assert predicted[1] == pytest.approx(predicted[0] * uneven.slowest(layout.ranks))
    assert uneven.slowest(8) > uneven.slowest(2) > uneven.slowest(1) == 1


def test_nothing_fits() -> None:
    with pytest.raises(PlanError, match=r"no layout of 8 device\(s\) fits into 0.1 GB each: the least needs .* more"):
        planned(gigabytes=0.1)


def test_flags_that_are_given_are_kept() -> None:
    given = config()
    given = replace(given, parallel=replace(given.parallel, pipeline_model_parallel_size=2, pipeline_schedule="zb1p"))
    found = plan(analysis(), given, cluster(8))
    assert found.layout.grid.pipeline == 2 and found.layout.schedule == "zb1p"


def test_seconds_of_another_device_are_not_used() -> None:
    """Layers that were measured on one device say nothing of a second one, and the plan says so."""
    known = analysis()
    seconds = LayerSeconds(1.0, 1.0, 1.0, 1.0, 0.0, 0.0)
    here = replace(cluster(2).machine, name="here")
    timed = replace(known, timed=(Timed(1, 1, "samples", 4, 1, (seconds,) * len(known.layers)),), machine=here)
    other, same = plan(timed, config(), cluster(2)), plan(timed, config(), replace(cluster(2), machine=here))
    assert other.predicted.time == plan(known, config(), cluster(2)).predicted.time and not same.warnings
    assert same.predicted.time.total > len(known.layers) > other.predicted.time.total
    assert "measured on here, which is not used (leave --device-name out" in other.warnings[0]


def test_refusals(tmp_path: Path) -> None:
    other = replace(config(), model=replace(config().model, depth=2))
    with pytest.raises(PlanError, match="model.depth is 1 in the costs and 2 here"):
        plan(analysis(), other, cluster())
    with_budget = replace(config(), parallel=replace(config().parallel, memory_budget=10.0))
    with pytest.raises(ConfigError, match="--memory-budget is decided by the plan"):
        plan(analysis(), with_budget, cluster())
    with pytest.raises(ValueError, match="--precision bf16: one core of a server, .* is known for fp32, fp64"):
        DEVICES["cpu-core"].machine("cpu-core", "bf16")
    file = tmp_path / "costs.json"
    file.write_text('{"format": 2}')
    with pytest.raises(DescriptionError, match=r"costs.json: .*; make it anew with `analyze`"):
        read(file)


def test_the_command(tmp_path: Path) -> None:
    found = planned()
    said = apply(found, config(), tmp_path / "flags.json")
    assert said == (
        f"torchrun --standalone --nproc-per-node {found.layout.ranks} -m megasnn spikformer "
        f"--config {tmp_path / 'flags.json'}"
    )
    of_file = from_flags(MODELS["spikformer"], ["--config", str(tmp_path / "flags.json")])
    assert of_file == configuration(found, config())


@dataclass(frozen=True, kw_only=True)
class Own(Model):
    """A model that is defined in this file."""

    def layers(self):
        yield layer("head", MeanLinear(self.in_channels, self.num_classes))


def test_the_command_of_a_model_of_ones_own() -> None:
    """It runs the script with the model, which MegaSNN by itself does not know."""
    own = run_config(Own)(model=Own(), training=config().training)
    said = command(planned(), own, Path("plan.json"))
    assert said.endswith(f"--nproc-per-node {planned().layout.ranks} {__file__} --config plan.json")


@pytest.mark.parametrize("rest", [0.0, 1.0])
def test_parts_of_the_memory_add_up(rest: float) -> None:
    """Also where an allocator keeps more than tensors take."""
    ranks = cluster(2)
    large = replace(ranks, machine=replace(ranks.machine, rest=rest))
    found = plan(analysis(), config(samples=1024, micro_batch=256), large)
    line = next(line for line in table(found).splitlines() if "memory of the largest rank" in line)
    whole, parts = line.split(": ")[1].split(" = ")
    values = [float(part.split()[-1]) for part in parts.split(" + ")]
    assert sum(values) == pytest.approx(float(whole.split()[0]), abs=0.5 * len(values) + 0.5)
    assert 1e6 * float(whole.split()[0]) == pytest.approx(found.bytes, abs=1e6)
    assert ("what an allocator keeps unused" in line) is (rest > 0)


def test_a_copy_for_checkpoints_is_warned_of() -> None:
    """On a CPU it is in the memory of the ranks; on a GPU in that of their host."""
    saves = replace(config().checkpoint, save="runs", async_save=True)
    for device, warned in (("cpu-core", True), ("h100", False)):
        found = plan(analysis(), replace(config(), checkpoint=saves), cluster(2, device=device))
        assert any("--async-save copies weights" in each for each in found.warnings) is warned


def test_pictures(tmp_path: Path) -> None:
    """Simulated candidates of each number of devices are filled circles; the timeline has the winner's actions."""
    found = planned()
    timeline, against = draw(found, tmp_path / "plan.svg")
    assert "<svg" in timeline.read_text() and str(found.layout) in timeline.read_text()
    best = fastest(found)
    assert list(best) == [1, 2, 4, 8] and best[found.layout.ranks] == found.candidates[0]
    assert against.read_text().count("<circle") == len(best)


def test_energy(tmp_path: Path) -> None:
    layers = analysis().layers
    names = [f"{layer.name}.neuron" for layer in layers[:-1]]
    log = tmp_path / "log.jsonl"
    rates = {name: {"firing_rate": 0.25, "silent": 0.0, "saturated": 0.0} for name in names}
    log.write_text(json.dumps({"kind": "start"}) + "\n" + json.dumps({"kind": "iteration", "layers": rates}) + "\n")
    found = energy(analysis(), measured_rates(log))
    spiking = sum(layer.operations for layer in layers if layer.spikes)
    assert found.synaptic == pytest.approx(0.25 * spiking) and 0 < spiking < found.dense
    assert found.multiply_adds == found.dense - spiking
    assert found.joules == pytest.approx(found.multiply_adds * 4.6e-12 + found.synaptic * 0.9e-12)
    assert found.joules < found.dense_joules
    with pytest.raises(ValueError, match="no firing rates of spikformer"):
        energy(analysis(), {"other": 0.5})
    log.write_text("{}\n")
    with pytest.raises(ValueError, match="no line has firing rates"):
        measured_rates(log)


def test_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs, flags = tmp_path / "costs.json", tmp_path / "flags.json"
    write(analysis(), costs)
    model = "spikformer --embed-dim 32 --depth 1 --num-heads 2 --image-size 16 --time-steps 2".split()
    sizes = "--micro-batch-size 4 --global-batch-size 16 --gpus 4 --device-name cpu-core".split()
    files = ["--costs", str(costs), "--output", str(flags), "--json", str(tmp_path / "plan.json")]
    main([*model, *sizes, *files, "--memory=2GB", "--picture", str(tmp_path / "plan.png")])
    said = capsys.readouterr().out
    assert "plan for 4 x cpu-core" in said and "of 2.00 GB" in said and f"--config {flags}" in said
    assert json.loads((tmp_path / "plan.json").read_text())["candidates"][0]["reason"] == ""
    assert (tmp_path / "plan.png").exists() and (tmp_path / "plan-ranks.svg").exists()
    main([*model, *sizes, *files[:2], "--no-measure"])
    assert "run it: --output FILE writes the configuration" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--memory 'much' is no size with a unit"):
        main([*model, "--memory", "much"])
    with pytest.raises(ValueError, match="name a model first: spikformer"):
        main(["--gpus", "2"])
    with pytest.raises(ConfigError, match="--gpus must be at least 1, got 0"):
        main([*model, "--gpus", "0"])
