"""What a row repeats: one training step of SpikingJelly's own model, or of ours on a layout."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
import torch.nn.functional as F
from spikingjelly.activation_based import functional
from torch import Tensor

from megasnn.batching import micro_batch_sizes, micro_batches_of
from megasnn.config.optimizer import OptimizerConfig
from megasnn.config.parallel import ParallelConfig, ScheduleName
from megasnn.engine import Engine
from megasnn.layers import BuildContext
from megasnn.models.building import describe
from megasnn.models.description import ModelDescription
from megasnn.optim import build_optimizer
from megasnn.parallel_state import ParallelState
from megasnn.pipeline.costs import layers_per_chunk
from megasnn.pipeline.executor import MicroBatchInput
from megasnn.pipeline.plan import PipelinePlan
from megasnn.training.setup import build_context, plan_of
from tools.benchmark.models import Dimensions, spikingjelly_model

OPTIMIZER = OptimizerConfig()


class TrainingStep(Protocol):
    """One training step in two parts.

    Attributes:
        layout: layers of each pipeline stage; "" without a pipeline.
    """

    layout: str

    def forward_backward(self) -> float:
        """Up to the gradients; returns the loss."""

    def update(self) -> None:
        """The optimizer's step."""


class SpikingJellyStep:
    """As its own training scripts do it: the whole batch in one go, eager, state reset after each step."""

    layout = ""

    def __init__(self, model: Dimensions, samples: int, precision: str, device: torch.device) -> None:
        self.model = spikingjelly_model(model).to(device)
        self.images, self.labels = (tensor.to(device) for tensor in _random_batch(describe(model), samples))
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=OPTIMIZER.lr, weight_decay=OPTIMIZER.weight_decay
        )
        self._bf16 = precision == "bf16"

    def forward_backward(self) -> float:
        self.optimizer.zero_grad()
        with self._autocast():
            loss = F.cross_entropy(self.model(self.images).mean(0), self.labels)
        loss.backward()
        functional.reset_net(self.model)
        return loss.item()

    def _autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.images.device.type, torch.bfloat16) if self._bf16 else nullcontext()

    def update(self) -> None:
        self.optimizer.step()


class MegaSNNStep:
    """As the training loop does it, gradient norm and clipping included, on this rank of a layout."""

    def __init__(
        self,
        model: ModelDescription,
        state: ParallelState,
        context: BuildContext,
        plan: PipelinePlan,
        samples: int,
        micro_batch_size: int,
    ) -> None:
        sizes = micro_batch_sizes(samples, micro_batch_size)
        self._samples, self._most = samples, len(micro_batches_of(len(sizes), state.data.size, 0))
        self.layout = layers_per_chunk(plan.bounds) if len(plan.bounds) > 1 else ""
        self.engine = Engine(model, state, context, plan.bounds, plan.schedules)
        self.optimizer = build_optimizer(self.engine.tensors, OPTIMIZER)
        self._micro_batches = _local_micro_batches(model, self.engine, samples, sizes)

    def forward_backward(self) -> float:
        loss = self.run_schedule()
        self.merge_statistics()
        return loss

    def run_schedule(self) -> float:
        """From the first to the last action: up to the reduced gradients; returns the loss."""
        return self.engine.forward_backward(self._micro_batches, self._samples)

    def merge_statistics(self) -> None:
        self.engine.merge_statistics(self._most)

    def update(self) -> None:
        self.engine.gradient_norm.clip(self.engine.gradient_norm(), OPTIMIZER.clip_grad)
        self.optimizer.step()


def megasnn_step(
    model: Dimensions,
    state: ParallelState,
    samples: int,
    micro_batch_size: int,
    precision: str,
    neuron_backend: str,
    schedule: ScheduleName,
) -> MegaSNNStep:
    """On a pipeline that is planned as training plans it. Collective."""
    description, context = describe(model), build_context(state, precision, neuron_backend)
    parallel = ParallelConfig(pipeline_model_parallel_size=state.pipeline.size, pipeline_schedule=schedule)
    most = len(micro_batches_of(len(micro_batch_sizes(samples, micro_batch_size)), state.data.size, 0))
    plan = plan_of(description, parallel, micro_batch_size, [most], context, state)
    return MegaSNNStep(description, state, context, plan, samples, micro_batch_size)


def _random_batch(model: ModelDescription, samples: int) -> tuple[Tensor, Tensor]:
    """Images [samples, C, H, W] or event frames [samples, T, C, H, W], and labels [samples]; the same in every
    process."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn((samples, *model.input_shape), generator=generator)
    return images, torch.randint(0, model.num_classes, (samples,), generator=generator)


def _local_micro_batches(
    model: ModelDescription, engine: Engine, samples: int, sizes: list[int]
) -> list[MicroBatchInput]:
    images, labels = _random_batch(model, samples)
    pieces = list(zip(images.split(sizes), labels.split(sizes), sizes, strict=True))
    state = engine.state
    mine = micro_batches_of(len(sizes), state.data.size, state.data.rank)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    # Copies: a view would keep the whole batch in memory.
    return [
        MicroBatchInput(
            x.clone().to(state.device) if engine.takes_images else None,
            y.clone().to(state.device) if engine.gives_logits else None,
            size,
            range(starts[index], starts[index] + size),
        )
        for index, (x, y, size) in ((index, pieces[index]) for index in mine)
    ]
