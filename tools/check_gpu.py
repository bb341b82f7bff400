"""Measure training steps on a GPU: versions, kernel launches, waits of the host, and times.

    python tools/check_gpu.py
    python tools/check_gpu.py --parts versions step

`pytest -m gpu` checks that results are exact. Each part appends a JSON line to --output, with the traceback if it
failed. The exit status is 0 if every target is met, 1 if one is missed or a part failed, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import timeit
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent, FunctionEventAvg
from torch.profiler import ProfilerActivity, profile

from megasnn.engine import Engine
from megasnn.models.model import Model
from megasnn.models.spikformer.model import Spikformer
from megasnn.models.vgg_dvs.model import VggDvs

OUTPUT = Path(__file__).resolve().parents[1] / "runs" / "check_gpu.jsonl"
WARM_UP = 4
TIMED = 10
LISTED = 25  # rows of each ranking
NO_GPU = 2
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


@dataclass(frozen=True)
class Figure:
    """A measured value. `most` is its target, an upper bound; None if it has none."""

    name: str
    value: float
    unit: str = ""
    most: float | None = None
    note: str = ""

    @property
    def is_met(self) -> bool:
        # False for NaN.
        return self.most is None or self.value <= self.most


def versions(device: torch.device, tiny: bool) -> Iterator[Figure]:
    """Versions of the software and properties of the GPU."""
    yield Figure("torch", float(".".join(torch.__version__.split(".")[:2])), note=torch.__version__)
    if device.type != "cuda":
        return
    import triton

    properties = torch.cuda.get_device_properties(device)
    yield Figure("compute capability", properties.major + properties.minor / 10, note=properties.name)
    yield Figure("memory", properties.total_memory / 1e9, "GB", note=f"CUDA {torch.version.cuda}")
    yield Figure("cuDNN", torch.backends.cudnn.version() or 0, note=f"triton {triton.__version__}")
    yield Figure("copy", _copy_bandwidth(device) / 1e9, "GB/s", note="256 MiB, read and written")


def _copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, from the median of 20 copies after one to warm up."""
    source = torch.empty(2**28, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(21):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize(device)
        seconds.append(1e-3 * begin.elapsed_time(end))
    return 2 * source.nbytes / median(seconds[1:])


def spikformer(tiny: bool) -> tuple[Model, int]:
    """Spikformer-8-512 for ImageNet (224 pixels, T 4), and the batch size of its recipe."""
    if tiny:
        return Spikformer(embed_dim=32, depth=1, num_heads=2, patch_size=4, image_size=16), 2
    return Spikformer(embed_dim=512, depth=8, num_heads=8, patch_size=16, image_size=224, num_classes=1000), 24


def vgg(tiny: bool) -> tuple[Model, int]:
    """CIFAR10DVSVGG (48 pixels, T 10), and the batch size of its published times."""
    if tiny:
        return VggDvs(channels="8,P,16,P", image_size=16, time_steps=4), 2
    return VggDvs(), 128


def step(device: torch.device, model: Model, samples: int, graphs: str) -> Iterator[Figure]:
    """Time, memory, launches and waits of a step in bfloat16 with one micro-batch."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(samples, *model.input_shape, generator=generator)
    labels = torch.randint(0, model.num_classes, (samples,), generator=generator)
    options: dict[str, Any] = {"micro_batch_size": samples, "global_batch_size": samples, "train_iters": 10**6}
    with Engine(model, device=device.type, precision="bf16", cuda_graphs=graphs, **options) as engine:

        def run() -> None:
            engine.train_step(images, labels)
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        for _ in range(WARM_UP):
            run()
        times = [timeit.timeit(run, number=1) for _ in range(TIMED)]
        note = f"bf16, {samples} samples, graphs {graphs}; fastest {1e3 * min(times):.1f} ms"
        yield Figure("step", 1e3 * median(times), "ms", note=note)
        yield Figure("throughput", samples / median(times), "samples/s")
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            run()
            yield Figure("peak memory", torch.cuda.max_memory_allocated(device) / 1e6, "MB")
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities, record_shapes=True, with_flops=True) as trace:
            run()
        yield from launches_and_waits(trace.events())
        yield from longest_operators(trace.key_averages(group_by_input_shape=True), device)


def launches_and_waits(events: Iterable[FunctionEvent]) -> Iterator[Figure]:
    """Launches and waits of the host, device time beside host time, and the longest kernels; nothing without a GPU."""
    # Annotations appear on the device as well, around their kernels.
    on_device = [e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    on_host = [e for e in events if e.device_type == DeviceType.CPU]
    if not on_device:
        return
    launches = sum(is_launch(e.name) for e in on_host)
    yield Figure("launches", launches, note=f"{len(on_device)} kernels and copies on the device")
    waits = [e for e in on_host if e.name in WAITS]
    note = "one for the loss, two of this measurement: at the end of the step and of the profile"
    yield Figure("waits of the host", len(waits), most=3, note=note)
    yield Figure("device busy", 1e-3 * busy_us(on_device), "ms")
    # Python runs between the recorded calls, so that the host is busy whenever it does not wait.
    span_us = max(e.time_range.end for e in on_host) - min(e.time_range.start for e in on_host)
    waiting_us = sum(wait.time_range.elapsed_us() for wait in waits)
    yield Figure("host busy", 1e-3 * (span_us - waiting_us), "ms", note="under the profiler")
    yield from _longest_kernels(on_device)


def is_launch(name: str) -> bool:
    """Whether a call of the CUDA runtime or driver starts a kernel or a graph."""
    return "LaunchKernel" in name or name == "cudaGraphLaunch"


def busy_us(events: Iterable[FunctionEvent]) -> float:
    """Length of the union of the events' time ranges."""
    end = 0.0
    total = 0.0
    for event in sorted(events, key=lambda event: event.time_range.start):
        begin = max(event.time_range.start, end)
        total += max(0.0, event.time_range.end - begin)
        end = max(end, event.time_range.end)
    return total


def _longest_kernels(kernels: Sequence[FunctionEvent]) -> Iterator[Figure]:
    durations: dict[str, list[float]] = {}
    for kernel in kernels:
        durations.setdefault(kernel.name, []).append(kernel.time_range.elapsed_us())
    total = sum(kernel.time_range.elapsed_us() for kernel in kernels)
    for name, times in sorted(durations.items(), key=lambda item: -sum(item[1]))[:LISTED]:
        note = f"{len(times)} x, {sum(times) / total:.1%}"
        yield Figure(f"kernel {name[:90]}", 1e-3 * sum(times), "ms", note=note)


def longest_operators(averages: Iterable[FunctionEventAvg], device: torch.device) -> Iterator[Figure]:
    """Operators with their shapes, by their own time on the device."""
    own_us = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    operators = [each for each in averages if each.device_type == DeviceType.CPU and getattr(each, own_us) > 0]
    for each in sorted(operators, key=lambda each: -getattr(each, own_us))[:LISTED]:
        seconds = 1e-6 * getattr(each, own_us)
        shapes = " ".join("x".join(map(str, shape)) for shape in each.input_shapes or () if shape)
        note = f"{each.count} x {1e6 * seconds / each.count:.0f} us"
        if each.flops:
            note += f"; {each.flops / seconds / 1e12:.2f} TFLOP/s"
        yield Figure(f"operator {each.key} {shapes}"[:110], 1e3 * seconds, "ms", note=note)


PARTS: dict[str, Callable[[torch.device, bool], Iterator[Figure]]] = {
    "versions": versions,
    "step": lambda device, tiny: step(device, *spikformer(tiny), "off"),
    "graphs": lambda device, tiny: step(device, *spikformer(tiny), "on" if device.type == "cuda" else "off"),
    "vgg": lambda device, tiny: step(device, *vgg(tiny), "off"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run, in this order")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="file to append to")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the program itself")
    parser.add_argument("--tiny", action="store_true", help="small models, to try the program itself")
    flags = parser.parse_args(arguments)
    if flags.device == "cuda" and not torch.cuda.is_available():
        print(
            "torch finds no GPU, so nothing was measured: install a torch built for CUDA on a machine with a GPU, or "
            "use --device cpu --tiny to try the program itself",
            file=sys.stderr,
        )
        return NO_GPU
    flags.output.parent.mkdir(parents=True, exist_ok=True)
    all_met = True
    for part in flags.parts:
        line = run_part(part, torch.device(flags.device), flags.tiny)
        with flags.output.open("a") as file:
            file.write(json.dumps(line) + "\n")
        all_met = all_met and not line["error"] and all(figure["met"] for figure in line["figures"])
        _show(line)
    print(f"\nappended to {flags.output}")
    return 0 if all_met else 1


def run_part(part: str, device: torch.device, tiny: bool) -> dict[str, Any]:
    """Figures and seconds of a part, and the traceback if it failed."""
    figures: list[dict[str, Any]] = []
    error = ""
    begin = time.monotonic()
    try:
        for figure in PARTS[part](device, tiny):
            figures.append({**asdict(figure), "met": figure.is_met})
    except Exception:  # a part that fails is a row, and the next part runs
        error = traceback.format_exc()
    gc.collect()
    torch.cuda.empty_cache()
    seconds = round(time.monotonic() - begin, 1)
    return {"part": part, "time": time.time(), "figures": figures, "error": error, "seconds": seconds}


def _show(line: dict[str, Any]) -> None:
    print(f"\n{line['part']} ({line['seconds']:g} s)")
    for figure in line["figures"]:
        target = ""
        if figure["most"] is not None:
            target = f" <= {figure['most']:g} {'yes' if figure['met'] else 'MISSED'}"
        print(f"  {figure['name']}: {figure['value']:.5g} {figure['unit']}{target}  {figure['note']}".rstrip())
    if line["error"]:
        print("  FAILED: " + line["error"].strip().replace("\n", "\n    "), flush=True)


if __name__ == "__main__":
    sys.exit(main())
