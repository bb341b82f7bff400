"""What the check of a GPU finds: wrong kernels, waits, launches, rows of SpikingJelly that do not run, products."""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import DeviceType

from megasnn.kernels import BACKENDS
from megasnn.kernels.codec import pack_bits, unpack_bits
from megasnn.kernels.compared_products import Comparison, compare
from megasnn.kernels.philox import kept
from megasnn.kernels.products import LayerShape
from tests.kernels.triton_process import without_triton
from tools.benchmark import gpu_kernels, gpu_models, gpu_products, gpu_ranks, gpu_speeds
from tools.benchmark.gpu import MISSED, PASSED, Figure, Outcome, Setting, table_of
from tools.benchmark.gpu_kernels import error_of
from tools.benchmark.gpu_launches import OUTSIDE, by_unit, launches
from tools.benchmark.gpu_step import MOST_BACKWARD, MOST_FORWARD, OUTSIDE_UNITS, trained, units_of, waits
from tools.benchmark.harness import Part as Measured
from tools.benchmark.layouts_flags import LayoutBenchmark
from tools.benchmark.ranks import RankError

TINY = Setting(torch.device("cpu"), is_tiny=True)
GPU = Setting(torch.device("cuda", 0))


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


def wrong_at_first(compute: Any) -> Any:
    """The first of what it gives has one value that is another."""
    given: list[Tensor] = []

    def run(*args: Any, **options: Any) -> Tensor:
        found = compute(*args, **options).clone()
        if not given:
            found.view(-1)[-1] = found.view(-1)[-1] == 0
        given.append(found)
        return found

    return run


def inexact(shape: LayerShape, *args: Any) -> Comparison:
    found = compare(shape, *args)
    return replace(found, at_once=replace(found.plain, mean=1.6 * found.plain.mean))


@pytest.mark.parametrize(
    ("name", "wrong", "missed"),
    [
        ("unpack_bits", wrong_at_first(unpack_bits), "bits and bytes that are not exact"),
        ("pack_bits", lambda x, check=False: pack_bits(x), "values that no format holds, and that were taken"),
        ("kept", wrong_at_first(kept), "random choices of dropout that differ"),
        ("compare", inexact, "fp32 split in one pass: error, x IEEE's"),
    ],
)
@pytest.mark.usefixtures("products_of_before")
def test_what_is_not_exact_is_found(monkeypatch, name: str, wrong: Any, missed: str) -> None:
    monkeypatch.setattr(gpu_products, name, wrong)
    assert [each.name for each in gpu_products.exactness(TINY) if each.is_met is False] == [missed]


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

    def whole(self) -> None:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
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
        after = launches(lambda: (step.forward_backward(), [torch.ones(1).neg() for _ in range(50)]), units, TINY)
    assert after.most("forward")[1] == name and after.forward[name] >= before.forward[name] + 100
    assert len(units) == len(before.forward) - 1
    assert {each: after.backward[each] for each in units} == {each: before.backward[each] for each in units}
    assert after.outside >= before.outside + 50, "the first unit ends, although its input has no gradient"


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
