"""Where checkpoints are saved, and what a run starts from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro
from pydantic import PlainValidator
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from megasnn.config.checks import flag, needs
from megasnn.config.fields import Count, Size
from megasnn.files import STRICT


def _folder(value: object) -> object:
    if not isinstance(value, str) or not value.strip():
        raise PydanticCustomError("folder", "Input should be the name of a folder")
    return value


Folder = Annotated[str, PlainValidator(_folder)]
"""A name that need not be UTF-8, as names of files need not."""
WEIGHTS = (".pt", ".pth", ".tar", ".bin", ".safetensors")
"""Ends of the names of files of weights."""


@dataclass(frozen=True, config=STRICT)
class CheckpointConfig:
    """A checkpoint continues on any layout."""

    save: Folder | None = None
    """Folder to save checkpoints in; one is always saved at the end."""
    save_interval: Size | None = None
    """Also save every so many iterations."""
    async_save: bool = False
    """Write checkpoints while training goes on. It stops only to copy what is saved into memory of the CPU."""
    keep_last: Size | None = None
    """Keep only so many checkpoints, those saved last."""
    keep_every: Size | None = None
    """With --keep-last: also keep those of iterations divisible by this."""
    keep_best: bool = False
    """Also save whenever an evaluation finds the highest accuracy so far, and keep that checkpoint beside those of
    --keep-last; best_checkpointed_iteration.txt names it."""
    load: Folder | None = None
    """Folder to continue from, at its latest checkpoint; or one of its folders iter_N; or a file of SpikingJelly's
    weights to start from (.pt, .pth, .safetensors). Without a checkpoint there the run stops, unless --save is the same
    folder: then it starts from the beginning, as the first run of a job that is restarted does."""
    ckpt_step: Count | None = None
    """Continue from the checkpoint of this iteration instead of the latest."""
    finetune: bool = False
    """Take only the weights from --load; start at iteration 0 with a new optimizer."""
    reset_head: bool = False
    """With --finetune: leave the last layer as it is initialised, for another task or number of classes."""
    no_load_optim: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Continue with a new optimizer state."""

    @property
    def saves_where_it_loads(self) -> bool:
        """Whether --save and --load are one folder, however the two flags spell it."""
        return bool(self.save and self.load) and Path(str(self.save)).resolve() == Path(str(self.load)).resolve()

    @property
    def loads_weights(self) -> bool:
        """Whether --load names a file of weights, rather than a folder; by its name, which all ranks see alike."""
        return self.load is not None and Path(self.load).suffix in WEIGHTS

    @property
    def may_begin_anew(self) -> bool:
        """Whether --load may hold no checkpoint: a job that saves where it loads finds none the first time."""
        return self.ckpt_step is None and not self.finetune and self.saves_where_it_loads

    def problems(self) -> list[str]:
        """What contradicts itself, with values and flags."""
        wrong = needs(self, "save", "save_interval", "async_save", "keep_last", "keep_best")
        wrong += needs(self, "keep_last", "keep_every") + needs(self, "finetune", "reset_head")
        wrong += needs(self, "load", "ckpt_step", "finetune", "no_load_optim")
        if self.loads_weights:
            wrong += [
                f"--load {self.load} is a file of weights: leave {flag(name)} out"
                for name in ("ckpt_step", "finetune", "reset_head", "no_load_optim")
                if getattr(self, name)
            ]
        return wrong
