"""What a row repeats: one training step of SpikingJelly's own model, or of ours on a layout."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from spikingjelly.activation_based import functional
from torch import Tensor

from megasnn.config import OptimizerConfig, ParallelConfig, PretrainConfig, TrainingConfig
from megasnn.config.training import Length
from megasnn.data import GlobalBatch
from megasnn.engine import Engine
from megasnn.kernels.tensor_cores import let_products_round
from megasnn.models.building import describe
from megasnn.models.description import ModelDescription
from megasnn.pipeline.cost_model import layers_per_chunk
from megasnn.pipeline.plan import PipelinePlan
from megasnn.schedule import Action, Kind
from megasnn.telemetry.allocations import AllocationCounter
from megasnn.telemetry.timers import Mark, Timers
from tools.benchmark.models import Dimensions, configuration, spikingjelly_model

OPTIMIZER = OptimizerConfig(lr_decay_style="constant")
ENDLESS = 10**9  # steps
# Computing again is for backward, and counts there.
PHASES = {
    Kind.FORWARD: "forward",
    **dict.fromkeys((Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT, Kind.RECOMPUTE), "backward"),
}
Precision = Literal["fp32", "tf32", "bf16", "fp64"]
CudaGraphs = Literal["off", "on", "auto"]


class TrainingStep(Protocol):
    """One training step in two parts.

    Attributes:
        layout: layers of each pipeline stage; "" without a pipeline.
        setup_ms: milliseconds of what came before the first step, by name.
    """

    layout: str
    setup_ms: Mapping[str, float]

    def forward_backward(self) -> float:
        """Up to the gradients; returns the loss."""

    def update(self) -> None:
        """The optimizer's step."""

    def phases_ms(self) -> dict[str, float]:
        """Milliseconds of the parts of the last `forward_backward`, by name; the device has done it."""


class SpikingJellyStep:
    """As its own training scripts do it: the whole batch in one go, state reset after each step.

    Args:
        compiled: the model under torch.compile, and not eager.
        keeps_gradients: whether the memory of gradients stays between steps.
    """

    layout = ""

    def __init__(
        self,
        model: Dimensions,
        samples: int,
        precision: str,
        device: torch.device,
        compiled: bool = False,
        keeps_gradients: bool = False,
    ) -> None:
        built = Timers(device)
        with built("materialise"):
            self.model = spikingjelly_model(model).to(device)
        self.setup_ms: Mapping[str, float] = built.mean_ms()
        self._timers = Timers(device)
        self._forward = torch.compile(self.model) if compiled else self.model
        self.images, self.labels = (tensor.to(device) for tensor in random_batch(describe(model), samples))
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=OPTIMIZER.lr, weight_decay=OPTIMIZER.weight_decay
        )
        self._bf16, self._keeps_gradients = precision == "bf16", keeps_gradients
        let_products_round(precision == "tf32")  # both sides in the same precision

    def forward_backward(self) -> float:
        self.optimizer.zero_grad(set_to_none=not self._keeps_gradients)
        with self._timers("forward"), self._autocast():
            loss = F.cross_entropy(self._forward(self.images).mean(0), self.labels)
        with self._timers("backward"):
            loss.backward()
        with self._timers("reset"):
            self.forget_state()
        return loss.item()

    def forget_state(self) -> None:
        """Of the neurons."""
        functional.reset_net(self.model)

    def _autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.images.device.type, torch.bfloat16) if self._bf16 else nullcontext()

    def update(self) -> None:
        self.optimizer.step()

    def phases_ms(self) -> dict[str, float]:
        return self._timers.mean_ms()


