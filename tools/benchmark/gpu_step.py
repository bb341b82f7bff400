"""The check of a GPU, a step of both models: what the host waits for, what is started, and how much memory it takes."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from statistics import median

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from megasnn.layers import ConvNormNeuron
from megasnn.models.spikformer.dimensions import Spikformer
from megasnn.models.vgg_dvs.dimensions import VggDvs
from megasnn.parallel_state import destroy_model_parallel, initialize_model_parallel
from megasnn.telemetry.memory import peak_memory_mb, reset_peak_memory
from megasnn.telemetry.reporter import Reporter, RunOutline
from megasnn.training.memory import forecast_memory
from tools.benchmark.gpu import Figure, Setting
from tools.benchmark.models import Dimensions, tiny
from tools.benchmark.training_steps import CudaGraphs, MegaSNNStep, megasnn_step

WARM_UP = 3  # with graphs: without them, while they are made, with them
TIMED = 20
WITH_GRAPHS: tuple[CudaGraphs, ...] = ("off", "auto")
MOST_WAITS = 1  # for the loss and what is read with it


def models(setting: Setting) -> dict[str, tuple[Dimensions, int]]:
    """The models that are checked, each with samples of a micro-batch."""
    full: dict[str, tuple[Dimensions, int]] = {
        "spikformer_ti 224": (Spikformer(variant="spikformer_ti", image_size=224), 32),
        "vgg_dvs 48": (VggDvs(), 64),
    }
    return {name: (tiny(model), 2) for name, (model, _) in full.items()} if setting.is_tiny else full


@contextmanager
def _trained(
    setting: Setting, model: Dimensions, samples: int, cuda_graphs: CudaGraphs = "off"
) -> Iterator[MegaSNNStep]:
    """In bfloat16, after some steps."""
    initialize_model_parallel(device=setting.device)
    try:
        step = megasnn_step(model, samples, samples, "bf16", "auto", cuda_graphs=cuda_graphs)
        with closing(step.engine):
            for _ in range(WARM_UP):
                step.forward_backward()
                step.update()
            setting.wait()
            yield step
    finally:
        destroy_model_parallel()


def waits_and_launches(setting: Setting) -> Iterator[Figure]:
    """Of forward and backward of one micro-batch, up to the loss on the host."""
    for name, (model, samples) in models(setting).items():
        with _trained(setting, model, samples) as step:
            if setting.device.type == "cuda":
                places = _waits(step)
                told = "; ".join(sorted(set(places)))[:200]
                yield Figure(f"{name}: waits of the host in a micro-batch", len(places), most=MOST_WAITS, note=told)
            units = sum(
                isinstance(module, ConvNormNeuron)
                for chunk in step.engine.distributed.chunks.values()
                for module in chunk.modules()
            )
            note = f"{units} units of convolution, norm and neurons"
            yield Figure(f"{name}: launches in a micro-batch", _launches(step, setting), note=note)


def _waits(step: MegaSNNStep) -> list[str]:
    """What the driver says of each wait; of those in backward too, which the threads of autograd hand on."""
    torch.set_warn_always(True)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            step.forward_backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.set_warn_always(False)
    return [f"{each.filename}:{each.lineno}" for each in told if "synchroniz" in str(each.message)]


def _launches(step: MegaSNNStep, setting: Setting) -> int:
    """Kernels and copies on a GPU; on a CPU the operators that call no other."""
    is_gpu = setting.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU]) as trace:
        step.forward_backward()
        setting.wait()
    on = DeviceType.CUDA if is_gpu else DeviceType.CPU
    found = sum(each.device_type == on and not each.cpu_children for each in trace.events())
    if not found:
        raise RuntimeError("the profiler saw nothing that a step starts: is its access to the GPU restricted?")
    return found


def graphs(setting: Setting) -> Iterator[Figure]:
    """Whether CUDA graphs help: a step without them and with them, which a GPU has never run so far."""
    for name, (model, samples) in models(setting).items():
        times = {}
        for asked in WITH_GRAPHS:
            with _trained(setting, model, samples, asked) as step:
                reset_peak_memory(setting.device)
                times[asked] = median(_step_ms(step, setting) for _ in range(1 if setting.is_tiny else TIMED))
                peak = f"bf16, {samples} samples, peak {peak_memory_mb(setting.device):.0f} MB"
                yield Figure(f"{name}: step, --cuda-graphs {asked}", times[asked], "ms", note=peak)
        yield Figure(f"{name}: gain by graphs", times["off"] / times["auto"], "x")


def _step_ms(step: MegaSNNStep, setting: Setting) -> float:
    start = time.perf_counter()
    step.forward_backward()
    step.update()
    setting.wait()
    return 1e3 * (time.perf_counter() - start)


def memory(setting: Setting) -> Iterator[Figure]:
    """What a run would have predicted before its first step, and the peak of a step."""
    for name, (model, samples) in models(setting).items():
        with _trained(setting, model, samples) as step:
            engine = step.engine
            reporter = Reporter(RunOutline(1, 1), is_writer=False)
            forecasts = forecast_memory(
                engine.config, engine.distributed, engine.steps.optimizer, engine.plan, engine.state, reporter
            )
            reset_peak_memory(setting.device)
            step.forward_backward()
            step.update()
            setting.wait()
            peak = peak_memory_mb(setting.device)
            yield Figure(f"{name}: peak of a step", peak, "MB", note=f"bf16, {samples} samples")
            for forecast in forecasts:
                yield Figure(f"{name}: measured / predicted", peak / forecast.total, note=str(forecast))
