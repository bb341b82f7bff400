"""The measurements of a GPU: tiny steps on a CPU, the analysis of made-up GPU profiles, and parts that fail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent, FunctionEventAvg

from tools import check_gpu
from tools.check_gpu import PARTS, Figure, launches_and_waits, longest_operators, main

TINY = ["--device", "cpu", "--tiny"]


def lines_of(log: Path) -> list[dict]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_all_parts_run_on_a_cpu(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert main([*TINY, "--output", str(log)]) == 0
    lines = lines_of(log)
    assert [line["part"] for line in lines] == list(PARTS)
    for line in lines[1:]:
        names = [figure["name"].split()[0] for figure in line["figures"]]
        assert names[:3] == ["step", "throughput", "operator"]
        assert all(figure["value"] > 0 for figure in line["figures"])


def events_of_a_step(waits: int) -> list[FunctionEvent]:
    """Two launches of an operator, kernels that overlap by 10 us, an annotation around them, and waits of 5 us."""
    host = [("aten::mm", 0, 60), ("cudaLaunchKernel", 10, 20), ("cuLaunchKernelEx", 30, 40)]
    host += [("cudaStreamSynchronize", 100 + 10 * number, 105 + 10 * number) for number in range(waits)]
    device = [("gemm", 20, 50), ("gemm", 40, 80), ("Memcpy HtoD", 90, 95)]
    events: list[FunctionEvent] = []
    for name, start, end in host:
        events.append(FunctionEvent(len(events), name, 0, start, end))
    for name, start, end in device:
        events.append(FunctionEvent(len(events), name, 0, start, end, device_type=DeviceType.CUDA))
    annotation = FunctionEvent(len(events), "0F0", 0, 0, 500, device_type=DeviceType.CUDA, is_user_annotation=True)
    return [*events, annotation]


def test_launches_waits_and_times_of_a_profile() -> None:
    figures = {figure.name: figure for figure in launches_and_waits(events_of_a_step(waits=2))}
    assert figures["launches"].value == 2
    assert figures["waits of the host"].value == 2 and figures["waits of the host"].is_met
    assert figures["device busy"].value == pytest.approx(0.065)
    assert figures["host busy"].value == pytest.approx(0.115 - 0.010)
    assert figures["kernel gemm"].value == pytest.approx(0.070) and figures["kernel gemm"].note == "2 x, 93.3%"
    assert not any("0F0" in name for name in figures)


def average(name: str, microseconds: int) -> FunctionEventAvg:
    """Two events of a name."""
    events = FunctionEventAvg()
    events.key = name
    events.count = 2
    events.self_device_time_total = microseconds
    return events


def test_operators_of_a_profile() -> None:
    """Two products in 50 us together, and an operator without a kernel."""
    product = average("aten::mm", 50)
    view = average("aten::view", 0)
    kernel = average("gemm", 50)
    product.input_shapes = [[100, 1000], [1000, 500], []]
    product.flops = 2 * 2 * 100 * 1000 * 500
    kernel.device_type = DeviceType.CUDA
    (figure,) = longest_operators([kernel, view, product], torch.device("cuda"))
    assert figure.name == "operator aten::mm 100x1000 1000x500" and figure.value == pytest.approx(0.050)
    assert figure.note == "2 x 25 us; 4.00 TFLOP/s"


def test_too_many_waits_miss_their_target() -> None:
    figures = {figure.name: figure for figure in launches_and_waits(events_of_a_step(waits=4))}
    assert not figures["waits of the host"].is_met
    assert not Figure("", float("nan"), most=1.0).is_met


def test_a_part_that_fails_is_a_row_with_its_traceback(tmp_path: Path) -> None:
    def broken(device: torch.device, tiny: bool) -> Iterator[Figure]:
        yield Figure("before", 1.0)
        raise RuntimeError("no kernel image")

    log = tmp_path / "log"
    with mock.patch.dict(PARTS, {"step": broken}):
        assert main([*TINY, "--parts", "step", "versions", "--output", str(log)]) == 1
    step, versions = lines_of(log)
    assert [figure["name"] for figure in step["figures"]] == ["before"]
    assert "RuntimeError: no kernel image" in step["error"]
    assert versions["figures"] and not versions["error"]


def test_without_a_gpu_nothing_is_measured(tmp_path: Path) -> None:
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        assert main(["--output", str(tmp_path / "log")]) == check_gpu.NO_GPU
    assert not (tmp_path / "log").exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_meets_all_targets(tmp_path: Path) -> None:
    assert main(["--output", str(tmp_path / "log")]) == 0
