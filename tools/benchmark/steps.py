"""Training steps of one rank: SpikingJelly's own model or a plain one, or MegaSNN's on a layout."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.nn.functional as F
from spikingjelly.activation_based import functional, layer, surrogate
from spikingjelly.activation_based.examples.memopt.models import CIFAR10DVSVGG, VGGBlock
from spikingjelly.activation_based.model import spikformer
from torch import Tensor, nn

from megasnn.common.files import quantity
from megasnn.common.memory import AllocationCounter, peak_memory_mb, release_free_memory, reset_peak_memory
from megasnn.config import OptimizerConfig, ParallelConfig, PretrainConfig, TrainingConfig
from megasnn.config.neuron import NeuronConfig
from megasnn.config.training import Length
from megasnn.engine import Engine
from megasnn.kernels.layout import let_products_round
from megasnn.models.model import run_config
from megasnn.models.spike_lm.model import SpikeLM
from megasnn.models.spikformer.model import Spikformer
from megasnn.models.vgg_dvs.model import VggDvs, parse_channels
from megasnn.parallel.process_group import COMMUNICATION_BACKENDS
from megasnn.parallel.traffic import Traffic, traffic
from megasnn.pipeline.cost_model import layers_per_chunk
from megasnn.telemetry.timers import Timers
from tools.benchmark.harness import seconds
from tools.benchmark.plain_spike_lm import PlainSpikeLM
from tools.benchmark.ranks import join_ranks

Dimensions = Spikformer | VggDvs | SpikeLM
SPIKINGJELLY = "spikingjelly"
PLAIN = "plain"
"""The library of a language model in torch's layers."""
ENDLESS = 10**9  # steps


@dataclass(frozen=True)
class Work:
    """Work of a row.

    Attributes:
        library: SPIKINGJELLY, PLAIN or "megasnn".
        compiled: torch.compile for SpikingJelly's or the plain model.
        anew: each turn makes a new Engine, which measures the layers again.
    """

    name: str
    library: str
    model: Dimensions
    training: TrainingConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    neuron_backend: str = "auto"
    ranks: int = 1
    threads: int = 1
    device: Literal["cpu", "cuda"] = "cpu"
    compiled: bool = False
    anew: bool = False

    def configuration(self) -> PretrainConfig:
        """Configuration of the run, with SpikingJelly's neurons and a constant learning rate."""
        kind = type(self.model)
        return run_config(kind)(
            model=self.model,
            neuron=kind.neuron(neuron_backend=self.neuron_backend),
            training=self.training,
            optimizer=OptimizerConfig(lr_decay_style="constant"),
            parallel=replace(self.parallel, device=self.device),
        )

    def tiny(self) -> Work:
        """The same work on one rank, with a few thousand parameters and two samples."""
        small: Dimensions = self.model
        if isinstance(small, SpikeLM):
            small = replace(small, embed_dim=32, depth=1, num_heads=2, seq_length=8)
        elif isinstance(small, VggDvs):
            small = replace(small, channels="8,P,8,P", image_size=8)
        else:
            small = replace(small, embed_dim=32, depth=1, num_heads=2, image_size=2 * small.patch_size)
        training = replace(self.training, micro_batch_size=2, global_batch_size=2)
        return replace(self, model=small, training=training, parallel=ParallelConfig(), ranks=1)


@dataclass(frozen=True)
class Turn:
    """Seconds of each step on a rank.

    Attributes:
        simulated: seconds, from costs measured right before.
        parts_ms: milliseconds of each step's parts, by name.
    """

    seconds: list[float]
    simulated: float | None = None
    parts_ms: Sequence[Mapping[str, float]] = ()


@dataclass(frozen=True)
class Facts:
    """Figures of a rank.

    Attributes:
        peak_mb: peak memory above the memory before the model was built.
        needed_mb: peak allocations of a step, above the memory between steps.
        calls, moved_mb: traffic of one step, received in collectives and sent in messages.
        packed: moved bytes divided by their size without packing.
        layers, schedule, idle: pipeline layout, schedule, and simulated idle share.
        tp_calls, tp_mb: part of the traffic between tensor-parallel ranks.
        gpu: name of the GPU; None on a CPU.
    """

    peak_mb: float
    needed_mb: float | None
    calls: int
    moved_mb: float
    packed: float | None
    layers: str | None
    schedule: str | None
    idle: float | None
    tp_calls: int = 0
    tp_mb: float = 0.0
    gpu: str | None = None


