"""Folders of checkpoints to save in and to start from."""

from __future__ import annotations

from pathlib import Path

from pydantic.dataclasses import dataclass

from megasnn.config.checks import needs
from megasnn.config.fields import Count, FileName, Size
from megasnn.files import STRICT

WEIGHTS = (".pt", ".pth", ".tar", ".bin", ".safetensors")
"""Ends of the names of files of weights."""


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
    """Folder to continue from, or one of its folders iter_N, or a file of SpikingJelly's weights to start from. A run
    that saves where it loads starts from the beginning where there is no checkpoint yet."""
    ckpt_step: Count | None = None
    """Continue from the checkpoint of this iteration instead of the latest."""
    finetune: bool = False
    """Take only the weights from --load, except a last layer of another shape; start at iteration 0."""

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
        return self.ckpt_step is None and not self.finetune and self.saves_where_it_loads

    def problems(self) -> list[str]:
        """Contradictions, with values and flags."""
        wrong = needs(self, "save", "save_interval", "async_save", "keep_last", "keep_best")
        return wrong + needs(self, "keep_last", "keep_every") + needs(self, "load", "ckpt_step", "finetune")
