"""Batch sizes, length of the run, precision, loss.

The tables of precisions and losses stand beside their flags. They need no torch: types have the names that torch gives
them, and the losses themselves are in `megasnn.models.losses`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass as plain_dataclass
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic.dataclasses import dataclass

from megasnn.common.files import STRICT
from megasnn.common.registry import Registry, later
from megasnn.config.checks import Count, FractionBelowOne, Positive, Size, flag

_SUMS = "megasnn.models.losses"
LENGTHS = ("train_iters", "train_epochs")
"""Fields that give the length of a training; one of them does."""


@plain_dataclass(frozen=True)
class Loss:
    """
    Attributes:
        summary: for --help.
        sum: (what the model's last layer gives: logits `[T, N, classes]`, or a bundle with them, labels,
            label_smoothing=...) -> the sum of the samples' losses.
        mixes: labels may be probabilities `[N, classes]`, as mixed samples have them.
    """

    summary: str
    sum: Callable[..., Any]
    mixes: bool = False


LOSSES: Registry[Loss] = Registry(
    "--loss",
    {
        "cross-entropy": Loss("of the logits' mean over time", later(f"{_SUMS}:cross_entropy_sum"), mixes=True),
        "tet": Loss("cross-entropy of each time step (Deng et al. 2022)", later(f"{_SUMS}:tet_sum"), mixes=True),
        "mse": Loss("squared distance of the mean over time from 0 and 1", later(f"{_SUMS}:mse_sum"), mixes=True),
    },
)


@plain_dataclass(frozen=True)
class Precision:
    """
    Attributes:
        summary: for --help.
        weights: type of parameters, buffers, gradients and optimizer state.
        products: type of activations and of matrix products; their gradients cross stages in it.
        rounds: whether products of float32 may round their operands to TF32, which has 11 significant bits. Only GPUs
            of compute capability 8.0 or more do.
    """

    summary: str
    weights: str
    products: str
    rounds: bool = False


PRECISIONS: Registry[Precision] = Registry(
    "--precision",
    {
        "fp32": Precision("IEEE single precision everywhere, also on GPUs", "float32", "float32"),
        "tf32": Precision("fp32 with products whose operands a GPU rounds to 11 bits", "float32", "float32", True),
        "bf16": Precision("activations and products in bfloat16, weights and sums in fp32", "float32", "bfloat16"),
        "fp64": Precision("for checks", "float64", "float64"),
    },
    refused={
        "fp16": "gradients of float16 vanish without a loss scale, which there is not; use bf16, which takes the same "
        "memory and needs none"
    },
)


@plain_dataclass(frozen=True)
class Length:
    """Length of a training.

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


@dataclass(frozen=True, config=STRICT)
class TrainingConfig:
    """The length is given in iterations or in epochs."""

    micro_batch_size: Size = 8
    """Samples that go through the model together; normalisation is over them."""
    global_batch_size: Size = 64
    """Samples per optimizer step, over all replicas."""
    train_iters: Size | None = None
    """Optimizer steps to train, counted from the beginning of the first run."""
    train_epochs: Size | None = None
    """Epochs to train, instead of --train-iters."""
    evaluate_only: bool = False
    """Evaluate what --load gives on the validation data, and end."""
    max_skipped_steps: Count = 10
    """End with exit status 4 after so many steps in a row that were not finite; 0 goes on."""
    exit_interval: Size | None = None
    """Stop at the next iteration that is a multiple of it, and save if --save is given."""
    exit_duration_in_mins: Positive | None = None
    """Stop after so many minutes, and save if --save is given."""
    bptt_steps: Size | None = None
    """Truncated backpropagation: show each sample in windows of so many time steps, each a micro-batch."""
    seed: Count = 1234
    """Seed of initial weights, data order, augmentation and dropout."""
    precision: Annotated[str, PRECISIONS] = "fp32"
    """Types of weights and products."""
    sparse_products: Literal["auto", "off"] = "auto"
    """Products with spikes as sums over the values that are not 0, on a CPU where these are at most 40 %."""
    deterministic: bool = False
    """The same bits in every run on the same layout, devices and versions, by slower algorithms on GPUs."""
    cuda_graphs: Literal["off", "on"] = "off"
    """CUDA graphs of all layers; one that cannot have them is an error. Faster where Python is slower than the GPU."""
    loss: Annotated[str, LOSSES] = "cross-entropy"
    """Loss that is minimised, as a mean over the samples."""
    label_smoothing: FractionBelowOne = 0.0
    """Share of the target spread evenly over all classes."""

    def length(self, epoch_samples: int, iteration: int = 0, consumed_samples: int = 0) -> Length:
        """Length of a training on data with so many samples in an epoch; 0 iterations with --evaluate-only.

        Args:
            iteration: steps that are done, maybe in batches of another size.
            consumed_samples: of these steps. Epochs are counted by them.

        Raises:
            ValueError: it is less than one iteration.
        """
        epoch = Fraction(epoch_samples, self.global_batch_size)
        if self.evaluate_only:
            return Length(0, epoch, epoch_samples)
        iterations = self.train_iters
        if self.train_epochs is not None:
            samples_to_go = max(self.train_epochs * epoch_samples - consumed_samples, 0)
            iterations = iteration + samples_to_go // self.global_batch_size
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

    def problems(self) -> list[str]:
        """Contradictions, with values and flags."""
        wrong = []
        if self.micro_batch_size > self.global_batch_size:
            wrong.append(
                f"--micro-batch-size {self.micro_batch_size} is larger than "
                f"--global-batch-size {self.global_batch_size}"
            )
        if self.train_iters is not None and self.train_epochs is not None:
            lengths = " and ".join(f"{flag(name)} {getattr(self, name)}" for name in LENGTHS)
            wrong.append(f"{lengths} are two lengths; give one (none takes the other back)")
        return wrong
