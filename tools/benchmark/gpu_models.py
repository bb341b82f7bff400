"""The check of a GPU, both models beside SpikingJelly's own with each of its kernels, in every precision."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from megasnn.models.vgg_dvs.dimensions import VggDvs
from megasnn.parallel_state import destroy_model_parallel, initialize_model_parallel
from tools.benchmark.gpu import Figure, Setting
from tools.benchmark.gpu_step import WARM_UP, models
from tools.benchmark.harness import say
from tools.benchmark.layouts import measure
from tools.benchmark.layouts_flags import LayoutBenchmark
from tools.benchmark.layouts_rows import MEGASNN, SPIKINGJELLY
from tools.benchmark.ranks import RankError
from tools.benchmark.training_steps import Precision, SpikingJellyStep, TrainingStep, megasnn_step

JELLIES = tuple(f"{SPIKINGJELLY}-{kernels}" for kernels in ("torch", "triton", "cuda"))
LEAST_FASTER = {"spikformer_ti 224": 1.5, "vgg_dvs 48": 1.3}
MOST_MEMORY = 0.5
LEAST_BF16 = 1.3  # x tf32
LEAST_SPLIT = 2.0  # x IEEE, on a GPU for data centres
LEAST_ELSEWHERE = 2.5  # x SpikingJelly, in all that is neither a convolution nor a product
PRODUCTS = re.compile(
    r"conv|gem[mv]|nvjet|splitk|winograd|xmma|cutlass|fprop|dgrad|wgrad|(?:^|::)(?:add|b)?mm\b", re.IGNORECASE
)
DATA_CENTRE = re.compile(r"\b(A100|A800|H100|H800|H200|GH200|B200|GB200|B300)")

Lines = Mapping[str, Mapping[str, Any]]


def beside_spikingjelly(setting: Setting) -> Iterator[Figure]:
    """Whole steps at equal precision, side by side in one run: throughput and peak memory."""
    for name in models(setting):
        tf32: Lines = {}
        jellies = (SPIKINGJELLY,) if setting.is_tiny else JELLIES
        for precision in ("fp32", "bf16") if setting.is_tiny else ("tf32", "bf16"):
            lines = _measured(setting, name, precision, (*jellies, MEGASNN))
            tf32, jellies = tf32 or lines, tuple(row for row in jellies if row in lines)
            yield from _compared(setting, name, precision, lines)
            if precision == "bf16" and MEGASNN in tf32:
                least = LEAST_BF16 if setting.has_targets else None
                yield Figure(
                    f"{name}: bf16 against {'fp32' if setting.is_tiny else 'tf32'}", _gain(lines, tf32), "x", least
                )


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
    least = LEAST_FASTER[name] if setting.has_targets else None
    yield Figure(f"{name} {precision}: against SpikingJelly's fastest", gain, "x", least, note=best)
    smallest = min(line["memory_mb"]["largest"] for line in others.values())
    if smallest > 0:
        most = MOST_MEMORY if setting.has_targets else None
        share = ours["memory_mb"]["largest"] / smallest
        yield Figure(f"{name} {precision}: peak memory against SpikingJelly's least", share, "x", most=most)


def of_fp32(setting: Setting) -> Iterator[Figure]:
    """Products of fp32 as they are, split for tensor cores, and as measured. On a CPU, where none is split, as they
    are."""
    gpu = torch.cuda.get_device_name(setting.device) if setting.device.type == "cuda" else ""
    for name in models(setting):
        ways = ("ieee", "split", "auto") if gpu else ("ieee",)
        lines = {way: _measured(setting, name, "fp32", (MEGASNN,), way) for way in ways}
        for way, line in lines.items():
            yield Figure(f"{name} fp32 {way}", line[MEGASNN]["step_ms"]["median"], "ms")
        if gpu:
            least = LEAST_SPLIT if setting.has_targets and DATA_CENTRE.search(gpu) else None
            yield Figure(f"{name}: fp32 split against IEEE", _gain(lines["split"], lines["ieee"]), "x")
            yield Figure(f"{name}: fp32 auto against IEEE", _gain(lines["auto"], lines["ieee"]), "x", least)


def _gain(lines: Lines, other: Lines) -> float:
    return other[MEGASNN]["step_ms"]["median"] / lines[MEGASNN]["step_ms"]["median"]


def _measured(
    setting: Setting, name: str, precision: str, rows: tuple[str, ...], fp32_products: str = "auto"
) -> dict[str, Mapping[str, Any]]:
    """The lines of the benchmark by row, without SpikingJelly's rows that do not run here."""
    while True:
        flags: Any = dict(
            _model(setting, name),
            rows=rows,
            precision=precision,
            fp32_products=fp32_products,
            device=setting.name,
            global_batch_size=models(setting)[name][1],
            rounds=1 if setting.is_tiny else 3,
            steps=1 if setting.is_tiny else 5,
            warmup=1 if setting.is_tiny else 3,
            timeout=120.0,
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
            rows = tuple(row for row in rows if row not in broken)
            continue
        return {figures["row"]: figures for figures in part.rows}


def _model(setting: Setting, name: str) -> dict[str, Any]:
    model, _ = models(setting)[name]
    if isinstance(model, VggDvs):
        return {"model": "cifar10_dvs_vgg", "channels": model.channels, "image_size": model.image_size}
    sizes = ("image_size", "embed_dim", "depth", "num_heads", "patch_size")
    return {"model": "spikformer_ti", **{size: getattr(model, size) for size in sizes}}


def elsewhere(setting: Setting) -> Iterator[Figure]:
    """The time that a step spends in all that is neither a convolution nor a product of matrices, in bf16."""
    for name, (model, samples) in models(setting).items():
        initialize_model_parallel(device=setting.device)
        try:
            jelly = _outside_products(SpikingJellyStep(model, samples, "bf16", setting.device), setting)
            step = megasnn_step(model, samples, samples, "bf16", "auto")
            with closing(step.engine):
                ours = _outside_products(step, setting)
        finally:
            destroy_model_parallel()
        yield Figure(f"{name} bf16: outside of products, SpikingJelly", 1e3 * jelly, "ms")
        yield Figure(f"{name} bf16: outside of products", 1e3 * ours, "ms")
        least = LEAST_ELSEWHERE if setting.has_targets else None
        yield Figure(f"{name} bf16: outside of products, against SpikingJelly", jelly / ours, "x", least)


def _outside_products(step: TrainingStep, setting: Setting, precision: Precision = "bf16") -> float:
    """Seconds of kernels on a GPU; on a CPU of operators, without those that they call."""
    for _ in range(WARM_UP):
        step.forward_backward()
    setting.wait()
    is_gpu = setting.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU]) as trace:
        step.forward_backward()
        setting.wait()
    spent = {
        each.key: each.self_device_time_total if is_gpu else each.self_cpu_time_total for each in trace.key_averages()
    }
    if not any(PRODUCTS.search(name) for name in spent):
        raise RuntimeError(f"no convolution among {', '.join(spent)}")
    return 1e-6 * sum(microseconds for name, microseconds in spent.items() if not PRODUCTS.search(name))
