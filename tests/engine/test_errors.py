"""What goes wrong around an Engine: wrong arguments, errors in the user's code, and where it goes on afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megasnn
from megasnn import ConfigError, ConvNormNeuron, Engine, MeanLinear, layer
from megasnn.parallel_state import model_parallel_is_initialized
from tests.faults.launch import ROOT, held_port

SIZES = {"micro_batch_size": 4, "global_batch_size": 8, "train_iters": 9, "lr": 1e-2}
ERRORS: list[BaseException] = []


class Failing(nn.Module):
    """Raises what stands in ERRORS, once."""

    def forward(self, x: Tensor) -> Tensor:
        if ERRORS and not x.is_meta:
            raise ERRORS.pop()
        return x


@dataclass(frozen=True, kw_only=True)
class Net(megasnn.Model):
    image_size: int = 4
    in_channels: int = 1
    time_steps: int = 2
    width: int = 4
    sizes: tuple[int, ...] = ()

    def layers(self) -> Any:
        yield layer("first", ConvNormNeuron(self.in_channels, self.width, kernel_size=3))
        yield layer("failing", Failing())
        yield layer("head", MeanLinear(self.width, self.num_classes))


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(8, 1, 4, 4, generator=generator), torch.randint(0, 10, (8,), generator=generator)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(Net(), **SIZES, ema_decay=0.5) as made:
        yield made


# --- arguments


def test_tensors_of_another_kind_are_refused(engine: Engine) -> None:
    x, y = batch()
    soft = torch.full((8, 10), 0.1)
    nested = torch.nested.nested_tensor(list(x), layout=torch.jagged)
    for images, labels, problem in (
        (x.to_sparse(), y, r"images must be .* which is not dense \(torch.sparse_coo\)"),
        (x.to_mkldnn(), y, "not dense"),
        (nested, y, "images must be .* got a nested tensor"),
        (x.to(torch.complex64), y, "images must be floating-point values, got .*complex64"),
        ((255 * x).to(torch.uint8), y, r"got \[8, 1, 4, 4\] of torch.uint8: convert them, as by images.float\(\)"),
        (x.to("meta"), y, "images have no values"),
        (x, y.to_sparse(), "labels must be .* not dense"),
        (x, soft.to_sparse(), "labels must be .* not dense"),
        (x, y.to(torch.complex64), "labels must be class indices"),
        (
            x,
            y.float(),
            r"class indices \[8\] of an integer type, or probabilities \[8, 10\], got \[8\]",
        ),
        (x, y > 3, "labels must be class indices"),
        (x, soft - 1, "soft labels must be from 0 to 1"),
        (x, soft * torch.nan, "soft labels must be from 0 to 1"),
    ):
        with pytest.raises(ValueError, match=problem):
            engine.train_step(images, labels)
    with torch.no_grad(), pytest.raises(ValueError, match="call it outside of torch.no_grad"):
        engine.train_step(x, y)
    with pytest.raises(ValueError, match="give images and labels, or an iterable of such pairs"):
        engine.evaluate((x, y))  # type: ignore[arg-type]
    assert engine.iteration == 0
    assert engine.train_step(x, y.to(torch.uint16)).loss > 0 and engine.train_step(x.half(), soft).loss > 0


def test_what_names_no_folder_is_refused(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for wrong in (None, 3, b"there", ["there"]):
        for method in (engine.save, engine.load):
            with pytest.raises(megasnn.CheckpointError, match="must be a text or a pathlib.Path, got "):
                method(wrong)  # type: ignore[operator]
    for method in (engine.save, engine.load):
        with pytest.raises(megasnn.CheckpointError, match="has no name, got ''; '.' is the current folder"):
            method("")  # type: ignore[operator]
    assert not list(tmp_path.iterdir())
    assert engine.save(".") == Path("iter_0000000")
    for step in ("0", 0.0, False):
        with pytest.raises(megasnn.CheckpointError, match=f"step must be .* a whole number, got {step!r}"):
            engine.load(".", step=step)  # type: ignore[arg-type]
    engine.load(".", step=0)
    (tmp_path / "a file").touch()
    for folder, reason in (("a file", "it is a file"), ("a file/below", "Not a directory")):
        with pytest.raises(megasnn.CheckpointError, match=f"^cannot make {folder} a folder of checkpoints: {reason}"):
            engine.save(folder)
    with pytest.raises(megasnn.CheckpointError) as refused:
        engine.load("nope")
    assert str(refused.value) == "there is no folder nope to load a checkpoint from; check its path (--load)"


def test_kernels_that_this_device_has_not_are_refused_before_anything_is_built() -> None:
    with pytest.raises(ValueError, match="^the triton kernels cannot be used: they run on CUDA tensors, not on cpu"):
        Engine(Net(), **SIZES, neuron_backend="triton")
    assert not model_parallel_is_initialized()


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"width": "4"}, "--width 4 "),
        ({"width": 4.0}, r"--width 4\.0 "),
        ({"width": True}, "--width True "),
        ({"width": None}, "--width None "),
        ({"time_steps": "2"}, "--time-steps 2 "),
        ({"sizes": 3}, "--sizes 3 "),
        ({"width": 0}, "by zero .*--width 0"),
        ({"width": -1}, "negative dimension .*--width -1"),
        ({"time_steps": 0}, "--time-steps must be at least 1, got 0"),
        ({"image_size": -1}, "--image-size must be at least 1, got -1"),
        ({"num_classes": 0}, "--num-classes must be at least 1, got 0"),
        ({"in_channels": -3}, "--in-channels must be at least 1, got -3"),
    ],
)
def test_dimensions_from_python_are_checked(wrong: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Engine(replace(Net(), **wrong), **SIZES)
    assert not model_parallel_is_initialized()


@pytest.mark.parametrize("name", megasnn.MODELS)
def test_dimensions_of_the_models_in_the_table_are_checked(name: str) -> None:
    for wrong in (0, -1, "2", 2.5):
        with pytest.raises(ConfigError, match=r"--time-steps .*(-1|0|2)"):
            Engine(megasnn.MODELS[name](time_steps=wrong), **SIZES)


def test_a_class_in_place_of_a_model_and_a_closed_engine_are_told(engine: Engine) -> None:
    with pytest.raises(ValueError, match=r"give an instance .*: Net\(\.\.\.\)"):
        Engine(Net, **SIZES)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"not 'spikformer': megasnn.MODELS\['spikformer'\]\(\.\.\.\)"):
        Engine("spikformer", **SIZES)  # type: ignore[arg-type]
    engine.close()
    with pytest.raises(ValueError, match="closed; make another one"), engine:
        pass


# --- errors while it works


def test_an_iterable_that_raises_is_no_error_of_the_engine(engine: Engine) -> None:
    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        yield batch()
        raise KeyError("no file")

    with pytest.raises(KeyError, match="no file"):
        engine.evaluate(pairs())
    assert engine.evaluate([batch()]).samples == 8


@pytest.mark.parametrize("method", ["train_step", "evaluate", "predict"])
def test_an_error_ends_the_engine_and_another_one_can_be_made(engine: Engine, method: str) -> None:
    ERRORS.append(RuntimeError("out of luck"))
    with pytest.raises(RuntimeError, match="action 0F0, micro-batch 0: RuntimeError: out of luck"):
        getattr(engine, method)(*batch()[: 1 if method == "predict" else 2])
    for refused in (lambda: engine.train_step(*batch()), lambda: engine.state_dict(), lambda: engine.load(".")):
        with pytest.raises(RuntimeError, match="out of luck.*: make another one$"):
            refused()
    engine.close()
    with Engine(Net(), **SIZES) as another:
        assert another.train_step(*batch()).loss > 0


def test_one_engine_at_a_time(engine: Engine) -> None:
    with pytest.raises(ValueError, match="another Engine is open"):
        Engine(Net(), **SIZES)
    assert engine.train_step(*batch()).loss > 0


def interrupted(times: int) -> Callable[[Failing, Tensor], Tensor]:
    """A forward in which Ctrl-C is pressed, so often in all."""
    left = iter(range(times))

    def forward(self: Failing, x: Tensor) -> Tensor:
        if next(left, None) is not None:
            os.kill(os.getpid(), signal.SIGINT)
        return x

    return forward


@pytest.fixture
def hears_interrupts() -> Iterator[None]:
    """Also where the tests were started in the background of a shell, which has them ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("hears_interrupts")
