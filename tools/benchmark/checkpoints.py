"""Speed of saving and loading checkpoints, beside `cp` of the same files, and what a save in the background costs.

All of it is forced to the disk, as a save is. Training loses to a save in the background the time until it was done,
less what the steps done meanwhile take when nothing is saved. Beside it stands what training loses to `cp` of the same
files by a process of the lowest priority: no way of writing them takes less.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import ClassVar

import torch

from megasnn.checkpoint.folder import step_folder
from megasnn.checkpoint.format import Progress
from megasnn.checkpoint.load import load_checkpoint
from megasnn.checkpoint.optimizer_state import LocalState
from megasnn.checkpoint.writer import Writer
from megasnn.config import TrainingConfig
from megasnn.config.checks import at_least
from megasnn.config.training import Length
from megasnn.config.values import to_dict
from megasnn.engine import Engine
from megasnn.models.spikformer.model import Spikformer
from tools.benchmark.harness import Case, Column, Figures, ratios, rounds, seconds, summary
from tools.benchmark.steps import ENDLESS, Work, random_batch

IDLE = ("nice", "-n", "19")
LABELS = {
    "cp": "cp of its files, and sync",
    "save": "save",
    "load": "load",
    "stall": "training lost to a save in the background",
    "call": "  of which before the next step",
    "cp_stall": "training lost to cp with nice 19",
    "step": "a training step",
}


@dataclass(frozen=True)
class Checkpoints(Case):
    """Saving and loading a Spikformer with its optimizer state: 1.1 GB, two thirds of it optimizer state."""

    columns: ClassVar[Sequence[Column]] = (
        ("", "row", ""),
        ("s", "seconds", ".2f"),
        ("GB/s", "gigabytes_per_s", ".2f"),
        ("x cp", "x_cp", ".2f"),
        ("x save", "x_save", ".2f"),
    )
    notes: ClassVar[str] = "x cp, x save: seconds against cp of the same files and against a save, round by round"

    rounds: int = 3
    """How often everything is measured; one untimed round comes before."""
    embed_dim: int = 768
    """Channels of the Spikformer."""
    depth: int = 12
    """Its blocks."""
    num_heads: int = 12
    """Its heads."""
    steps: int = 5
    """Training steps before and again after each save in the background, which tell what a step takes without one."""
    threads: int | None = None
    """Threads that train; by default one core is left, as where a GPU trains."""
    folder: Path | None = None
    """Where to write; by default the system's folder for temporary files."""

    def model(self) -> Spikformer:
        """Images of 16 tokens: a step is mostly its parameters, as the checkpoint is."""
        return Spikformer(embed_dim=self.embed_dim, depth=self.depth, num_heads=self.num_heads, image_size=16)

    def problems(self) -> list[str]:
        wrong = at_least(self, 1, "rounds", "steps", "threads") + self.model().problems(1)
        if self.folder is not None and not self.folder.is_dir():
            wrong.append(f"--folder {self.folder} is no folder")
        return wrong

    def measure(self) -> list[Figures]:
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads or max(1, (os.cpu_count() or 1) - 1))
        training = TrainingConfig(micro_batch_size=1, global_batch_size=1)
        config = Work("checkpoints", "megasnn", self.model(), training).configuration()
        try:
            with (
                Engine(config, length=Length(ENDLESS)) as engine,
                tempfile.TemporaryDirectory(prefix="megasnn-benchmark-", dir=self.folder) as folder,
            ):
                run = _Run(self, engine, Path(folder))
                found = [run.round(number) for number in rounds(self.rounds, untimed=1)][1:]
        finally:
            torch.set_num_threads(before)
        times = {name: [each[name] for each in found] for name in LABELS}
        return [_figures(name, times, run.gigabytes) for name in LABELS]


def _figures(name: str, times: dict[str, list[float]], gigabytes: float) -> Figures:
    moves = name in ("cp", "save", "load")
    return {
        "row": LABELS[name],
        "seconds": summary(times[name]),
        "gigabytes_per_s": gigabytes / median(times[name]) if moves else None,
        "x_cp": ratios(times[name], times["cp"]) if moves else None,
        "x_save": None if name == "step" else ratios(times[name], times["save"]),
    }


class _Run:
    """Attributes: gigabytes: of the checkpoint's files, 10^9 bytes."""

    gigabytes = 0.0

    def __init__(self, case: Checkpoints, engine: Engine, folder: Path) -> None:
        self._case, self._engine, self._folder = case, engine, folder
        self._batch = random_batch(case.model(), 1)
        self._state = LocalState(engine.distributed.tensors, engine.step.optimizer)
        self._identity = {"model": to_dict(case.model())}
        self._step()
        self._writers: dict[str, Writer] = {
            "at_once": Writer(folder / "at_once", process_group=None, report=lambda text: None),
            "aside": Writer(folder / "aside", process_group=None, background=True, report=lambda text: None),
        }

    def round(self, number: int) -> dict[str, float]:
        """Seconds of each of LABELS."""
        save = seconds(lambda: self._save("at_once", number))
        saved = step_folder(self._folder / "at_once", number)
        files = [path for path in saved.iterdir() if path.is_file()]
        self.gigabytes = sum(path.stat().st_size for path in files) / 1e9
        copy = seconds(self._copied(files))
        load = seconds(lambda: load_checkpoint(saved.parent, self._state))
        aside = self._in_the_background(number, files)
        for path in self._folder.glob("*/iter_*"):
            if path.name != saved.name:
                shutil.rmtree(path)
        return {"save": save, "cp": copy, "load": load, **aside}

    def _in_the_background(self, number: int, files: list[Path]) -> dict[str, float]:
        """Steps while nothing is saved, then while a save is written, then again, as the machine's speed drifts."""
        quiet = self._quiet_steps()
        began = time.perf_counter()
        self._save("aside", number)
        call = time.perf_counter() - began
        elapsed, steps = self._train_while(began, lambda: self._writers["aside"].busy)
        self._writers["aside"].finish()
        quiet += self._quiet_steps()
        began = time.perf_counter()
        copy = threading.Thread(target=self._copied(files, IDLE))
        copy.start()
        copy_elapsed, copy_steps = self._train_while(began, copy.is_alive)
        step = median([*quiet, *self._quiet_steps()])
        return {
            "stall": elapsed - steps * step,
            "call": call,
            "cp_stall": copy_elapsed - copy_steps * step,
            "step": step,
        }

    def _quiet_steps(self) -> list[float]:
        return [seconds(self._step) for _ in range(self._case.steps)]

    def _train_while(self, began: float, busy: Callable[[], bool]) -> tuple[float, int]:
        """Seconds since then, and steps, when the step ends in which something else has."""
        steps = 0
        while busy():
            self._step()
            steps += 1
        return time.perf_counter() - began, steps

    def _step(self) -> None:
        self._engine.train_step(*self._batch)

    def _save(self, name: str, number: int) -> None:
        self._writers[name].save(Progress(number, number, config=self._identity), self._state)
        if self._writers[name].failed:
            raise OSError(f"the checkpoint could not be written to {self._folder}; give another --folder")

    def _copied(self, files: list[Path], priority: tuple[str, ...] = ()) -> Callable[[], None]:
        def copy() -> None:
            folder = Path(tempfile.mkdtemp(dir=self._folder))
            subprocess.run([*priority, "cp", *map(str, files), str(folder)], check=True)
            copies = [str(folder / file.name) for file in files]
            subprocess.run([*priority, "sync", *copies, str(folder)], check=True)
            shutil.rmtree(folder)

        return copy