class StepRank:
    """A rank. Construction imports everything and compiles kernels; the first turn builds the model."""

    def __init__(self, task: tuple[Work, int, str]) -> None:
        self.work, self._rank, self._store = task
        torch.set_num_threads(self.work.threads)
        os.environ["LOCAL_RANK"] = str(self._rank)
        self.device = torch.device("cpu")
        if self.work.device == "cuda":
            gpus = torch.cuda.device_count()
            if gpus < self.work.ranks:
                raise ValueError(
                    f"--device cuda: {self.work.name} has {quantity(self.work.ranks, 'rank')}, and this machine "
                    f"{quantity(gpus, 'GPU')}"
                )
            self.device = torch.device("cuda", self._rank)
        # Lazy imports and compiled kernels belong to the baseline of the memory.
        reference = PLAIN if isinstance(self.work.model, SpikeLM) else SPIKINGJELLY
        for library in (reference, "megasnn"):
            step = _step_of(replace(self.work.tiny(), library=library, compiled=False), self.device)
            step.take()
            step.close()
        del step
        gc.collect()
        release_free_memory()
        reset_peak_memory(self.device)
        self._baseline = peak_memory_mb(self.device)
        self._step: _Step | None = None

    def turn(self, count: int, warmup: int = 1) -> Turn:
        """Takes untimed steps, then `count` timed ones."""
        step = self._built()
        # Another row has used the caches last.
        for _ in range(warmup):
            step.take()
        step.parts_ms()  # forgets the untimed steps
        times = []
        parts = []
        for _ in range(count):
            times.append(seconds(step.take))
            parts.append(step.parts_ms())
        return Turn(times, step.simulated(), parts)

    def facts(self) -> Facts:
        """Figures of the steps so far. Takes some more steps."""
        step = self._built()
        peak = max(0.0, peak_memory_mb(self.device) - self._baseline)
        traffic.reset()
        with traffic.counting():
            step.take()
        moved = traffic.total()
        between_tp = traffic.by_group.get("tp", Traffic())
        needed: float | None = None
        # SpikingJelly's gradients are freed between steps, so its figure would have another meaning.
        if self.work.library != SPIKINGJELLY:
            # The least of three: memory freed by a thread of the transport is not always seen.
            tries = 3 if self.work.ranks > 1 else 1
            needed = 1e-6 * min(needed_bytes(step.take, self.device) for _ in range(tries))
        packed = moved.bytes / moved.dense_bytes if moved.dense_bytes else None
        layers, schedule, idle = step.pipeline()
        return Facts(
            peak_mb=peak,
            needed_mb=needed,
            calls=moved.calls,
            moved_mb=1e-6 * moved.bytes,
            packed=packed,
            layers=layers,
            schedule=schedule,
            idle=idle,
            tp_calls=between_tp.calls,
            tp_mb=1e-6 * between_tp.bytes,
            gpu=torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else None,
        )

    def join(self) -> None:
        """Joins the other ranks of the row, once. Collective."""
        if self.work.ranks > 1 and not torch.distributed.is_initialized():
            join_ranks(self._store, self._rank, self.work.ranks, COMMUNICATION_BACKENDS[self.device.type])

    def _built(self) -> _Step:
        if self._step is not None and self.work.anew:
            self._step.close()
            self._step = None
        if self._step is None:
            self.join()
            self._step = _step_of(self.work, self.device)
        return self._step


class _Step:
    """Training steps of MegaSNN by `Engine.train_step`."""

    def __init__(self, work: Work, device: torch.device) -> None:
        self._engine = Engine(work.configuration(), length=Length(ENDLESS))
        self._batch = random_batch(work.model, work.training.global_batch_size)
        self._actions = Timers(device)

    def take(self) -> float:
        """Takes a step and returns its loss."""
        # A few microseconds an action, in steps of milliseconds to seconds.
        with self._engine.distributed.executor.timed_by(self._actions):
            return self._engine.train_step(*self._batch).loss

    def close(self) -> None:
        self._engine.close()

    def parts_ms(self) -> dict[str, float]:
        """Milliseconds of the last step's parts: the Engine's timers, and the sum over each kind of action."""
        parts = self._engine.trainer.timers.mean_ms()
        for name, times in self._actions.ended_ms().items():
            parts[name] = sum(times)
        return parts

    def simulated(self) -> float | None:
        """Seconds from the first to the last action; None without measured costs."""
        plan = self._engine.plan
        found = plan.simulation(plan.micro_batches)
        return None if found is None else found.makespan

    def pipeline(self) -> tuple[str | None, str | None, float | None]:
        """Layers of each chunk, name of the schedule, and its simulated idle share; None on one stage."""
        plan = self._engine.plan
        if len(plan.bounds) == 1:
            return None, None, None
        found = plan.simulation(plan.micro_batches)
        name = plan.schedules.training(plan.micro_batches).name
        return layers_per_chunk(plan.bounds), name, None if found is None else found.idle_share