@pytest.mark.parametrize("method", ["train_step", "evaluate", "predict"])
def test_an_interrupt_ends_after_the_step(engine: Engine, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.setattr(Failing, "forward", interrupted(1))
    with pytest.raises(KeyboardInterrupt):
        getattr(engine, method)(*batch()[: 1 if method == "predict" else 2])
    monkeypatch.undo()
    assert engine.iteration == (method == "train_step")
    assert engine.train_step(*batch()).loss > 0


@pytest.mark.usefixtures("hears_interrupts")
def test_the_second_interrupt_ends_at_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Failing, "forward", interrupted(2))
    with pytest.raises(KeyboardInterrupt):
        engine.train_step(*batch())
    assert engine.iteration == 0
    with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
        engine.state_dict()


def one_of_two() -> None:
    """A rank of a program that goes on after an error of its second rank as long as it can."""
    rank = int(os.environ["RANK"])
    with Engine(Net(), **SIZES, pipeline_model_parallel_size=2, pipeline_schedule="1f1b") as engine:

        def pairs() -> Iterator[tuple[Tensor, Tensor]]:
            yield batch()
            if rank == 1:
                raise KeyError("no file")
            yield batch()

        calls = (
            lambda: engine.save(None if rank == 0 else "there"),  # type: ignore[arg-type]
            lambda: engine.evaluate(pairs()),
            lambda: engine.train_step(*batch()).samples,
            lambda: engine.train_step(*batch()),
            lambda: engine.train_step(*batch()),
            lambda: engine.state_dict(),
        )
        for number, call in enumerate(calls):
            if (number, rank) == (3, 1):
                ERRORS.append(RuntimeError("out of luck"))
            try:
                print(number, call())
            except Exception as error:
                print(number, type(error).__name__, str(error).replace("\n", " "))


