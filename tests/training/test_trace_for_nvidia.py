"""What a trace asks of a GPU and of NVIDIA's tools, on stand-ins for parts of torch.cuda."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megasnn.config import ConfigError, parse, validate
from megasnn.engine import Engine
from megasnn.layers import ConvNormNeuron
from megasnn.models.layer import layer
from megasnn.models.model import run_config
from megasnn.models.spikformer.dimensions import Spikformer
from megasnn.parallel_state import destroy_model_parallel, initialize_model_parallel
from megasnn.telemetry.ranges import named, nvtx_ranges
from megasnn.training.loop import TrainingRun
from megasnn.training.trace import StepTrace
from tests.models.networks import between
from tests.training.runs import TINY, train, without_trial

SNAPSHOT = b"a snapshot"


class FakeCuda:
    """Parts of torch.cuda.

    Args:
        fails: the name of a call that fails.
    Attributes:
        told: what was called, in order.
        open: the NVTX ranges that lie in one another now.
    """

    def __init__(self, fails: str = "") -> None:
        self._fails = fails
        self.told: list[str] = []
        self.open: list[str] = []
        self.nvtx = SimpleNamespace(range_push=self._push, range_pop=self._pop)
        self.profiler = SimpleNamespace(start=lambda: self._tell("start"), stop=lambda: self._tell("stop"))
        self.memory = SimpleNamespace(_record_memory_history=self._record, _dump_snapshot=self._dump)

    def is_available(self) -> bool:
        return True

    def _tell(self, text: str) -> None:
        self.told.append(text)
        if self._fails == text.split()[0]:
            raise RuntimeError("refused")

    def _push(self, name: str) -> None:
        self._tell("/".join((*self.open, name)))
        self.open.append(name)

    def _pop(self) -> None:
        self.open.pop()

    def _record(self, enabled: str | None = "all", max_entries: int = 0) -> None:
        self._tell(f"record {enabled} {max_entries}")

    def _dump(self, path: str) -> None:
        assert Path(path).name.startswith(".partial-")
        Path(path).write_bytes(SNAPSHOT[:4])
        self._tell("dump")
        Path(path).write_bytes(SNAPSHOT)


@contextmanager
def on_a_gpu(fake: FakeCuda) -> Iterator[FakeCuda]:
    for_ranges = SimpleNamespace(cuda=fake, autograd=torch.autograd)
    with (
        mock.patch("megasnn.telemetry.ranges.torch", for_ranges),
        mock.patch("megasnn.training.trace.torch", SimpleNamespace(cuda=fake)),
        mock.patch("megasnn.training.loop.require_traceable", lambda config, device: None),
    ):
        yield fake


def model() -> Any:
    return between(lambda: [layer("{unit}", ConvNormNeuron(4, 4))])


def test_ranges_for_nsys_in_the_whole_of_a_step() -> None:
    flags = {"micro_batch_size": 4, "global_batch_size": 4, "train_iters": 9, "lr": 1e-2, "neuron_backend": "torch"}
    with on_a_gpu(FakeCuda()) as cuda, Engine(model(), **flags) as engine:
        batch = torch.rand(4, 3, 4, 4), torch.arange(4)
        engine.train_step(*batch)
        assert cuda.told == [], "they are asked for"
        with nvtx_ranges(True):
            engine.train_step(*batch)
            (action, *layers), backward = cuda.told[:4], cuda.told[4:-1]
        assert action == "0F0" and layers == ["0F0/stem", "0F0/{unit}", "0F0/head"]
        assert backward[0] == "0B0" and backward[1:] == [
            f"0B0/{name}: input gradient{part}"
            for name in ("head", "{unit}", "stem")
            for part in ("", f"/{name}: weight gradient")
        ]
        assert cuda.told[-1] == "0SYNC" and cuda.open == []
        told = len(cuda.told)
        engine.train_step(*batch)
        assert len(cuda.told) == told


def test_ranges_end_with_what_fails() -> None:
    with on_a_gpu(FakeCuda()) as cuda, nvtx_ranges(True):
        with pytest.raises(RuntimeError, match="broken"), named("outer"), named("inner"):
            raise RuntimeError("broken")
        assert cuda.told == ["outer", "outer/inner"] and cuda.open == []


def traced(tmp_path: Path, fails: str, *flags: str) -> FakeCuda:
    with without_trial(), on_a_gpu(FakeCuda(fails)) as cuda:
        outcome = train(str(tmp_path / "cache"), *"--train-iters 4 --eval-iters 0".split(), *flags)
    assert outcome.iteration == 4
    return cuda


def test_a_whole_run_for_nsys(tmp_path) -> None:
    """Ranges from the first step on; what nsys waits for around the steps that are asked for."""
    cuda = traced(tmp_path, "", *"--nvtx-ranges --profile-steps 2-3".split())
    at = [cuda.told.index(text) for text in ("0F0", "start", "stop")]
    assert [sum(text == "0F0" for text in cuda.told[a:b]) for a, b in zip(at, [*at[1:], None], strict=True)] == [
        1,
        2,
        1,
    ]
    assert not profiler_files(tmp_path) and cuda.open == []


def profiler_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("**/traces/*"))


def test_a_snapshot_of_memory(tmp_path) -> None:
    flags = "--profile-steps 2-3 --record-memory-history --tensorboard-dir".split()
    cuda = traced(tmp_path, "", *flags, str(tmp_path))
    assert [text for text in cuda.told if text[0] in "rds"] == ["record all 100000", "dump", "record None 0"]
    assert profiler_files(tmp_path) == ["rank0-2-3.memory.pickle", "rank0-2-3.pt.trace.json"]
    assert (tmp_path / "traces" / "rank0-2-3.memory.pickle").read_bytes() == SNAPSHOT


@pytest.mark.parametrize(("fails", "files"), [
    ("dump", ["rank0-2-3.pt.trace.json"]),
    ("record", ["rank0-2-3.memory.pickle", "rank0-2-3.pt.trace.json"]),
])  # fmt: skip
def test_a_snapshot_that_fails_ends_no_run(tmp_path, capfd, fails: str, files: list[str]) -> None:
    """A file is whole or not there, and nothing goes on recording."""
    flags = "--profile-steps 2-3 --record-memory-history --tensorboard-dir".split()
    cuda = traced(tmp_path, fails, *flags, str(tmp_path))
    assert [text for text in cuda.told if text[0] in "rd"] == ["record all 100000", "dump", "record None 0"]
    assert profiler_files(tmp_path) == files and "failed (RuntimeError: refused)" in capfd.readouterr().out
    assert not torch.autograd.profiler._is_profiler_enabled


def test_a_step_that_fails_is_not_recorded_any_longer(tmp_path) -> None:
    flags = f"--train-iters 4 --profile-steps 1-2 --record-memory-history --nvtx-ranges --tensorboard-dir {tmp_path}"
    config, state = parse(run_config(Spikformer), [*TINY, *flags.split()]), initialize_model_parallel(1, 1)
    with on_a_gpu(FakeCuda()) as cuda:
        trace = StepTrace(config, state, 4, 0, print)
        with pytest.raises(RuntimeError, match="broken"), trace.around(1):
            raise RuntimeError("broken")
    assert cuda.told == ["start", "record all 100000", "stop", "record None 0"] and not profiler_files(tmp_path)
    destroy_model_parallel()


def test_without_a_gpu_it_is_refused() -> None:
    given = [*TINY, "--train-iters", "4", "--nvtx-ranges"]
    with pytest.raises(ConfigError) as error:
        validate(parse(run_config(Spikformer), [*given, "--device", "cpu"]), 1)
    assert [*error.value.problems] == ["--nvtx-ranges is for NVIDIA's tools on GPUs: leave it out with --device cpu"]
    config, state = parse(run_config(Spikformer), given), initialize_model_parallel(1, 1, torch.device("cpu"))
    validate(config, 1)
    try:
        with pytest.raises(ValueError, match="--nvtx-ranges is for NVIDIA's tools on GPUs, and this run is on a CPU"):
            TrainingRun(config, state)
    finally:
        destroy_model_parallel()


def test_where_nsys_writes_no_folder_is_needed() -> None:
    given = [*TINY, *"--train-iters 4 --nvtx-ranges --profile-steps 2".split()]
    validate(parse(run_config(Spikformer), given), 1)
    with pytest.raises(ConfigError, match="--profile-steps 2 has no folder to write to"):
        validate(parse(run_config(Spikformer), [*given, "--record-memory-history"]), 1)
