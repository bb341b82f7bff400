"""Batch sizes, the run's length, precision, loss.

The registries of precisions and losses stand beside their flags. They import no torch: types are torch's names, and the
losses themselves are in `megasnn.models.losses`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass as plain_dataclass
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import WrapValidator
from pydantic.dataclasses import dataclass

from megasnn.common.files import STRICT
from megasnn.common.registry import Registry, later
from megasnn.config.checks import Count, FractionBelowOne, Positive, Size, flag

LENGTHS = ("train_iters", "train_samples", "train_epochs")
"""Fields for the length of a training. A run has exactly one."""
_SUMS = "megasnn.models.losses"


class _Auto(int):
    """Stands for a size that the start of a run finds."""

    def __repr__(self) -> str:
        return "auto"


AUTO_SIZE = _Auto(0)
"""Value of --micro-batch-size auto until the run has found a number."""


def _size_or_auto(value: Any, read: Callable[[Any], int]) -> int:
    # Around pydantic's own reading, which would refuse the word before a later validator saw it.
    return AUTO_SIZE if value == "auto" or isinstance(value, _Auto) else read(value)


@plain_dataclass(frozen=True)
class Loss:
    """A loss by name.

    Attributes:
        summary: for --help.
        sum: (output of the last layer, labels, label_smoothing=...) -> loss, summed over samples. The output is
            logits `[T, N, classes]` or a bundle with them.
        mixes: accepts probabilities `[N, classes]` as labels, which mixup needs.
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
    """Number types by name.

    Attributes:
        summary: for --help.
        weights: type for parameters, buffers, gradients and optimizer state.
        products: type for activations and matrix products. Their gradients cross pipeline stages in it.
        rounds: float32 products may round operands to TF32 (11 significant bits). Only GPUs with compute capability 8.0
            or more do.
    """

    summary: str
    weights: str
    products: str
    rounds: bool = False


PRECISIONS: Registry[Precision] = Registry(
    "--precision",
    {
        "fp32": Precision("IEEE single precision everywhere, also on GPUs", "float32", "float32"),
        "tf32": Precision("fp32, but a GPU rounds operands of products to 11 bits", "float32", "float32", True),
        "bf16": Precision("activations and products in bfloat16, weights and sums in fp32", "float32", "bfloat16"),
        "fp64": Precision("for checks", "float64", "float64"),
    },
    refused={
        "fp16": "float16 gradients vanish without loss scaling, which MegaSNN does not have; use bf16, which takes as "
        "little memory and needs no scaling"
    },
)


@plain_dataclass(frozen=True)
class Length:
    """A training's length.

    Attributes:
        iterations: optimizer steps.
        epoch: iterations per epoch; a fraction if a batch may span two epochs.
        epoch_samples: training samples per epoch.
        left_over: samples at the end, too few for a global batch. They are left out.
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
    """The length is in iterations, samples or epochs."""

    micro_batch_size: Annotated[Size, WrapValidator(_size_or_auto)] = 8
    """Samples that go through the model together; norms use their statistics. auto: the largest that fits in memory,
    found once, kept in config.json and checkpoints."""
    global_batch_size: Size = 64
    """Samples per optimizer step, over all replicas."""
    train_iters: Size | None = None
    """Optimizer steps to train, counted from the start of the first run."""
    train_samples: Size | None = None
    """Samples to train on, instead of --train-iters; the training ends with the last full global batch."""
    train_epochs: Size | None = None
    """Epochs to train, instead of --train-iters; the training ends with the last full global batch."""
    evaluate_only: bool = False
    """Evaluate the checkpoint of --load on the validation data, and end."""
    max_skipped_steps: Count = 10
    """Consecutive skipped steps (loss or gradient not finite) after which the run ends with exit status 4; 0: never."""
    exit_interval: Size | None = None
    """Stop at the next iteration divisible by this, and save if --save is given."""
    exit_duration_in_mins: Positive | None = None
    """Stop after this many minutes, and save if --save is given."""
    bptt_steps: Size | None = None
    """Truncated backpropagation in time: windows of this many time steps, each a micro-batch."""
    seed: Count = 1234
    """Seed of initial weights, data order, augmentation and dropout."""
    precision: Annotated[str, PRECISIONS] = "fp32"
    """Types of weights and products."""
    sparse_products: Literal["auto", "off"] = "auto"
    """Compute products with spikes as sums over the nonzero values, on CPUs, if at most 40 % are nonzero."""
    deterministic: bool = False
    """Same bits in every run with the same layout, devices and versions; slower algorithms on GPUs."""
    cuda_graphs: Literal["off", "on"] = "off"
    """Capture all layers in CUDA graphs, or fail; faster if Python is slower than the GPU."""
    loss: Annotated[str, LOSSES] = "cross-entropy"
    """Training loss, averaged over samples."""
    label_smoothing: FractionBelowOne = 0.0
    """Share of the target spread evenly over all classes."""

    @property
    def finds_micro_batch(self) -> bool:
        """Whether the start of the run finds the micro-batch size."""
        return isinstance(self.micro_batch_size, _Auto)

    def length(self, epoch_samples: int, iteration: int = 0, consumed_samples: int = 0) -> Length:
        """A training's length, for epochs of `epoch_samples` samples; 0 iterations with --evaluate-only.

        Args:
            iteration: steps done, maybe with another global batch size.
            consumed_samples: samples used in these steps; they count towards --train-samples and --train-epochs.

        Raises:
            ValueError: the training is shorter than one iteration.
        """
        epoch = Fraction(epoch_samples, self.global_batch_size)
        if self.evaluate_only:
            return Length(0, epoch, epoch_samples)
        if self.train_samples is not None:
            samples = self.train_samples
            asked = f"--train-samples {samples}"
        elif self.train_epochs is not None:
            samples = self.train_epochs * epoch_samples
            asked = f"--train-epochs {self.train_epochs} of {epoch_samples} training samples"
        else:
            return Length(self.train_iters or 0, epoch, epoch_samples)
        # A smaller last batch would change the gradient's weight per sample, and batch norm's statistics.
        # Iterations done may have had another batch size: only the samples to go are divided by this one.
        to_go, left_over = divmod(max(samples - consumed_samples, 0), self.global_batch_size)
        if iteration + to_go == 0:
            raise ValueError(f"{asked} is less than one --global-batch-size {self.global_batch_size}")
        return Length(iteration + to_go, epoch, epoch_samples, left_over)

    @property
    def micro_batches(self) -> int:
        """In a global batch, over all replicas. The last one may be smaller."""
        return -(-self.global_batch_size // self.micro_batch_size)

    def problems(self) -> list[str]:
        """Contradictions, with values and flags."""
        wrong = []
        if self.micro_batch_size > self.global_batch_size:
            wrong.append(
                f"--micro-batch-size {self.micro_batch_size} is larger than "
                f"--global-batch-size {self.global_batch_size}"
            )
        lengths = []
        for name in LENGTHS:
            value = getattr(self, name)
            if value is not None:
                lengths.append(f"{flag(name)} {value}")
        if len(lengths) > 1:
            wrong.append(f"{' and '.join(lengths)} are {len(lengths)} lengths; give one")
        return wrong
