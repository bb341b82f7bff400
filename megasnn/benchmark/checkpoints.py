"""How fast checkpoints are saved, loaded and laid out anew, and how long training waits for it.

A Spikformer with its optimizer state is saved and loaded in one process, beside `cp` of the same files in the same
folder with all of it forced to the disk, as a save is. A save in the background takes what training lost through it:
the time until it was done, less what the steps done meanwhile take when nothing is being saved. Beside it stands what
training loses to `cp` of the same files by a process of the lowest priority: no way of writing them takes less. Before
the next step all values are copied; beside it stands the copy of as many bytes that lie in one piece.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from megasnn.benchmark.conversion import ConversionTask, measure_conversion
from megasnn.benchmark.log import append_lines, latest_alike, read_lines, surroundings
from megasnn.benchmark.results import summary
from megasnn.benchmark.workloads import MegaSNNStep
from megasnn.checkpoint import load_checkpoint
from megasnn.checkpoint.folder import step_folder
from megasnn.checkpoint.saver import Saver
from megasnn.checkpoint.saving import Progress
from megasnn.checkpoint.snapshot import COPYING_THREADS
from megasnn.config.checks import ConfigError, at_least
from megasnn.config.neuron import NeuronConfig
from megasnn.config.serialise import to_dict
from megasnn.models.spikformer.dimensions import SpikformerConfig
from megasnn.parallel_state import ParallelState, destroy_model_parallel, initialize_model_parallel

FIGURES = ("save", "load", "cp", "stall", "save_call", "memcpy", "after_call", "cp_stall", "step")
_IDLE = ("nice", "-n", "19")


@dataclass(frozen=True)
class CheckpointBenchmark:
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
    output: Path = Path("benchmark.jsonl")
    """File to append one JSON line to; earlier lines in it are compared with."""

    def model(self) -> SpikformerConfig:
        """Images of 16 tokens: a step is mostly its parameters, as the checkpoint is."""
        return SpikformerConfig(embed_dim=self.embed_dim, depth=self.depth, num_heads=self.num_heads, image_size=16)

    def check(self) -> None:
        """Raises ConfigError with everything that cannot be run."""
        wrong = at_least(self, 1, "tensor", "pipeline", "rounds", "steps", "threads")
        wrong += self.model().problems(self.tensor)
        if self.folder is not None and not self.folder.is_dir():
            wrong.append(f"--folder {self.folder} is no folder")
        if wrong:
            raise ConfigError(wrong)


def run_checkpoints(config: CheckpointBenchmark) -> dict[str, Any]:
    """Measures, prints the figures, appends them to the log. Returns the line that was appended.

    Raises:
        ConfigError: values out of range.
        ValueError: the log holds a line that is not JSON.
    """
    config.check()
    earlier = read_lines(config.output)
    with _alone(config) as state, tempfile.TemporaryDirectory(prefix="megasnn-benchmark-", dir=config.folder) as folder:
        run = _Run(config, Path(folder), state)
        rounds = [run.round(number) for number in range(config.rounds + 1)][1:]
        _say("laying out for other ranks")
        task = ConversionTask(run.saved, Path(folder) / "converted", config.tensor, config.pipeline)
        conversion = measure_conversion(task)
    seconds = {figure: summary([each[figure] for each in rounds]) for figure in FIGURES}
    sizes = {"embed_dim": config.embed_dim, "depth": config.depth, "layout": f"tp{config.tensor}pp{config.pipeline}"}
    line = {
        **surroundings(None),
        "row": "checkpoint",
        "configuration": {"row": "checkpoint", **sizes},
        "gigabytes": run.gigabytes,
        "seconds": seconds,
        "save_ratio": summary([each["cp"] / each["save"] for each in rounds]),
        "load_ratio": summary([each["cp"] / each["load"] for each in rounds]),
        "stall_ratio": summary([each["stall"] / each["save"] for each in rounds]),
        "after_call_ratio": summary([each["after_call"] / each["save"] for each in rounds]),
        "save_call_ratio": summary([each["save_call"] / each["save"] for each in rounds]),
        "memcpy_ratio": summary([each["memcpy"] / each["save"] for each in rounds]),
        "cp_stall_ratio": summary([each["cp_stall"] / each["save"] for each in rounds]),
        "conversion": conversion,
    }
    append_lines(config.output, [line])
    print(_text(line, latest_alike(line, earlier)))
    print(f"\nappended to {config.output}")
    return line


@contextmanager
def _alone(config: CheckpointBenchmark) -> Iterator[ParallelState]:
    """The grid of one process, and the threads it trains with."""
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads or max(1, (os.cpu_count() or 1) - 1))
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

    def __init__(self, config: CheckpointBenchmark, folder: Path, state: ParallelState) -> None:
        self._config, self._folder = config, folder
        self._work = MegaSNNStep(config.model(), state, 1, 1, "fp32", "auto", "auto")
        self._engine, self._optimizer = self._work.engine, self._work.optimizer
        self._identity = {"model": to_dict(config.model()), "neuron": to_dict(NeuronConfig())}
        self._step()
        self._at_once, self._aside = (
            Saver(
                folder / name,
                process_group=None,
                background=name == "aside",
                report=lambda text: None,
            )
            for name in ("at_once", "aside")
        )
        self._aside.prepare(self._engine.tensors, self._optimizer)

    def round(self, number: int) -> dict[str, float]:
        """Seconds of each of FIGURES."""
        _say(f"round {number}/{self._config.rounds}")
        save = _seconds(lambda: self._save(self._at_once, number))
        self.saved = step_folder(self._folder / "at_once", number)
        files = [path for path in self.saved.iterdir() if path.is_file()]
        self.gigabytes = sum(path.stat().st_size for path in files) / 1e9
        copied = self._folder / "copy"
        copied.mkdir()
        copy = _seconds(lambda: _copy(files, copied))
        shutil.rmtree(copied)
        load = _seconds(self._load)
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
            "memcpy": self._memcpy_seconds(),
            "after_call": elapsed - steps * step - call,
            "cp_stall": copy_elapsed - copy_steps * step,
            "step": step,
        }

    def _memcpy_seconds(self) -> float:
        """As many bytes as a snapshot has, in as many parts as threads copy it; the memory is there already."""
        part = int(self.gigabytes * 1e9) // COPYING_THREADS
        pairs = [(np.ones(part, np.uint8), np.zeros(part, np.uint8)) for _ in range(COPYING_THREADS)]
        for _, target in pairs:
            target.fill(1)
        with ThreadPoolExecutor(COPYING_THREADS) as threads:
            return _seconds(lambda: list(threads.map(lambda pair: np.copyto(pair[1], pair[0]), pairs)))

    def _quiet_steps(self) -> list[float]:
        return [_seconds(self._step) for _ in range(self._config.steps)]

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

    def _save(self, saver: Saver, number: int) -> None:
        saver.save(Progress(number, number, {}, self._identity, {"bounds": ""}), self._engine.tensors, self._optimizer)
        if saver.failed:
            raise OSError(f"the checkpoint could not be written to {self._folder}; give another --folder")

    def _load(self) -> None:
        load_checkpoint(self.saved.parent, tensors=self._engine.tensors, optimizer=self._optimizer)


def _copy(files: list[Path], folder: Path, priority: tuple[str, ...] = ()) -> None:
    subprocess.run([*priority, "cp", *map(str, files), str(folder)], check=True)
    subprocess.run([*priority, "sync", *(str(folder / file.name) for file in files), str(folder)], check=True)


def _remove_all_but(folder: Path, number: int) -> None:
    for path in folder.glob("iter_*"):
        if path != step_folder(folder, number):
            shutil.rmtree(path)


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _text(line: dict[str, Any], last: Any) -> str:
    size, seconds, conversion = line["gigabytes"], line["seconds"], line["conversion"]

    def row(label: str, figure: str, note: str) -> str:
        value = seconds[figure]["median"]
        change = (
            ""
            if last is None or figure not in last["seconds"]
            else f"; before: {last['seconds'][figure]['median']:.2f} s"
        )
        return f"{label:<34}{value:>8.2f} s {size / value:>7.2f} GB/s   {note}{change}"

    layout = line["configuration"]["layout"]
    return "\n".join(
        [
            f"\nCheckpoint of {size:.2f} GB, medians of the rounds; {line['machine']['cpu']}\n",
            row("cp of its files, and sync", "cp", ""),
            row("save", "save", f"{line['save_ratio']['median']:.2f} x cp"),
            row("load", "load", f"{line['load_ratio']['median']:.2f} x cp"),
            row("training lost, in the background", "stall", f"{line['stall_ratio']['median']:.2f} of a save"),
            row("  of which before the next step", "save_call", f"{line['save_call_ratio']['median']:.2f} of a save"),
            row("  memcpy of as many bytes", "memcpy", f"{line['memcpy_ratio']['median']:.2f} of a save"),
            f"{'  of which after that':<34}{seconds['after_call']['median']:>8.2f} s                "
            f"{line['after_call_ratio']['median']:.2f} of a save",
            row("training lost to cp with nice 19", "cp_stall", f"{line['cp_stall_ratio']['median']:.2f} of a save"),
            f"{'a training step':<34}{seconds['step']['median']:>8.2f} s",
            f"{'reshard to ' + layout:<34}{conversion['seconds']:>8.2f} s {size / conversion['seconds']:>7.2f} GB/s   "
            f"peak {conversion['peak_mb']:.0f} MB above the start, largest tensor {conversion['largest_mb']:.1f} MB",
        ]
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
