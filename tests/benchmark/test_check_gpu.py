"""The check of a GPU: every part on a CPU, at tiny sizes; what becomes of misses and failures; on a GPU, itself."""

from __future__ import annotations

import json
import os
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import DeviceType

from megasnn.kernels import BACKENDS
from tests.benchmark import gpu_parts
from tests.kernels.triton_process import interpreted as interpreted
from tests.kernels.triton_process import without_triton
from tools import check_gpu
from tools.benchmark import gpu_kernels, gpu_models, gpu_ranks, gpu_speeds
from tools.benchmark.gpu import MISSED, NO_GPU, PASSED, Figure, Outcome, Part, Setting, table_of
from tools.benchmark.gpu_kernels import error_of
from tools.benchmark.gpu_launches import OUTSIDE, by_unit, launches
from tools.benchmark.gpu_step import MOST_BACKWARD, MOST_FORWARD, OUTSIDE_UNITS, trained, units_of, waits
from tools.benchmark.gpu_units import check, last_error, run_parts
from tools.benchmark.harness import Part as Measured
from tools.benchmark.layouts_flags import LayoutBenchmark
from tools.benchmark.ranks import RankError
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
    Setting.target = lambda self, value: value  # type: ignore[method-assign]
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
    assert figures["dp2"] > 0 and figures["zbv, 2 ranks: measured / simulated"] > 0
    assert figures["dp2: error against SpikingJelly, float64"] < 1e-9


# --- kernels that are wrong


class Given(torch.autograd.Function):
    """Hands a tensor on, and makes something of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, of_gradient: Any) -> Tensor:
        ctx.of_gradient = of_gradient
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.of_gradient(grad), None


def flips_one(spikes: Tensor) -> Tensor:
    change, last = torch.zeros_like(spikes), (-1,) * spikes.ndim
    change[last] = 1 - 2 * spikes[last].detach()
    return spikes + change


def scaled(x: Tensor) -> Tensor:
    return Given.apply(x, lambda grad: 1.01 * grad)


def nan(x: Tensor) -> Tensor:
    return Given.apply(x, lambda grad: grad * torch.nan)


def same(x: Tensor) -> Tensor:
    return x


SPIKES = {
    "float64: spikes that differ from the reference",
    "float32: spikes that differ from the reference",
    "float32: spikes that differ from the reference, of given statistics",
    "bfloat16: spikes and potentials that differ from float32's",
    "bfloat16: spikes that differ from the reference, of given statistics",
}
GRADIENTS = {
    "float64: largest error of potentials, statistics and gradients",
    "float32: largest error, x plain PyTorch's",
    "bfloat16: largest error of a gradient",
}


@pytest.mark.parametrize(
    ("of_input", "of_spikes", "missed"),
    [
        (same, same, set()),
        (same, flips_one, SPIKES | {"float32: largest error, x plain PyTorch's"}),
        (scaled, same, GRADIENTS),
        (nan, same, GRADIENTS),
    ],
    ids=["right", "a spike", "a gradient", "nan"],
)
def test_a_wrong_kernel_is_found(monkeypatch, of_input: Any, of_spikes: Any, missed: set[str]) -> None:
    """The reference stands for the kernels, and something of it is wrong."""

    def planted(compute: Any) -> Any:
        def run(x: Tensor, *args: Any, backend: str, **options: Any) -> Any:
            if backend != "tested":
                return compute(x, *args, backend=backend, **options)
            spikes, *others = compute(of_input(x), *args, backend="torch", **options)
            return of_spikes(spikes), *others

        return run

    class Calls:
        def fire(self, *args: Any) -> tuple[Tensor, None]:
            return of_spikes(BACKENDS["torch"].unit_calls().fire(*args)[0]), None

    backends = {"tested": SimpleNamespace(unit_calls=Calls)}
    monkeypatch.setattr(gpu_kernels, "TESTED", "tested")
    monkeypatch.setattr(gpu_kernels, "BACKENDS", backends)
    for name in ("neuron_multi_step", "norm_pool_neuron"):
        monkeypatch.setattr(gpu_kernels, name, planted(getattr(gpu_kernels, name)))
    figures = list(gpu_kernels.errors(TINY))
    assert {each.name for each in figures if each.is_met is False} == missed
    assert Outcome({"kernels": figures}).status == (MISSED if missed else PASSED)


def test_a_kernel_that_gives_nan_is_no_kernel_without_error() -> None:
    """Python's max keeps the first of two numbers that do not compare."""
    expected = torch.tensor([0.5, 2.0])
    assert error_of(torch.tensor([0.5, 2.5]), expected) == 0.25
    assert max(0.0, error_of(torch.tensor([0.5, float("nan")]), expected)) == float("inf")


# --- what is measured


class FakeEvent:
    """Of a device that a copy keeps busy for one unit of time; a call takes the host two and the device three."""

    host = device = 0.0

    def __init__(self, enable_timing: bool) -> None: ...

    def record(self) -> None:
        self.at = max(FakeEvent.device, FakeEvent.host)

    def query(self) -> bool:
        return self.at <= FakeEvent.host

    def synchronize(self) -> None:
        FakeEvent.host = max(FakeEvent.host, self.at)

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at - self.at


