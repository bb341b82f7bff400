"""How fast checkpoints are saved, loaded and laid out anew, and how long training waits for it.

A Spikformer with its optimizer state is saved and loaded in one process, beside `cp` of the same files in the same
folder with all of it forced to the disk, as a save is. A save in the background takes what training lost through it:
the time until it was done, less what the steps done meanwhile take when nothing is being saved. Beside it stands what
training loses to `cp` of the same files by a process of the lowest priority: no way of writing them takes less.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from megasnn.checkpoint import AsyncWriter, LocalState, Progress, SyncWriter, load_checkpoint
from megasnn.checkpoint.folder import step_folder
from megasnn.config.checks import at_least
from megasnn.config.neuron import NeuronConfig
from megasnn.config.values import to_dict
from megasnn.models.spikformer.dimensions import Spikformer
from megasnn.parallel_state import ParallelState, destroy_model_parallel, initialize_model_parallel
from tools.benchmark.conversion import ConversionTask, measure_conversion
from tools.benchmark.harness import Case, Figures, Flags, Part, ratios, rounds, say, seconds, summary
from tools.benchmark.log import Line
from tools.benchmark.table import change, table
from tools.benchmark.training_steps import megasnn_step

FIGURES = ("save", "load", "cp", "stall", "save_call", "after_call", "cp_stall", "step")
PARTS_OF_A_SAVE = ("stall", "after_call", "save_call", "cp_stall")
NOT_COPIED = ("after_call", "step")  # seconds in which no bytes of a checkpoint are moved
HEADINGS = ("", "s", "GB/s", "", "change")
_IDLE = ("nice", "-n", "19")


@dataclass(frozen=True)
class CheckpointBenchmark(Flags):
    """The default model's checkpoint has 1.1 GB, two thirds of it optimizer state; on disk it takes five times that."""

    embed_dim: int = 768
    """Channels of the Spikformer."""
    depth: int = 12
    """Its blocks."""
    num_heads: int = 12
    """Its heads."""
    tensor: int = 2
    """Tensor-parallel size of the layout that the checkpoint is converted to."""
    pipeline: int = 2
    """Its pipeline-parallel size."""
    rounds: int = 3
    """How often everything is measured; one untimed round comes before."""
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
        wrong = at_least(self, 1, "tensor", "pipeline", "rounds", "steps", "threads")
        wrong += self.model().problems(self.tensor)
        if self.folder is not None and not self.folder.is_dir():
            wrong.append(f"--folder {self.folder} is no folder")
        return wrong


def measure(flags: CheckpointBenchmark) -> Iterator[Part]:
    """Saving and loading in this process, then the conversion of what was saved in a process of its own."""
    with _alone(flags) as state, tempfile.TemporaryDirectory(prefix="megasnn-benchmark-", dir=flags.folder) as folder:
        run = _Run(flags, Path(folder), state)
        measured = [run.round(number) for number in rounds(flags.rounds, untimed=1)][1:]
        say("laying out for other ranks")
        task = ConversionTask(run.saved, Path(folder) / "converted", flags.tensor, flags.pipeline)
        conversion = measure_conversion(task)
    times = {figure: [each[figure] for each in measured] for figure in FIGURES}
    sizes = {"embed_dim": flags.embed_dim, "depth": flags.depth, "layout": f"tp{flags.tensor}pp{flags.pipeline}"}
    figures: Figures = {
        "row": "checkpoint",
        "configuration": {"row": "checkpoint", **sizes},
        "gigabytes": run.gigabytes,
        "seconds": {figure: summary(values) for figure, values in times.items()},
        "save_ratio": ratios(times["cp"], times["save"]),
        "load_ratio": ratios(times["cp"], times["load"]),
        **{f"{figure}_ratio": ratios(times[figure], times["save"]) for figure in PARTS_OF_A_SAVE},
        "conversion": conversion,
    }
    yield Part([figures])


@contextmanager
def _alone(flags: CheckpointBenchmark) -> Iterator[ParallelState]:
    """The grid of one process, and the threads it trains with."""
    threads = torch.get_num_threads()
    torch.set_num_threads(flags.threads or max(1, (os.cpu_count() or 1) - 1))
    try:
        yield initialize_model_parallel(device=torch.device("cpu"))
    finally:
        destroy_model_parallel()
        torch.set_num_threads(threads)