class MegaSNNStep:
    """As the training loop does it, gradient norm and clipping included, on this rank of a layout.

    Between its two parts the host reads what came out; in a `whole` step, as training takes it, a GPU does not wait for
    that.

    Args:
        plan: of the pipeline; None: as training plans it.
        watches: whether `phases_ms` is asked for: then each action of a step is timed.
    """

    def __init__(self, config: PretrainConfig, plan: PipelinePlan | None = None, watches: bool = False) -> None:
        self.engine = Engine(config, length=Length(ENDLESS), plan=plan)
        self.setup_ms: Mapping[str, float] = self.engine.setup_ms
        self._marks: list[tuple[Kind, Mark, Mark]] = []
        if watches:
            self.engine.distributed.executor.observer = self._observe
        training, bounds = config.training, self.engine.plan.bounds
        self.layout = layers_per_chunk(bounds) if len(bounds) > 1 else ""
        self._samples = training.global_batch_size
        images, labels = random_batch(self.engine.distributed.model, self._samples)
        batches = self.engine.batches
        self._micro_batches = [
            # Copies: a view would keep the whole batch in memory.
            replace(micro, images=_copied(micro.images), labels=_copied(micro.labels))
            for micro in batches.inputs(batches.share(images, labels, self._samples, 0))
        ]
        self._batch = GlobalBatch([], self._samples, self._samples)
        self._loss = 0.0

    def forward_backward(self) -> float:
        """From the first to the last action: up to the reduced gradients; returns the loss."""
        self._marks.clear()
        self._loss = self.engine.distributed.forward_backward(self._micro_batches, self._samples)
        return self._loss

    def update(self) -> None:
        step = self.engine.step
        step.finish(self._samples, step.rate())

    def whole(self) -> None:
        """Both parts."""
        self._marks.clear()
        self.engine.step(self._micro_batches, self._batch)

    def phases_ms(self) -> dict[str, float]:
        """Of computing: what is left of the step are messages, sums of gradients, and waiting for other ranks."""
        found = dict.fromkeys(PHASES.values(), 0.0)
        for kind, start, end in self._marks:
            found[PHASES[kind]] += 1e3 * self.engine.distributed.executor.clock.between(start, end)
        return found

    def _observe(self, action: Action, start: Mark, end: Mark) -> None:
        if action.kind in PHASES:
            self._marks.append((action.kind, start, end))


def megasnn_step(
    model: Dimensions,
    samples: int,
    micro_batch_size: int,
    precision: Precision,
    neuron_backend: str,
    cuda_graphs: CudaGraphs = "off",
    sparse_products: Literal["auto", "off"] = "auto",
    watches: bool = False,
    **parallel: Any,
) -> MegaSNNStep:
    """On the grid of ranks that is there, with a pipeline that is planned as training plans it. Collective.

    Args:
        watches: see MegaSNNStep. parallel: see ParallelConfig.
    """
    config = configuration(
        model,
        training=TrainingConfig(
            micro_batch_size=micro_batch_size,
            global_batch_size=samples,
            train_iters=ENDLESS,
            precision=precision,
            sparse_products=sparse_products,
            cuda_graphs=cuda_graphs,
        ),
        parallel=ParallelConfig(**parallel),
        optimizer=OPTIMIZER,
    )
    return MegaSNNStep(replace(config, neuron=replace(config.neuron, neuron_backend=neuron_backend)), watches=watches)


def counted_peak(step: TrainingStep, device: torch.device, ranks: int) -> int:
    """Bytes at the peak of forward and backward above what is there between steps, counted where they are taken: the
    least of some steps where there are several ranks, since what threads of the transport give back is not always seen.

    One step comes before: in a rank's first one, receivers do not know yet what comes, and have no room for it.
    """
    step.forward_backward()
    step.update()
    gc.collect()
    peaks = []
    for _ in range(3 if ranks > 1 else 1):
        counter = AllocationCounter(device)
        with counter.counting():
            step.forward_backward()
        step.update()
        peaks.append(counter.peak)
    return min(peaks)


def random_batch(model: ModelDescription, samples: int) -> tuple[Tensor, Tensor]:
    """Images [samples, C, H, W] or event frames [samples, T, C, H, W], and labels [samples]; the same in every
    process."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn((samples, *model.input_shape), generator=generator)
    return images, torch.randint(0, model.num_classes, (samples,), generator=generator)


def _copied(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()
