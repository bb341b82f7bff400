"""A run's whole configuration: the model, the shared parts, checkpoints and logging."""

from __future__ import annotations

from dataclasses import dataclass as plain_dataclass
from dataclasses import field
from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass

from megasnn.common.files import STRICT
from megasnn.common.grid import ContextCut
from megasnn.config.checks import Count, FileName, Size, needs
from megasnn.config.data import DataConfig
from megasnn.config.neuron import NeuronConfig
from megasnn.config.optimizer import OptimizerConfig
from megasnn.config.parallel import ParallelConfig
from megasnn.config.training import TrainingConfig

WEIGHT_SUFFIXES = (".pt", ".pth", ".tar", ".bin", ".safetensors")
"""Suffixes of weight files."""


@dataclass(frozen=True, config=STRICT)
class CheckpointConfig:
    """A checkpoint continues on any layout."""

    save: FileName | None = None
    """Folder for checkpoints; one is always saved at the end."""
    save_interval: Size | None = None
    """Iterations between two saves."""
    async_save: bool = False
    """Write checkpoints in a thread, from a copy in CPU memory, while training goes on."""
    keep_last: Size | None = None
    """Number of latest checkpoints to keep; by default all."""
    keep_every: Size | None = None
    """With --keep-last, also keep checkpoints of iterations divisible by this."""
    keep_best: bool = False
    """Also save and keep the checkpoint with the best accuracy in evaluations."""
    load: FileName | None = None
    """Folder to continue from, or one of its folders iter_N, or a file of SpikingJelly's weights to start from. Without
    a checkpoint there the run ends with an error; if --save names the same folder it starts anew, with a warning."""
    exit_on_missing_checkpoint: bool = False
    """End with an error when --load finds no checkpoint, also if --save names the same folder."""
    ckpt_step: Count | None = None
    """Iteration of the checkpoint to load; by default the latest."""
    finetune: bool = False
    """Load only the weights, except a last layer of another shape; start at iteration 0."""
    ema: bool = True
    """With --evaluate-only, --finetune and weight files, load the moving average of the weights if --load has one."""

    @property
    def saves_where_it_loads(self) -> bool:
        """Whether --save and --load are one folder, also by different spellings."""
        return bool(self.save and self.load) and Path(str(self.save)).resolve() == Path(str(self.load)).resolve()

    @property
    def loads_weights(self) -> bool:
        """Whether --load is a weight file rather than a folder. Decided by name, which is the same on all ranks."""
        return self.load is not None and Path(self.load).suffix in WEIGHT_SUFFIXES

    @property
    def may_begin_anew(self) -> bool:
        """Whether a run without a checkpoint in --load starts from initial weights."""
        # The first start of a job that is restarted with the same command finds no checkpoint.
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
    """Iterations between two log lines; every tenth line comes with pictures of spikes."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard; by default none is written."""
    profile_step: Size | None = None
    """Iteration to trace with torch.profiler, on each rank of the first replica."""
    eval_interval: Size | None = None
    """Iterations between two evaluations; by default only one at the end."""
    eval_iters: Count | None = None
    """Global batches per evaluation; by default all validation data, 0 never evaluates."""


@plain_dataclass(frozen=True)
class PretrainConfig:
    """A run's configuration: a model, and the parts that all models share.

    Attributes:
        model: a `megasnn.models.model.Model`. That module imports this one, so the type is not written here.
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
        """Windows in time per sample; 1 without --bptt-steps."""
        steps = self.training.bptt_steps
        return 1 if steps is None else int(self.model.time_steps // steps)

    @property
    def context_cut(self) -> ContextCut:
        """How context-parallel ranks share a micro-batch: `context_parallel_cut` with auto resolved."""
        if self.parallel.context_parallel_cut != "auto":
            return self.parallel.context_parallel_cut
        # Ranks with samples of their own exchange statistics alone; rows are exchanged in every convolution.
        has_enough = self.training.micro_batch_size >= self.parallel.context_parallel_size
        return "samples" if has_enough else "rows"
