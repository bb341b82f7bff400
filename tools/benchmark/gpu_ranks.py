"""The check of a GPU, several of them: data and tensor parallelism, and every schedule, beside one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch

from tools.benchmark.gpu import Figure, Setting
from tools.benchmark.layouts import measure
from tools.benchmark.layouts_flags import LayoutBenchmark
from tools.benchmark.layouts_rows import MEGASNN
from tools.benchmark.pipeline import measure as measure_schedules
from tools.benchmark.pipeline_flags import ONE_RANK, SINGLE, PipelineBenchmark


def _ranks(setting: Setting) -> int:
    return torch.cuda.device_count() if setting.device.type == "cuda" else 2


def layouts(setting: Setting) -> Iterator[Figure]:
    """Throughput and memory of two ranks, × one. Nothing with a single GPU."""
    if _ranks(setting) < 2:
        return
    precision: Literal["fp32", "bf16"] = "fp32" if setting.is_tiny else "bf16"
    sizes: dict[str, Any] = (
        {"embed_dim": 32, "depth": 1, "num_heads": 2, "image_size": 32, "global_batch_size": 4}
        if setting.is_tiny
        else {"image_size": 224, "global_batch_size": 64}
    )
    flags = LayoutBenchmark(
        model="spikformer_ti",
        rows=(MEGASNN, "dp2", "tp2"),
        precision=precision,
        device=setting.name,
        rounds=1 if setting.is_tiny else 3,
        **sizes,
    )
    flags.check()
    (part,) = measure(flags)
    for figures in part.rows:
        if figures["row"] != MEGASNN:
            note = f"spikformer_ti, {precision}, {figures['samples']} samples"
            yield Figure(figures["row"], figures["throughput_ratio"][MEGASNN]["median"], "x one rank", note=note)


def schedules(setting: Setting) -> Iterator[Figure]:
    """Throughput of every schedule on two stages, × one rank; its time beside its simulation, and its bubble."""
    if _ranks(setting) < 2:
        return
    few: dict[str, Any] = (
        {"schedules": ("zbv",), "micro_batches": 2, "micro_batch_size": 1, "rounds": 1}
        if setting.is_tiny
        else {"micro_batches": 8, "micro_batch_size": 16, "rounds": 2}
    )
    flags = PipelineBenchmark(models=("spikformer_ti",), stages=2, device=setting.name, timeout=200.0, **few)
    flags.check()
    (part,) = measure_schedules(flags)
    for figures in part.rows:
        name = figures["row"].removeprefix("pipeline ")
        if name not in SINGLE:
            ratio = figures["throughput_ratio"][ONE_RANK]["median"]
            yield Figure(name, ratio, "x one rank", note=f"{figures['schedule']}, layers {figures['layout']}")
            yield Figure(f"{name}, simulated bubble", 100 * figures["simulated_bubble"], "%")
            yield Figure(f"{name}, measured / simulated", figures["ratio_to_simulated"]["median"])