class _Run:
    """
    Attributes:
        saved: the checkpoint of the last round.
        gigabytes: of its files, 10^9 bytes.
    """

    def __init__(self, flags: CheckpointBenchmark, folder: Path, state: ParallelState) -> None:
        self._flags, self._folder = flags, folder
        self._work = megasnn_step(flags.model(), 1, 1, "fp32", "auto")
        self._state = LocalState(self._work.engine.distributed.tensors, self._work.engine.steps.optimizer)
        self._identity = {"model": to_dict(flags.model()), "neuron": to_dict(NeuronConfig())}
        self._step()
        self._at_once = SyncWriter(folder / "at_once", process_group=None, report=lambda text: None)
        self._aside = AsyncWriter(folder / "aside", process_group=None, report=lambda text: None)

    def round(self, number: int) -> dict[str, float]:
        """Seconds of each of FIGURES."""
        save = seconds(lambda: self._save(self._at_once, number))
        self.saved = step_folder(self._folder / "at_once", number)
        files = [path for path in self.saved.iterdir() if path.is_file()]
        self.gigabytes = sum(path.stat().st_size for path in files) / 1e9
        copied = self._folder / "copy"
        copied.mkdir()
        copy = seconds(lambda: _copy(files, copied))
        shutil.rmtree(copied)
        load = seconds(self._load)
        measured = {"save": save, "cp": copy, "load": load, **self._in_the_background(number, files)}
        for path in (self._folder / "aside", self._folder / "at_once"):
            _remove_all_but(path, number)
        return measured

    def _in_the_background(self, number: int, files: list[Path]) -> dict[str, float]:
        """Steps while nothing is saved, then while a save is written, then again, as the machine's speed drifts."""
        quiet = self._quiet_steps()
        began = time.perf_counter()
        self._save(self._aside, number)
        call = time.perf_counter() - began
        elapsed, steps = self._train_while(began, lambda: self._aside.busy)
        self._aside.finish()
        quiet += self._quiet_steps()
        copied = self._folder / "copy_aside"
        copied.mkdir()
        began = time.perf_counter()
        copy = threading.Thread(target=_copy, args=(files, copied, _IDLE))
        copy.start()
        copy_elapsed, copy_steps = self._train_while(began, copy.is_alive)
        shutil.rmtree(copied)
        quiet += self._quiet_steps()
        step = median(quiet)
        return {
            "stall": elapsed - steps * step,
            "save_call": call,
            "after_call": elapsed - steps * step - call,
            "cp_stall": copy_elapsed - copy_steps * step,
            "step": step,
        }

    def _quiet_steps(self) -> list[float]:
        return [seconds(self._step) for _ in range(self._flags.steps)]

    def _train_while(self, began: float, busy: Callable[[], bool]) -> tuple[float, int]:
        """Seconds since then, and steps, when the step ends in which something else has."""
        steps = 0
        while busy():
            self._step()
            steps += 1
        return time.perf_counter() - began, steps

    def _step(self) -> None:
        self._work.forward_backward()
        self._work.update()

    def _save(self, saver: SyncWriter, number: int) -> None:
        saver.save(Progress(number, number, config=self._identity), self._state)
        if saver.failed:
            raise OSError(f"the checkpoint could not be written to {self._folder}; give another --folder")

    def _load(self) -> None:
        load_checkpoint(self.saved.parent, self._state)


def _copy(files: list[Path], folder: Path, priority: tuple[str, ...] = ()) -> None:
    subprocess.run([*priority, "cp", *map(str, files), str(folder)], check=True)
    subprocess.run([*priority, "sync", *(str(folder / file.name) for file in files), str(folder)], check=True)


def _remove_all_but(folder: Path, number: int) -> None:
    for path in folder.glob("iter_*"):
        if path != step_folder(folder, number):
            shutil.rmtree(path)


def report(flags: CheckpointBenchmark, lines: Sequence[Line], earlier: Sequence[Line | None]) -> str:
    (line,), (last,) = lines, earlier
    size, conversion = line["gigabytes"], line["conversion"]

    def row(label: str, figure: str, compared: str = "") -> list[str]:
        value = line["seconds"][figure]["median"]
        speed = "" if figure in NOT_COPIED else f"{size / value:.2f}"
        return [label, f"{value:.2f}", speed, compared, change(line, last, "seconds", figure, "median")]

    def of_a_save(label: str, figure: str) -> list[str]:
        return row(label, figure, f"{line[f'{figure}_ratio']['median']:.2f} of a save")

    layout, took = line["configuration"]["layout"], conversion["seconds"]
    rows = [
        row("cp of its files, and sync", "cp"),
        row("save", "save", f"{line['save_ratio']['median']:.2f} x cp"),
        row("load", "load", f"{line['load_ratio']['median']:.2f} x cp"),
        of_a_save("training lost, in the background", "stall"),
        of_a_save("  of which before the next step", "save_call"),
        of_a_save("  of which after that", "after_call"),
        of_a_save("training lost to cp with nice 19", "cp_stall"),
        row("a training step", "step"),
        [f"reshard to {layout}", f"{took:.2f}", f"{size / took:.2f}", "", change(line, last, "conversion", "seconds")],
    ]
    return (
        f"Checkpoint of {size:.2f} GB, medians of the rounds; {line['machine']['cpu']}\n\n{table(HEADINGS, rows)}\n\n"
        f"peak of reshard {conversion['peak_mb']:.0f} MB above the start, "
        f"largest tensor {conversion['largest_mb']:.1f} MB"
    )


CHECKPOINTS = Case(CheckpointBenchmark, measure, report)
