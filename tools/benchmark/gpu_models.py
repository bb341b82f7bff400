"""The check of a GPU, both models beside SpikingJelly's own with each of its kernels, in every precision."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

from torch.profiler import ProfilerActivity, profile

from megasnn.models.vgg_dvs.dimensions import VggDvs
from megasnn.parallel_state import destroy_model_parallel, initialize_model_parallel
from tools.benchmark.gpu import Figure, Setting
from tools.benchmark.gpu_step import WARM_UP, model_of
from tools.benchmark.gpu_units import last_error
from tools.benchmark.harness import say
from tools.benchmark.layouts import measure
from tools.benchmark.layouts_flags import LayoutBenchmark
from tools.benchmark.layouts_rows import MEGASNN, SPIKINGJELLY
from tools.benchmark.ranks import RankError
from tools.benchmark.training_steps import SpikingJellyStep, TrainingStep, megasnn_step

JELLIES = tuple(f"{SPIKINGJELLY}-{kernels}" for kernels in ("torch", "triton", "cuda"))
LEAST_FASTER = {"spikformer_ti 224": 1.5, "vgg_dvs 48": 1.3}
MOST_MEMORY = 0.5
LEAST_BF16 = 1.3  # x tf32
LEAST_ELSEWHERE = 2.5  # x SpikingJelly, in all that is neither a convolution nor a product
PRODUCTS = re.compile(
    r"conv|gem[mv]|nvjet|splitk|winograd|xmma|cutlass|fprop|dgrad|wgrad|(?:^|::)(?:add|b)?mm\b", re.IGNORECASE
)

Lines = Mapping[str, Mapping[str, Any]]


def beside_spikingjelly(setting: Setting, name: str) -> Iterator[Figure]:
    """Whole steps at equal precision, side by side in one run: throughput and peak memory."""
    first, second = ("fp32", "bf16") if setting.is_tiny else ("tf32", "bf16")
    jellies = (SPIKINGJELLY,) if setting.is_tiny else JELLIES
    lines: dict[str, Lines] = {}
    for precision in (first, second):
        dropped: dict[str, str] = {}
        found = lines[precision] = _measured(setting, name, precision, (*jellies, MEGASNN), dropped)
        jellies = tuple(row for row in jellies if row in found)
        for row, why in dropped.items():
            yield Figure(f"{name} {precision}: {row}", None, note=f"does not run here: {why}")
        yield from _compared(setting, name, precision, found)
    gain = _gain(lines[second], lines[first])
    yield Figure(f"{name}: {second} against {first}", gain, "x", setting.target(LEAST_BF16))


def _compared(setting: Setting, name: str, precision: str, lines: Lines) -> Iterator[Figure]:
    ours = lines[MEGASNN]
    samples = f"{ours['samples']} samples"
    for row, line in lines.items():
        yield Figure(f"{name} {precision}: {row}", line["step_ms"]["median"], "ms", note=samples)
        yield Figure(f"{name} {precision}: {row}, peak", line["memory_mb"]["largest"], "MB", note=samples)
    others = {row: line for row, line in lines.items() if row != MEGASNN}
    if not others:
        raise RuntimeError(f"{name} {precision}: SpikingJelly runs with none of {', '.join(JELLIES)}")
    best = min(others, key=lambda row: others[row]["step_ms"]["median"])
    gain = others[best]["step_ms"]["median"] / ours["step_ms"]["median"]
    least = setting.target(LEAST_FASTER[name])
    yield Figure(f"{name} {precision}: against SpikingJelly's fastest", gain, "x", least, note=best)
    smallest = min(line["memory_mb"]["largest"] for line in others.values())
    if smallest > 0:
        share, most = ours["memory_mb"]["largest"] / smallest, setting.target(MOST_MEMORY)
        yield Figure(f"{name} {precision}: peak memory against SpikingJelly's least", share, "x", most=most)


def of_fp32(setting: Setting, name: str) -> Iterator[Figure]:
    """Time of a step in fp32."""
    line = _measured(setting, name, "fp32", (MEGASNN,), {})[MEGASNN]
    yield Figure(f"{name} fp32", line["step_ms"]["median"], "ms")


def _gain(lines: Lines, other: Lines) -> float:
    gain: float = other[MEGASNN]["step_ms"]["median"] / lines[MEGASNN]["step_ms"]["median"]
    return gain


def _measured(
    setting: Setting,
    name: str,
    precision: str,
    rows: tuple[str, ...],
    dropped: dict[str, str],
) -> dict[str, Mapping[str, Any]]:
    """The lines of the benchmark by row, without SpikingJelly's rows that do not run here.

    Args:
        dropped: is given why each of those does not.
    """
    while True:
        flags: Any = dict(
            _model(setting, name),
            rows=rows,
            precision=precision,
            device=setting.name,
            global_batch_size=model_of(setting, name)[1],
            rounds=1 if setting.is_tiny else 3,
            steps=1 if setting.is_tiny else 5,
            warmup=1 if setting.is_tiny else 3,
            timeout=100.0,
        )
        benchmark = LayoutBenchmark(**flags)
        benchmark.check()
        try:
            (part,) = measure(benchmark)
        except RankError as error:
            broken = [row for row in rows if f"row {row} failed" in str(error) and row != MEGASNN]
            if not broken:
                raise
            say(f"left out: {error}")
            dropped.update(dict.fromkeys(broken, last_error(str(error))))
            rows = tuple(row for row in rows if row not in broken)
            continue
        return {figures["row"]: figures for figures in part.rows}


def _model(setting: Setting, name: str) -> dict[str, Any]:
    model, _ = model_of(setting, name)
    if isinstance(model, VggDvs):
        return {"model": "cifar10_dvs_vgg", "channels": model.channels, "image_size": model.image_size}
    sizes = ("image_size", "embed_dim", "depth", "num_heads", "patch_size")
    return {"model": "spikformer_ti", **{size: getattr(model, size) for size in sizes}}


def elsewhere(setting: Setting, name: str) -> Iterator[Figure]:
    """The time that a step spends in all that is neither a convolution nor a product of matrices, in bf16."""
    model, samples = model_of(setting, name)
    initialize_model_parallel(device=setting.device)
    try:
        jelly = _outside_products(SpikingJellyStep(model, samples, "bf16", setting.device), setting)
        yield Figure(f"{name} bf16: outside of products, SpikingJelly", 1e3 * jelly, "ms")
        step = megasnn_step(model, samples, samples, "bf16", "auto")
        with closing(step.engine):
            ours = _outside_products(step, setting)
    finally:
        destroy_model_parallel()
    yield Figure(f"{name} bf16: outside of products", 1e3 * ours, "ms")
    least = setting.target(LEAST_ELSEWHERE)
    yield Figure(f"{name} bf16: outside of products, against SpikingJelly", jelly / ours, "x", least)


def _outside_products(step: TrainingStep, setting: Setting) -> float:
    """Seconds of kernels on a GPU; on a CPU of operators, without those that they call."""
    for _ in range(WARM_UP):
        step.forward_backward()
    setting.wait()
    is_gpu = setting.is_gpu
    with profile(activities=[ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU]) as trace:
        step.forward_backward()
        setting.wait()
    spent = {
        each.key: each.self_device_time_total if is_gpu else each.self_cpu_time_total for each in trace.key_averages()
    }
    if not any(PRODUCTS.search(name) for name in spent):
        raise RuntimeError(f"no convolution among {', '.join(spent)}")
    return 1e-6 * sum(microseconds for name, microseconds in spent.items() if not PRODUCTS.search(name))