def test_an_error_on_one_rank_leaves_nobody_waiting(tmp_path: Path) -> None:
    processes = []
    with held_port() as holder:
        for rank in ("0", "1"):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            port = str(holder.getsockname()[1])
            where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": str(ROOT)}
            program = [sys.executable, "-c", "from tests.engine.test_errors import one_of_two; one_of_two()"]
            processes.append(
                subprocess.Popen(program, env={**os.environ, **place, **where}, stdout=subprocess.PIPE, text=True)
            )
        try:
            first, second = (process.communicate(timeout=120)[0].splitlines() for process in processes)
        finally:
            for process in processes:
                process.kill()
    folder = "0 CheckpointError the folder of checkpoints must be a text or a pathlib.Path, got None"
    assert first[0] == second[0] == folder
    assert first[1] == "1 ValueError rank 1 has no more batches: KeyError: 'no file'"
    assert second[1] == "1 KeyError 'no file'" and first[2] == second[2] == "2 8"
    assert second[3].startswith("3 PipelineError rank 1, pipeline stage 1") and second[3].endswith("out of luck")
    assert first[3].startswith("3 ") and "Error" in first[3]
    for told in (*first[4:], *second[4:]):
        assert "RuntimeError this Engine has ended with an error" in told
        assert told.endswith("make another one, in another process")
    assert len(first) == len(second) == 6
