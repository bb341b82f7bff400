"""The check of a GPU, a step of both models: what the host waits for, what is started, and how much memory it takes."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from statistics import median

import torch

from megasnn.layers import ConvNormNeuron
from megasnn.models.spikformer.dimensions import Spikformer
from megasnn.models.vgg_dvs.dimensions import VggDvs
from megasnn.parallel_state import destroy_model_parallel, initialize_model_parallel
from megasnn.telemetry.memory import peak_memory_mb, reset_peak_memory
from megasnn.telemetry.reporter import Reporter, RunOutline
from megasnn.training.memory import TRIAL_SECONDS, MemoryForecast, forecast_memory, step_peak
from tools.benchmark.gpu import Figure, Setting
from tools.benchmark.gpu_launches import Direction, launches
from tools.benchmark.models import Dimensions, tiny
from tools.benchmark.training_steps import CudaGraphs, MegaSNNStep, counted_peak, megasnn_step

WARM_UP = 3  # with graphs: without them, while they are made, with them
TIMED = 20
WITH_GRAPHS: tuple[CudaGraphs, ...] = ("off", "auto")
MOST_WAITS = 1  # for the loss and what is read with it
MOST_FORWARD, MOST_BACKWARD = 15, 25  # launches of a unit
OUTSIDE_UNITS = {"spikformer_ti 224": 156, "vgg_dvs 48": 71}  # of a micro-batch, counted on tensors without values
CLOSE = 0.95, 1.05  # measured / predicted (docs/memory.md)
FULL: dict[str, tuple[Dimensions, int]] = {
    "spikformer_ti 224": (Spikformer(variant="spikformer_ti", image_size=224), 32),
    "vgg_dvs 48": (VggDvs(), 64),
}
"""The models that are checked, each with samples of a micro-batch."""


def model_names(setting: Setting) -> tuple[str, ...]:
    """The cases of a part that measures models."""
    return tuple(FULL)


def model_of(setting: Setting, name: str) -> tuple[Dimensions, int]:
    """Dimensions, and samples of a micro-batch."""
    model, samples = FULL[name]
    return (tiny(model), 2) if setting.is_tiny else (model, samples)


@contextmanager
def trained(setting: Setting, name: str, cuda_graphs: CudaGraphs = "off") -> Iterator[MegaSNNStep]:
    """In bfloat16, after some steps."""
    model, samples = model_of(setting, name)
    initialize_model_parallel(device=setting.device)
    try:
        step = megasnn_step(model, samples, samples, "bf16", "auto", cuda_graphs=cuda_graphs)
        with closing(step.engine):
            for _ in range(WARM_UP):
                step.whole()
            setting.wait()
            yield step
    finally:
        destroy_model_parallel()


def waits_and_launches(setting: Setting, name: str) -> Iterator[Figure]:
    """Of a step of one micro-batch; launches of forward and backward, and of the update apart."""
    with trained(setting, name) as step:
        if setting.is_gpu:
            yield waits(step, name)
        units = units_of(step)
        found = launches(step.forward_backward, units, setting)
        bounds: tuple[tuple[Direction, int], ...] = (("forward", MOST_FORWARD), ("backward", MOST_BACKWARD))
        for direction, most in bounds:
            count, where = found.most(direction)
            note = f"{where}, of {len(units)} units of convolution, norm and neurons"
            yield Figure(f"{name}: most launches of a unit {direction}", count, most=setting.target(most), note=note)
        most = len(units) * (MOST_FORWARD + MOST_BACKWARD) + OUTSIDE_UNITS[name]
        note = f"{found.outside} outside of units; the device did {found.done} things"
        yield Figure(f"{name}: launches in a micro-batch", found.total, most=setting.target(most), note=note)
        yield Figure(f"{name}: launches in an update", launches(step.update, {}, setting).total)


def units_of(step: MegaSNNStep) -> dict[str, ConvNormNeuron]:
    """The units of convolution, norm and neurons, by their names."""
    return {
        path: module
        for chunk in step.engine.distributed.chunks.values()
        for name, layer in chunk.named_layers()
        for path, module in layer.named_modules(prefix=name)
        if isinstance(module, ConvNormNeuron)
    }


def waits(step: MegaSNNStep, name: str) -> Figure:
    """What the driver says of each wait in forward, backward and update; of those in backward too, which the threads of
    autograd hand on.

    The driver could also raise at the first one: then there would be one place in place of all, and the one reading
    that a step has would have to be let through.
    """
    torch.set_warn_always(True)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            step.whole()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.set_warn_always(False)
    places = Counter(f"{each.filename}:{each.lineno}" for each in told if "synchroniz" in str(each.message))
    note = "; ".join(f"{place} x {count}" for place, count in places.items())
    return Figure(f"{name}: waits of the host in a step", places.total(), most=MOST_WAITS, note=note)


def graphs(setting: Setting, name: str) -> Iterator[Figure]:
    """Whether CUDA graphs help: a step without them and with them, which a GPU has never run so far; and whether they
    take the memory that a run would have predicted."""
    _, samples = model_of(setting, name)
    times = {}
    for asked in WITH_GRAPHS:
        with trained(setting, name, asked) as step:
            reset_peak_memory(setting.device)
            times[asked] = median(_step_ms(step, setting) for _ in range(1 if setting.is_tiny else TIMED))
            peak = peak_memory_mb(setting.device)
            note = f"bf16, {samples} samples, peak {peak:.0f} MB"
            yield Figure(f"{name}: step, --cuda-graphs {asked}", times[asked], "ms", note=note)
            share = peak / _forecast(step).total
            yield Figure(f"{name}: peak, --cuda-graphs {asked}, measured / predicted", share, "")
    yield Figure(f"{name}: gain by graphs", times["off"] / times["auto"], "x")


def _step_ms(step: MegaSNNStep, setting: Setting) -> float:
    start = time.perf_counter()
    step.whole()
    setting.wait()
    return 1e3 * (time.perf_counter() - start)


def memory(setting: Setting, name: str) -> Iterator[Figure]:
    """What a step needs above weights, gradients and optimizer state, and the peak of all; each beside what a run would
    have predicted before its first step."""
    _, samples = model_of(setting, name)
    least, most = (setting.target(bound) for bound in CLOSE)
    with trained(setting, name) as step:
        engine = step.engine
        predicted = step_peak(engine.config, engine.distributed, engine.plan, engine.state)
        needed = counted_peak(step, setting.device, 1)
        note = f"bf16, {samples} samples; {1e-6 * needed:.0f} MB above what is there between steps"
        share = needed / predicted.total
        yield Figure(f"{name}: need of a step, measured / predicted", share, "", least, most, note)
        forecast = _forecast(step)
        reset_peak_memory(setting.device)
        step.whole()
        setting.wait()
        peak = peak_memory_mb(setting.device)
        yield Figure(f"{name}: peak of a step", peak, "MB", note=f"bf16, {samples} samples")
        # Of a CPU's process the peak holds what the C library keeps of freed memory.
        bounds = (least, most) if setting.is_gpu else (None, None)
        yield Figure(f"{name}: peak, measured / predicted", peak / forecast.total, "", *bounds, str(forecast))


def _forecast(step: MegaSNNStep) -> MemoryForecast:
    """As a run makes it before its first step."""
    engine, reporter = step.engine, Reporter(RunOutline(1, 1), is_writer=False)
    forecasts = forecast_memory(
        engine.config, engine.distributed, engine.steps.optimizer, engine.plan, engine.state, reporter
    )
    if not forecasts:
        raise RuntimeError(f"the layers' memory is not found out within {TRIAL_SECONDS:g} seconds")
    return forecasts[0]