class _SpikingJellyStep(_Step):
    """Steps as in SpikingJelly's training scripts: the whole batch at once, then a reset of the state."""

    def __init__(self, work: Work, device: torch.device) -> None:
        self._model = reference_model(work.model).to(device)
        self._forward = torch.compile(self._model) if work.compiled else self._model
        images, labels = random_batch(work.model, work.training.global_batch_size)
        self._images = images.to(device)
        self._labels = labels.to(device)
        rates = OptimizerConfig()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=rates.lr, weight_decay=rates.weight_decay)
        self._timers = Timers(device)
        self._type = device.type if work.training.precision == "bf16" else None
        # Both sides in the same precision.
        let_products_round(work.training.precision == "tf32")

    def take(self) -> float:
        # As an Engine does, the plain model keeps its gradients' memory.
        self._optimizer.zero_grad(set_to_none=not isinstance(self._model, PlainSpikeLM))
        with self._timers("forward"), torch.autocast(self._type, torch.bfloat16) if self._type else nullcontext():
            # Of a language model, `[N, L, vocab_size]`: each token is a row.
            logits = self._forward(self._images).mean(0)
            loss = F.cross_entropy(logits.flatten(0, -2), self._labels.flatten())
        with self._timers("backward"):
            loss.backward()
        functional.reset_net(self._model)
        with self._timers("optimizer"):
            self._optimizer.step()
        return loss.item()

    def close(self) -> None:
        pass

    def parts_ms(self) -> dict[str, float]:
        return self._timers.mean_ms()

    def simulated(self) -> None:
        return None

    def pipeline(self) -> tuple[None, None, None]:
        return None, None, None


def _step_of(work: Work, device: torch.device) -> _Step:
    if work.library in (SPIKINGJELLY, PLAIN):
        return _SpikingJellyStep(work, device)
    return _Step(work, device)


def needed_bytes(step: Callable[[], object], device: torch.device) -> int:
    """Peak bytes of a step's allocations, above the memory before it."""
    gc.collect()
    counter = AllocationCounter(device)
    with counter.counting():
        step()
    return counter.peak


def random_batch(model: Dimensions, samples: int) -> tuple[Tensor, Tensor]:
    """Images `[samples, C, H, W]` or event frames `[samples, T, C, H, W]`, and labels; or tokens and next tokens.

    The same in every process.
    """
    generator = torch.Generator().manual_seed(0)
    if isinstance(model, SpikeLM):
        tokens = torch.randint(0, model.vocab_size, (samples, model.seq_length + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    images = torch.randn((samples, *model.input_shape), generator=generator)
    return images, torch.randint(0, model.num_classes, (samples,), generator=generator)


def reference_model(model: Dimensions) -> nn.Module:
    """SpikingJelly's model, or for a language model the plain one."""
    return PlainSpikeLM(model) if isinstance(model, SpikeLM) else spikingjelly_model(model)


def spikingjelly_model(model: Spikformer | VggDvs, neuron: NeuronConfig | None = None) -> nn.Module:
    """SpikingJelly's model for images `[N, C, H, W]` or event frames `[N, T, C, H, W]`, with a VGG's LIF neurons."""
    if isinstance(model, VggDvs):
        return _Vgg(model, neuron or VggDvs.neuron())
    return spikformer.Spikformer(
        T=model.time_steps,
        in_channels=model.in_channels,
        img_size_h=model.image_size,
        img_size_w=model.image_size,
        patch_size=model.patch_size,
        num_classes=model.num_classes,
        embed_dims=model.embed_dim,
        num_heads=model.num_heads,
        mlp_ratio=model.mlp_ratio,
        depths=model.depth,
    )


class _Vgg(nn.Module):
    """CIFAR10DVSVGG with other channels and image sizes: its blocks, classifier and forward."""

    def __init__(self, model: VggDvs, lif: NeuronConfig) -> None:
        super().__init__()
        surrogates = {"atan": surrogate.ATan, "sigmoid": surrogate.Sigmoid}
        neuron = dict(
            tau=lif.tau,
            v_threshold=lif.v_threshold,
            v_reset=lif.v_reset,
            decay_input=lif.decay_input,
            detach_reset=lif.detach_reset,
            surrogate_function=surrogates[lif.surrogate](lif.spec.alpha),
        )
        blocks: list[nn.Module] = []
        convolutions, pools_last = parse_channels(model.channels)
        inputs = model.in_channels
        for channels, pool in convolutions:
            blocks.append(VGGBlock(inputs, channels, 3, 1, 1, pool, step_mode="m", **neuron))
            inputs = channels
        if pools_last:
            blocks.append(layer.AvgPool2d(2))
        self.features = nn.Sequential(*blocks)
        side = model.image_size // 2 ** model.channels.count("P")
        linear = nn.Linear(inputs * side**2, model.num_classes)
        self.classifier = nn.Sequential(nn.Dropout(model.dropout), linear)
        functional.set_step_mode(self, "m")
        self._time_steps = 0 if model.event_frames else model.time_steps

    def forward(self, frames: Tensor) -> Tensor:
        if self._time_steps:
            frames = frames.unsqueeze(1).expand(-1, self._time_steps, -1, -1, -1)
        return CIFAR10DVSVGG.forward(self, frames)
