"""A run's whole configuration: the model, the shared parts, checkpoints and logging."""

from __future__ import annotations

from dataclasses import dataclass as plain_dataclass
from dataclasses import field
from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass

from megasnn.common.files import STRICT
from megasnn.config.checks import Count, FileName, Size, needs
from megasnn.config.data import DataConfig
from megasnn.config.neuron import NeuronConfig
from megasnn.config.optimizer import OptimizerConfig
from megasnn.config.parallel import ParallelConfig
from megasnn.config.training import TrainingConfig

WEIGHTS = (".pt", ".pth", ".tar", ".bin", ".safetensors")
"""Ends of the names of files of weights."""
PICTURE_LINES = 10
"""Log lines between two pictures of spikes."""


@dataclass(frozen=True, config=STRICT)
class CheckpointConfig:
    """A checkpoint continues on any layout."""

    save: FileName | None = None
    """Folder to save checkpoints in; one is always saved at the end."""
    save_interval: Size | None = None
    """Also save every so many iterations."""
    async_save: bool = False
    """Write checkpoints by a thread, from a copy in memory of the CPU, while training goes on."""
    keep_last: Size | None = None
    """Keep only so many checkpoints, the latest ones."""
    keep_every: Size | None = None
    """With --keep-last: also keep those of iterations divisible by this."""
    keep_best: bool = False
    """Also save and keep the checkpoint of the highest accuracy that an evaluation has found."""
    load: FileName | None = None
    """Folder to continue from, or one of its folders iter_N, or a file of SpikingJelly's weights to start from. Without
    a checkpoint there the run ends with an error; if --save names the same folder it starts anew, with a warning."""
    exit_on_missing_checkpoint: bool = False
    """End with an error when --load finds no checkpoint, also if --save names the same folder."""
    ckpt_step: Count | None = None
    """Continue from the checkpoint of this iteration instead of the latest."""
    finetune: bool = False
    """Take only the weights from --load, except a last layer of another shape; start at iteration 0."""

    ema: bool = True
    """With --evaluate-only and --finetune take the average of the weights where --load has one; --no-ema never."""

    @property
    def saves_where_it_loads(self) -> bool:
        """True when --save and --load are one folder, however the two flags spell it."""
        return bool(self.save and self.load) and Path(str(self.save)).resolve() == Path(str(self.load)).resolve()

    @property
    def loads_weights(self) -> bool:
        """True when --load names a file of weights, rather than a folder; by its name, which all ranks see alike."""
        return self.load is not None and Path(self.load).suffix in WEIGHTS

    @property
    def may_begin_anew(self) -> bool:
        """True when --load need not hold a checkpoint: a job that saves where it loads finds none the first time."""
        must_exist = self.exit_on_missing_checkpoint or self.ckpt_step is not None or self.finetune
        return self.saves_where_it_loads and not must_exist

    def problems(self) -> list[str]:
        """Contradictions, with values and flags."""
        wrong = needs(self, "save", "save_interval", "async_save", "keep_last", "keep_best")
        wrong += needs(self, "keep_last", "keep_every")
        return wrong + needs(self, "load", "exit_on_missing_checkpoint", "ckpt_step", "finetune")


@dataclass(frozen=True, config=STRICT)
class LoggingConfig:
    """One rank writes all logs."""

    log_interval: Size = 10
    """Iterations between two log lines; spikes are drawn at every tenth of them."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard; without it nothing is written."""
    profile_step: Size | None = None
    """Iteration of which torch.profiler writes a trace for each rank of the first replica."""
    eval_interval: Size | None = None
    """Iterations between two evaluations; by default only one at the end."""
    eval_iters: Count | None = None
    """Global batches per evaluation; by default all of the validation data, 0 never evaluates."""

    @property
    def picture_interval(self) -> int:
        """Iterations between two pictures; 0 where there are none."""
        return 0 if self.tensorboard_dir is None else PICTURE_LINES * self.log_interval


@plain_dataclass(frozen=True)
class PretrainConfig:
    """The parts that every model shares; what does not depend on a model takes this type.

    Attributes:
        model: a `megasnn.models.model.Model`, which needs this module.
    """

    model: Any
    neuron: NeuronConfig = field(default_factory=NeuronConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    @property
    def windows(self) -> int:
        """Number of windows of time steps in which each sample is shown; 1 without --bptt-steps."""
        steps = self.training.bptt_steps
        return 1 if steps is None else int(self.model.time_steps // steps)
