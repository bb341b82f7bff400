"""The check of a GPU, several of them: data and tensor parallelism, and every schedule, beside one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from tools.benchmark.gpu import Figure, Setting
from tools.benchmark.layouts import measure
from tools.benchmark.layouts_flags import LayoutBenchmark
from tools.benchmark.layouts_rows import MEGASNN
from tools.benchmark.pipeline import measure as measure_schedules
from tools.benchmark.pipeline_flags import ONE_RANK, SINGLE, PipelineBenchmark

TWO_GPUS = "two GPUs"
MOST_RANKS, MOST_STAGES = 8, 4  # the model has 14 layers, and some schedules two chunks a stage


def numbers_of_ranks(setting: Setting) -> tuple[str, ...]:
    """Cases: two, and the largest power of two that there are GPUs for."""
    return _numbers(min(setting.gpus, MOST_RANKS))


def numbers_of_stages(setting: Setting) -> tuple[str, ...]:
    """The same of a pipeline."""
    return _numbers(min(setting.gpus, MOST_STAGES))


def _numbers(most: int) -> tuple[str, ...]:
    largest = 1 << most.bit_length() - 1
    return tuple(f"{each} ranks" for each in sorted({2, largest}) if 2 <= each <= most)


def layouts(setting: Setting, case: str) -> Iterator[Figure]:
    """Throughput of so many ranks, x one."""
    ranks = int(case.split()[0])
    precision: Literal["fp32", "bf16"] = "fp32" if setting.is_tiny else "bf16"
    sizes: dict[str, Any] = (
        {"embed_dim": 32, "depth": 1, "num_heads": 2, "image_size": 32, "global_batch_size": 4}
        if setting.is_tiny
        else {"image_size": 224, "global_batch_size": 32 * ranks}
    )
    mixed = (f"dp{ranks // 2}tp2",) if ranks > 2 else ()
    flags = LayoutBenchmark(
        model="spikformer_ti",
        rows=(MEGASNN, f"dp{ranks}", f"tp{ranks}", *mixed),
        precision=precision,
        device=setting.name,
        rounds=1 if setting.is_tiny else 3,
        timeout=100.0,
        **sizes,
    )
    flags.check()
    (part,) = measure(flags)
    for figures in part.rows:
        if figures["row"] != MEGASNN:
            note = f"spikformer_ti, {precision}, {figures['samples']} samples"
            yield Figure(figures["row"], figures["throughput_ratio"][MEGASNN]["median"], "x one rank", note=note)


def schedules(setting: Setting, case: str) -> Iterator[Figure]:
    """Throughput of every schedule on so many stages, x one rank; its time beside its simulation, and its bubble."""
    stages = int(case.split()[0])
    few: dict[str, Any] = (
        {"schedules": ("zbv",), "micro_batches": 2, "micro_batch_size": 1, "rounds": 1}
        if setting.is_tiny
        else {"micro_batches": 4 * stages, "micro_batch_size": 16, "rounds": 2}
    )
    flags = PipelineBenchmark(models=("spikformer_ti",), stages=stages, device=setting.name, timeout=100.0, **few)
    flags.check()
    (part,) = measure_schedules(flags)
    for figures in part.rows:
        name = figures["row"].removeprefix("pipeline ")
        if name not in SINGLE:
            ratio = figures["throughput_ratio"][ONE_RANK]["median"]
            note = f"{figures['schedule']}, layers {figures['layout']}"
            yield Figure(f"{name}, {case}", ratio, "x one rank", note=note)
            yield Figure(f"{name}, {case}: simulated bubble", 100 * figures["simulated_bubble"], "%")
            yield Figure(f"{name}, {case}: measured / simulated", figures["ratio_to_simulated"]["median"])
