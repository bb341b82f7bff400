"""Batch sizes, length of the run, precision."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Annotated, Literal

from megasnn.config.checks import FOR_RUNS, above, at_least, flag, from_zero_to_below_one
from megasnn.config.names import flags_of_others, name_in
from megasnn.losses import LOSSES
from megasnn.precisions import PRECISIONS


@dataclass(frozen=True)
class Length:
    """How long a training is.

    Attributes:
        iterations: optimizer steps.
        epoch: iterations of an epoch; a fraction where a batch may go on in the next epoch.
        epoch_samples: training samples of an epoch.
    """

    iterations: int
    epoch: Fraction = Fraction(1)
    epoch_samples: int = 1

    @property
    def epochs(self) -> float:
        return float(self.iterations / self.epoch)


LENGTHS = ("train_iters", "train_samples", "train_epochs")
"""The fields that say how long a training is; one of them does."""


@dataclass(frozen=True)
class TrainingConfig:
    """The length is given in iterations, in samples or in epochs."""

    micro_batch_size: int = 8
    """Samples that go through the model together; normalisation is over them."""
    global_batch_size: int = 64
    """Samples per optimizer step, over all replicas."""
    train_iters: int | None = None
    """Optimizer steps to train, counted from the beginning of the first run."""
    train_samples: int | None = None
    """Samples to train on, instead of --train-iters; only whole global batches are trained on."""
    train_epochs: int | None = field(default=None, metadata=FOR_RUNS)
    """Epochs to train, instead of --train-iters: how often to go through the training data."""
    evaluate_only: bool = field(default=False, metadata=FOR_RUNS)
    """Evaluate what --load or --load-spikingjelly gives on the validation data, and end."""
    max_skipped_steps: int = field(default=10, metadata=FOR_RUNS)
    """End the run, with exit status 4, after so many steps in a row that were skipped, since loss or gradient were not
    finite: it has diverged. 0 goes on."""
    exit_interval: int | None = field(default=None, metadata=FOR_RUNS)
    """Stop at the next iteration that is a multiple of it, and save if --save is given."""
    exit_duration_in_mins: float | None = field(default=None, metadata=FOR_RUNS)
    """Stop after so many minutes, and save if --save is given."""
    bptt_steps: int | None = None
    """Truncated backpropagation through time: show each sample in windows of so many time steps, each a micro-batch of
    its own, forward and backward. Neurons go on from the potential that the window before left, without its gradient;
    the loss is the mean over the windows. By default one window has all time steps."""
    seed: int = 1234
    """Seed of initial weights, data order, augmentation and dropout."""
    precision: Annotated[str, name_in(PRECISIONS)] = "fp32"
    """Types of weights and products. There is no fp16: it would need a scaled loss, which bf16 does without."""
    fp32_products: Literal["auto", "ieee", "split"] = "auto"
    """How --precision fp32 multiplies in layers that take spikes or small counts, on a GPU. ieee: as it is. split: as
    two products of TF32 on tensor cores where spikes are an operand, and three for the gradient of the input. auto:
    split where errors against float64, measured at the start for each shape of layer, are at most 1.5 times those of
    ieee and it is faster; the log tells where. ieee on a CPU, and with --deterministic, since measured times differ
    from run to run."""
    sparse_products: Literal["auto", "off"] = "auto"
    """How --precision fp32 and fp64 multiply in layers that take spikes or small counts, on a CPU. auto: outputs and
    gradients of weights are sums over the values that are not 0, where these are at most 40 % of an input; their terms
    are those of the dense product, whose others are 0. off: dense products."""
    deterministic: bool = False
    """The same bits in every run on the same layout, devices and versions: GPUs take only algorithms that promise it
    (an operation without one is an error). That costs the fastest algorithms of some convolutions."""
    cuda_graphs: Literal["off", "on", "auto"] = "off"
    """Start the kernels of a layer on a GPU all at once, as CUDA graphs: forward, the gradients of inputs, and those of
    weights, for each micro-batch under way. auto: of all layers that can; the others are named, with the reason. on: a
    layer that cannot is an error. Takes memory for the outputs and gradients of all layers. Has never run on a GPU."""
    wait_after_actions: bool = False
    """Wait for the GPU after each action of the schedule, so that an error of one of its kernels names the action that
    it arose in. Slow: to find such an error."""
    loss: Annotated[str, name_in(LOSSES)] = "cross-entropy"
    """Loss that is minimised, as a mean over the samples."""
    tet_lambda: float = 1e-3
    """With --loss tet, the share of the term that keeps logits near --tet-mean; 0 leaves it out."""
    tet_mean: float = 1.0
    """With --loss tet, the value that this term keeps logits near."""
    label_smoothing: float = 0.0
    """Share of the target spread evenly over all classes."""

    @property
    def iterations(self) -> int | None:
        """Optimizer steps of the whole training; None where they depend on the data (--train-epochs), or no length is
        given."""
        if self.train_samples is not None:
            return self.train_samples // self.global_batch_size
        return self.train_iters

    def length(self, epoch_samples: int, keeps_last_batch: bool = False) -> Length:
        """The length of a training on data with so many samples in an epoch; 0 iterations with --evaluate-only.

        Args:
            keeps_last_batch: whether an epoch ends with a smaller batch rather than in the midst of one.
        Raises:
            ValueError: it is less than one iteration.
        """
        epoch = Fraction(epoch_samples, self.global_batch_size)
        epoch = Fraction(math.ceil(epoch)) if keeps_last_batch else epoch
        if self.evaluate_only:
            return Length(0, epoch, epoch_samples)
        iterations = self.iterations if self.train_epochs is None else int(self.train_epochs * epoch)
        if not iterations:
            raise ValueError(
                f"--train-epochs {self.train_epochs} of {epoch_samples} training samples is less than one "
                f"--global-batch-size {self.global_batch_size}"
            )
        return Length(iterations, epoch, epoch_samples)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a global batch, over all replicas; the last one may be smaller than the others."""
        return -(-self.global_batch_size // self.micro_batch_size)

    def windows(self, time_steps: int) -> int:
        """In how many windows a sample of so many time steps is shown."""
        return 1 if self.bptt_steps is None else time_steps // self.bptt_steps

    def problems(self) -> list[str]:
        wrong = at_least(self, 0, "max_skipped_steps")
        wrong += at_least(self, 1, "micro_batch_size", "global_batch_size", "exit_interval", "bptt_steps")
        wrong += at_least(self, 1, "train_iters", "train_epochs")
        wrong += at_least(self, 0, "seed") + above(self, 0, "exit_duration_in_mins")
        wrong += from_zero_to_below_one(self, "label_smoothing", "tet_lambda") + self._loss_problems()
        if self.fp32_products != "auto" and self.precision != "fp32":
            wrong.append(f"--fp32-products {self.fp32_products} is for --precision fp32, not {self.precision}")
        if self.micro_batch_size > self.global_batch_size >= 1:
            wrong.append(
                f"--micro-batch-size {self.micro_batch_size} is larger than "
                f"--global-batch-size {self.global_batch_size}"
            )
        lengths = {flag(name): getattr(self, name) for name in LENGTHS}
        given = [f"{name} {value}" for name, value in lengths.items() if value is not None]
        if len(given) > 1:
            wrong.append(f"give one of {', '.join(lengths)}; {' and '.join(given)} were given (none takes one back)")
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
