"""Batch sizes, length of the run, precision."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from megasnn.config.checks import above, at_least, from_zero_to_below_one
from megasnn.config.names import flags_of_others, name_in
from megasnn.losses import LOSSES


@dataclass(frozen=True)
class TrainingConfig:
    """The length is given either in iterations or in samples."""

    micro_batch_size: int = 8
    """Samples that go through the model together; normalisation is over them."""
    global_batch_size: int = 64
    """Samples per optimizer step, over all replicas."""
    train_iters: int | None = None
    """Optimizer steps to train, counted from the beginning of the first run."""
    train_samples: int | None = None
    """Samples to train on, instead of --train-iters; only whole global batches are trained on."""
    exit_interval: int | None = None
    """Stop at the next iteration that is a multiple of it, and save if --save is given."""
    exit_duration_in_mins: float | None = None
    """Stop after so many minutes, and save if --save is given."""
    seed: int = 1234
    """Seed of initial weights, data order, augmentation and dropout."""
    precision: Literal["fp32", "bf16", "fp64"] = "fp32"
    """bf16 is autocast with fp32 weights; fp64 is for checks."""
    loss: Annotated[str, name_in(LOSSES)] = "cross-entropy"
    """Loss that is minimised, as a mean over the samples."""
    tet_lambda: float = 1e-3
    """With --loss tet, the share of the term that keeps logits near --tet-mean; 0 leaves it out."""
    tet_mean: float = 1.0
    """With --loss tet, the value that this term keeps logits near."""
    label_smoothing: float = 0.0
    """Share of the target spread evenly over all classes."""

    @property
    def iterations(self) -> int:
        """Optimizer steps of the whole training. Raises ValueError when no length is given."""
        if self.train_iters is not None:
            return self.train_iters
        if self.train_samples is not None:
            return self.train_samples // self.global_batch_size
        raise ValueError("give the length of the training with --train-iters or --train-samples")

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a global batch, over all replicas; the last one may be smaller than the others."""
        return -(-self.global_batch_size // self.micro_batch_size)

    def problems(self) -> list[str]:
        wrong = at_least(self, 1, "micro_batch_size", "global_batch_size", "train_iters", "exit_interval")
        wrong += at_least(self, 0, "seed") + above(self, 0, "exit_duration_in_mins")
        wrong += from_zero_to_below_one(self, "label_smoothing", "tet_lambda") + self._loss_problems()
        if self.micro_batch_size > self.global_batch_size >= 1:
            wrong.append(
                f"--micro-batch-size {self.micro_batch_size} is larger than "
                f"--global-batch-size {self.global_batch_size}"
            )
        if (self.train_iters is None) == (self.train_samples is None):
            given = "neither was given" if self.train_iters is None else "both were given (none takes one back)"
            wrong.append(f"give either --train-iters or --train-samples; {given}")
        elif self.train_samples is not None and self.train_samples < self.global_batch_size:
            wrong.append(
                f"--train-samples {self.train_samples} is less than one --global-batch-size {self.global_batch_size}"
            )
        return wrong

    def _loss_problems(self) -> list[str]:
        wrong = flags_of_others(self, "loss", LOSSES)
        if self.tet_mean != TrainingConfig.tet_mean and self.tet_lambda == 0:
            wrong.append(f"--tet-mean {self.tet_mean} is for --loss tet with a --tet-lambda above 0")
        if not math.isfinite(self.tet_mean):
            wrong.append(f"--tet-mean must be a finite number, got {self.tet_mean}")
        return wrong