@pytest.mark.parametrize("of_host", [0.5, 6.0, 1000.0])
def test_rates_are_the_device_s_and_not_the_host_s(monkeypatch, of_host: float) -> None:
    def on_device(seconds: float, of_host: float) -> None:
        FakeEvent.host += of_host
        FakeEvent.device = max(FakeEvent.device, FakeEvent.host) + seconds

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "host", 0.0)
    monkeypatch.setattr(FakeEvent, "device", 0.0)
    monkeypatch.setattr(Setting, "wait", lambda self: setattr(FakeEvent, "host", max(FakeEvent.host, FakeEvent.device)))

    def measured() -> float:
        return gpu_speeds.seconds_of_call(GPU, lambda: on_device(3.0, of_host), lambda: on_device(1.0, 0.001))

    if of_host == 1000.0:
        with pytest.raises(RuntimeError, match="in more time than the device copies 512 times"):
            measured()
    else:
        assert measured() == pytest.approx(3e-3)


class Waiting:
    """A step as torch warns of one: each wait, in backward too, and in the update."""

    def forward_backward(self) -> float:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
        return 0.0

    def update(self) -> None:
        warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)


def test_every_wait_counts(monkeypatch) -> None:
    """With its place, however often it comes."""
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    found = waits(Waiting(), "model")
    assert found.value == 3 and found.is_met is False and modes == ["warn", "default"]
    first, second = found.note.split("; ")
    assert first.startswith(__file__) and first.endswith(" x 2") and second.endswith(" x 1")
    assert not torch.is_warn_always_enabled()


def event(start: float, name: str, on: DeviceType = DeviceType.CPU, children: int = 0) -> SimpleNamespace:
    time_range = SimpleNamespace(start=start)
    return SimpleNamespace(time_range=time_range, name=name, device_type=on, cpu_children=[None] * children)


def test_launches_belong_to_the_unit_that_runs() -> None:
    events = [
        event(0, "cudaMemcpyAsync"),
        event(1, "launches of forward stem"),
        event(2, "aten::convolution", children=1),
        event(3, "cudaLaunchKernel"),
        event(3.5, "fprop", DeviceType.CUDA),
        event(4, "cuLaunchKernelEx"),
        event(5, f"launches of forward {OUTSIDE}"),
        event(6, "cudaStreamIsCapturing"),
        event(9, "cudaLaunchKernelExC"),
        event(8, "launches of backward stem"),
        event(10, f"launches of backward {OUTSIDE}"),
        event(11, "cudaMemsetAsync"),
    ]
    found = by_unit(events, is_gpu=True)
    assert found.most("forward") == (2, "stem") and found.most("backward") == (1, "stem")
    assert (found.outside, found.total) == (2, 5)
    assert by_unit(events[:4], is_gpu=False).total == 2


@pytest.mark.usefixtures("products_of_before")
def test_a_unit_that_starts_more_is_named() -> None:
    with trained(TINY, "vgg_dvs 48") as step:
        units = units_of(step)
        before, (name, unit) = launches(step.forward_backward, units, TINY), list(units.items())[-1]
        unit.neuron.observer = lambda spikes: [spikes + 1 for _ in range(100)]
        after = launches(step.forward_backward, units, TINY)
    assert after.most("forward")[1] == name and after.forward[name] >= before.forward[name] + 100
    assert after.backward == before.backward and len(units) == len(before.forward) - 1


@without_triton
@pytest.mark.parametrize("name", OUTSIDE_UNITS)
def test_the_bound_of_a_step_is_what_a_gpu_would_be_given(name: str) -> None:
    """Outside of units as counted on tensors without values; a unit has room for what one operator starts more."""
    from megasnn import Engine
    from megasnn.pipeline.step_state import MicroBatchInput
    from tests.fake_gpu import OUTSIDE, fake_gpu
    from tests.kernels.test_counted import units
    from tools.benchmark.gpu_step import FULL

    model, samples = FULL[name]
    flags = {"micro_batch_size": samples, "global_batch_size": samples, "train_iters": 1, "precision": "bf16"}
    with Engine(model, **flags) as engine, fake_gpu({unit: name for name, unit in units(engine)}) as found:
        images, labels = torch.empty(samples, *engine.distributed.model.input_shape), torch.zeros(samples).long()
        engine.distributed.forward_backward([MicroBatchInput(images, labels, samples, range(samples))], samples)
    assert found.forward[OUTSIDE].count + found.backward[OUTSIDE].count == OUTSIDE_UNITS[name]
    for counts, most in ((found.forward, MOST_FORWARD), (found.backward, MOST_BACKWARD)):
        assert max(work.count for unit, work in counts.items() if unit != OUTSIDE) <= most


# --- SpikingJelly, precisions, several GPUs


