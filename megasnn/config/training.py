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
LENGTHS = ("train_iters", "train_samples", "train_epochs")
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
        left_over: samples at the end that fill no global batch, and are not trained on.
    """

    iterations: int
    epoch: Fraction = Fraction(1)
    epoch_samples: int = 1
    left_over: int = 0

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
    train_samples: Size | None = None
    """Samples to train on, instead of --train-iters, counted from the beginning of the first run. The training ends
    with the last whole global batch."""
    train_epochs: Size | None = None
    """Epochs to train, instead of --train-iters. The training ends with the last whole global batch."""
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

    @property
    def counts_samples(self) -> bool:
        """Whether the length is given in samples or epochs, rather than in iterations."""
        return self.train_samples is not None or self.train_epochs is not None

    def length(self, epoch_samples: int, iteration: int = 0, consumed_samples: int = 0) -> Length:
        """Length of a training on data with `epoch_samples` samples in an epoch; 0 iterations with --evaluate-only.

        Args:
            iteration: steps done, maybe with another global batch size.
            consumed_samples: samples used in these steps; they count towards --train-samples and --train-epochs.

        Raises:
            ValueError: the training is shorter than one iteration.
        """
        epoch = Fraction(epoch_samples, self.global_batch_size)
        if self.evaluate_only:
            return Length(0, epoch, epoch_samples)
        if not self.counts_samples:
            return Length(self.train_iters or 0, epoch, epoch_samples)
        samples = self.train_samples or (self.train_epochs or 0) * epoch_samples
        to_go, left_over = divmod(max(samples - consumed_samples, 0), self.global_batch_size)
        if iteration + to_go == 0:
            asked = f"--train-samples {samples}"
            if self.train_epochs is not None:
                asked = f"--train-epochs {self.train_epochs} of {epoch_samples} training samples"
            raise ValueError(f"{asked} is less than one --global-batch-size {self.global_batch_size}")
        return Length(iteration + to_go, epoch, epoch_samples, left_over)

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
        asked = {name: getattr(self, name) for name in LENGTHS}
        lengths = [f"{flag(name)} {value}" for name, value in asked.items() if value is not None]
        if len(lengths) > 1:
            wrong.append(f"{' and '.join(lengths)} are {len(lengths)} lengths; give one (none takes another back)")
        return wrong
