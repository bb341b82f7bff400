"""What is saved, and what a run starts from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from megasnn.config.checks import at_least, flag, needs


@dataclass(frozen=True)
class CheckpointConfig:
    """A checkpoint continues on any layout."""

    for_runs: ClassVar[bool] = True

    save: str | None = None
    """Folder to save checkpoints in; one is always saved at the end."""
    save_interval: int | None = None
    """Also save every so many iterations."""
    async_save: bool = False
    """Write checkpoints while training goes on. It stops only to copy what is saved into memory of the CPU; one is
    written at a time, and the end of the run waits for the last."""
    keep_last: int | None = None
    """Keep only so many checkpoints, those saved last. One that is being read goes later."""
    keep_every: int | None = None
    """With --keep-last: also keep those of iterations divisible by this."""
    keep_best: bool = False
    """Also save whenever an evaluation finds the highest accuracy so far, and keep that checkpoint beside those of
    --keep-last; best_checkpointed_iteration.txt names it."""
    load: str | None = None
    """Folder to continue from, at its latest checkpoint; or one of its folders iter_N. Without one there the run stops,
    unless --save is the same folder: then it starts from the beginning, as the first run of a job that is restarted
    does."""
    ckpt_step: int | None = None
    """Continue from the checkpoint of this iteration instead of the latest."""
    finetune: bool = False
    """Take only the weights from --load; start at iteration 0 with a new optimizer."""
    reset_head: bool = False
    """With --finetune: leave the last layer as it is initialised, for another task or number of classes."""
    no_load_optim: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Continue with a new optimizer state."""
    exit_on_missing_checkpoint: bool = False
    """Stop when --load holds no checkpoint, also when --save is the same folder."""
    load_spikingjelly: str | None = None
    """File with a state_dict of SpikingJelly's model to start from."""

    @property
    def saves_where_it_loads(self) -> bool:
        """However the two flags spell it."""
        return bool(self.save and self.load) and Path(str(self.save)).resolve() == Path(str(self.load)).resolve()

    @property
    def may_begin_anew(self) -> bool:
        """Whether --load may hold no checkpoint: a job that saves where it loads finds none the first time."""
        asked_for = self.exit_on_missing_checkpoint or self.ckpt_step is not None or self.finetune
        return not asked_for and self.saves_where_it_loads

    def problems(self) -> list[str]:
        wrong = at_least(self, 1, "save_interval", "keep_last", "keep_every") + at_least(self, 0, "ckpt_step")
        wrong += needs(self, "save", "save_interval", "async_save", "keep_last", "keep_best")
        wrong += needs(self, "keep_last", "keep_every") + needs(self, "finetune", "reset_head")
        wrong += needs(self, "load", "ckpt_step", "finetune", "no_load_optim", "exit_on_missing_checkpoint")
        wrong += [
            f"{flag(name)} is empty; give a folder or leave it out"
            for name in ("save", "load")
            if (path := getattr(self, name)) is not None and not path.strip()
        ]
        if self.load and self.load_spikingjelly:
            wrong.append(
                f"--load {self.load} and --load-spikingjelly {self.load_spikingjelly} both give the initial weights"
            )
        return wrong