def test_a_row_that_does_not_run_is_a_row_that_says_why(monkeypatch) -> None:
    """SpikingJelly's kernels for CUDA have to be built, for example."""
    asked: list[tuple[str, ...]] = []

    def measured(flags: LayoutBenchmark) -> list[Measured]:
        asked.append(flags.rows)
        if "spikingjelly-cuda" in flags.rows:
            why = "Traceback (most recent call last):\n  File a, line 1\nRuntimeError: Native operators were not built."
            raise RankError(f"row spikingjelly-cuda failed in start:\nrank 0: {why}")
        ms = {"spikingjelly-torch": 9.0, "spikingjelly-triton": 6.0, "megasnn": 2.0}
        lines = [
            {"row": row, "samples": 2, "step_ms": {"median": ms[row]}, "memory_mb": {"largest": 10 * ms[row]}}
            for row in flags.rows
        ]
        return [Measured(lines)]

    monkeypatch.setattr(gpu_models, "measure", measured)
    figures = list(gpu_models.beside_spikingjelly(Setting(torch.device("cpu")), "vgg_dvs 48"))
    (dropped,) = (each for each in figures if each.value is None)
    assert dropped.name == "vgg_dvs 48 tf32: spikingjelly-cuda" and dropped.is_met is None
    assert dropped.note == "does not run here: RuntimeError: Native operators were not built."
    row = f"jellies: {dropped.name}  -  {dropped.note}"
    assert row.split() in [each.split() for each in table_of(Outcome({"jellies": figures})).split("\n")]
    assert [len(rows) for rows in asked] == [4, 3, 3]
    (gain, _) = (each for each in figures if each.name.endswith("against SpikingJelly's fastest"))
    assert (gain.value, gain.note, gain.is_met) == (3.0, "spikingjelly-triton", True)


def test_without_any_row_of_spikingjelly_the_part_fails(monkeypatch) -> None:
    def measured(flags: LayoutBenchmark) -> list[Measured]:
        for row in flags.rows:
            if row != "megasnn":
                raise RankError(f"row {row} failed in start:\nrank 0: no compiler")
        line = {"row": "megasnn", "samples": 2, "step_ms": {"median": 1.0}, "memory_mb": {"largest": 1.0}}
        return [Measured([line])]

    monkeypatch.setattr(gpu_models, "measure", measured)
    figures: list[Figure] = []
    with pytest.raises(RuntimeError, match="SpikingJelly runs with none of spikingjelly-torch, spikingjelly-triton"):
        figures.extend(gpu_models.beside_spikingjelly(Setting(torch.device("cpu")), "vgg_dvs 48"))


@pytest.mark.parametrize(
    ("times", "gpu", "met"),
    [
        ({"ieee": 4.0, "split": 2.0, "auto": 2.0}, "NVIDIA H100", [True, True]),
        ({"ieee": 4.0, "split": 2.1, "auto": 2.0}, "NVIDIA H100", [False, True]),
        ({"ieee": 4.0, "split": 2.0, "auto": 2.2}, "NVIDIA H100", [True, False]),
        ({"ieee": 4.0, "split": 5.0, "auto": 4.1}, "GeForce RTX 4090", [None, True]),
    ],
)
def test_split_products_are_held_against_ieee(times: dict[str, float], gpu: str, met: list[bool | None]) -> None:
    assert [each.is_met for each in gpu_models.against_ieee("model", times, gpu)] == met


@pytest.mark.parametrize(
    ("gpus", "ranks", "stages"),
    [
        (1, (), ()),
        (2, ("2 ranks",), ("2 ranks",)),
        (3, ("2 ranks",), ("2 ranks",)),
        (4, ("2 ranks", "4 ranks"), ("2 ranks", "4 ranks")),
        (9, ("2 ranks", "8 ranks"), ("2 ranks", "4 ranks")),
    ],
)
def test_how_many_ranks_there_are_gpus_for(monkeypatch, gpus: int, ranks: object, stages: object) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert gpu_ranks.numbers_of_ranks(GPU) == ranks and gpu_ranks.numbers_of_stages(GPU) == stages


def test_a_part_that_needs_more_gpus_says_so() -> None:
    outcome = run_parts({"layouts": Part(gpu_parts.gives, 1.0, lambda setting: (), "two GPUs")}, TINY)
    assert outcome.status == PASSED
    assert table_of(outcome).split("\n")[-1].split() == "layouts: not run  -  needs two GPUs".split()


# --- what breaks is a row


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
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(check_gpu, "check", lambda *args: asked.append(args) or MISSED)
    output = tmp_path / "log.jsonl"
    assert main(["--parts", "step", "kernels", "--output", str(output)]) == MISSED
    assert asked == [({name: PARTS[name] for name in ("step", "kernels")}, GPU, output)]
    assert list(asked[0][0]) == ["step", "kernels"] and not torch.cuda.is_initialized()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(tmp_path: Path) -> None:
    assert main(["--output", str(tmp_path / "log.jsonl")]) == PASSED
