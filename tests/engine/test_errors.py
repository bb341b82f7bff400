"""Errors around an Engine: wrong batches, errors in the user's code, and what is left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import megasnn
from megasnn import Engine, layer
from megasnn.config import TrainingConfig
from megasnn.parallel.process_group import set_precision
from tests.engine.test_engine import MODEL, PP2
from tests.faults.launch import Ranks, Torchrun
from tests.models.networks import CLASSES, between

SIZES = {"micro_batch_size": 4, "global_batch_size": 8, "train_iters": 9, "lr": 1e-2}
ERRORS: list[BaseException] = []


class Failing(nn.Module):
    """Raises what stands in ERRORS, once."""

    def forward(self, x: Tensor) -> Tensor:
        if ERRORS and not x.is_meta:
            raise ERRORS.pop()
        return x


def net() -> megasnn.Model:
    return between(lambda: [layer("failing", Failing())])


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(8, 3, 4, 4, generator=generator), torch.randint(0, CLASSES, (8,), generator=generator)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(net(), **SIZES, ema_decay=0.5) as made:
        yield made


def test_wrong_batches_are_refused_and_change_nothing(engine: Engine) -> None:
    x, y = batch()
    soft = torch.full((8, CLASSES), 1 / CLASSES)
    for images, labels, named in (
        (x[:, 0], y, r"\[N, 3, 4, 4\]"),
        (x[:0], y[:0], "images"),
        ((255 * x).to(torch.uint8), y, "uint8"),
        (x.numpy(), y, "ndarray"),
        (x, y[:7], r"\[8\]"),
        (x, y + CLASSES, "below 4"),
        (x, None, "NoneType"),
        (x, y.float(), "float32"),
        (x, y > 3, "bool"),
        (x, soft[:, 1:], r"\[8, 3\]"),
    ):
        with pytest.raises(ValueError, match=named):
            engine.train_step(images, labels)  # type: ignore[arg-type]
    for wrong in (x, (x, y), [(x,)], [x], [3], (None, None)):
        with pytest.raises(ValueError):
            engine.evaluate(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="whole numbers"):
        engine.evaluate(x, soft)
    with pytest.raises(ValueError, match="no samples"):
        engine.evaluate([])
    with torch.no_grad(), pytest.raises(ValueError, match="no_grad"):
        engine.train_step(x, y)
    assert engine.iteration == 0
    assert engine.train_step(x, y.to(torch.uint16)).loss > 0 and engine.train_step(x.half(), soft).loss > 0
    engine.close()
    with pytest.raises(ValueError, match="closed"):
        engine.predict(x)


def refused_together() -> list[str]:
    """Refusals of batches that are wrong on one rank; an evaluation between two steps among them."""
    x, y = torch.rand(8, *MODEL.input_shape, generator=torch.Generator().manual_seed(1)), torch.arange(8)
    flags, told = {**PP2, "ema_decay": 0.9, "precision": "fp64"}, list[str]()
    with Engine(MODEL, **SIZES, **flags) as engine:
        rank = engine.state.rank
        told.append(str(engine.train_step(x, y).loss))
        for wrong in (
            lambda: engine.train_step(x[: 8 - rank], y[: 8 - rank]),
            lambda: engine.train_step(x, y + 10 * rank),
            lambda: engine.evaluate([(x, y)] * (2 + rank)),
            lambda: engine.evaluate([(x.numpy() if rank else x, y)]),  # type: ignore[list-item]
        ):
            with pytest.raises(ValueError) as refused:
                wrong()
            told.append(str(refused.value))
        told.append(str(engine.train_step(x, y).loss))
    with pytest.raises(ValueError, match="training.seed"):
        Engine(MODEL, **SIZES, **flags, seed=rank)
    return told


def test_what_is_wrong_on_one_rank_is_raised_on_all_and_changes_nothing(ranks) -> None:
    first, second = ranks(2, refused_together)
    assert first == second and "[8, 7]" in first[1] and "labels" in first[2] and "[0, 8]" in first[3]
    x, y = torch.rand(8, *MODEL.input_shape, generator=torch.Generator().manual_seed(1)), torch.arange(8)
    with Engine(MODEL, **SIZES, ema_decay=0.9, precision="fp64") as alone:
        losses = [alone.train_step(x, y).loss for _ in range(2)]
    assert [float(first[0]), float(first[-1])] == pytest.approx(losses, rel=1e-9)


def of_different_methods(calls: list[tuple[str, str]]) -> list[str]:
    """Errors of this rank, where the first one calls one method, and the second another."""
    found = []
    x, y = batch()
    with Engine(net(), **SIZES) as engine:
        arguments: dict[str, tuple[Any, ...]] = {
            **{"train_step": (x, y), "evaluate": (x, y), "predict": (x,), "state_dict": ()},
            **{"load_state_dict": (engine.state_dict(),), "save": ("folder",), "load": ("folder",)},
        }
        for both in calls:
            name = both[engine.state.rank]
            with pytest.raises(ValueError) as error:
                getattr(engine, name)(*arguments[name])
            found.append(str(error.value))
        engine.train_step(x, y)
        assert engine.iteration == 1
    return found


def test_ranks_that_call_different_methods_are_told_so_on_all_of_them(ranks) -> None:
    names = ("train_step", "evaluate", "predict", "state_dict", "load_state_dict", "save", "load")
    calls = [*permutations(names, 2)]
    for found in ranks(2, of_different_methods, calls):
        for (first, second), text in zip(calls, found, strict=True):
            assert text.endswith(f"rank 0 called {first}, rank 1 called {second}") and "\n" not in text


def test_an_iterable_that_raises_ends_the_engine(engine: Engine) -> None:
    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        yield batch()
        raise KeyError("no file")

    with pytest.raises(KeyError, match="no file"):
        engine.evaluate(pairs())
    with pytest.raises(RuntimeError, match="no file"):
        engine.evaluate([batch()])


@pytest.mark.parametrize("method", ["train_step", "evaluate", "predict"])
@pytest.mark.parametrize("error", [RuntimeError("out of luck"), KeyboardInterrupt()])
def test_an_error_ends_the_engine_and_another_one_can_be_made(method: str, error: BaseException) -> None:
    engine = Engine(net(), **SIZES, ema_decay=0.5)
    ERRORS.append(error)
    with pytest.raises((RuntimeError, KeyboardInterrupt)):
        getattr(engine, method)(*batch()[: 1 if method == "predict" else 2])
    for refused in (lambda: engine.train_step(*batch()), lambda: engine.state_dict(), lambda: engine.load(".")):
        with pytest.raises(RuntimeError, match="luck|KeyboardInterrupt"):
            refused()
    engine.close()
    with Engine(net(), **SIZES) as another:
        assert another.train_step(*batch()).loss > 0


def one_of_two() -> None:
    """A rank of a program that goes on after an error of its second rank as long as it can."""
    rank = int(os.environ["RANK"])
    with Engine(net(), **SIZES, pipeline_model_parallel_size=2, pipeline_schedule="1f1b") as engine:
        for number in range(4):
            if (number, rank) == (1, 1):
                ERRORS.append(RuntimeError("out of luck"))
            try:
                print(number, engine.train_step(*batch()).samples, flush=True)
            except Exception as error:
                print(number, type(error).__name__, str(error).replace("\n", " "), flush=True)
        if rank == 1:
            time.sleep(600)  # its end would break the connections


def of_nobody() -> None:
    """A rank of a program that closes no Engine."""
    engine = Engine(MODEL, **SIZES, **PP2)
    engine.train_step(torch.rand(8, 1, 8, 8), torch.arange(8) % 10)


def test_an_error_on_one_rank_leaves_nobody_waiting(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2, target=one_of_two)
    ranks.processes[0].join(90)
    assert ranks.processes[1].is_alive(), "it ended, and with it the connections that the first waits for"
    ranks.kill(signal.SIGKILL, 1)
    first, second = (text.splitlines() for text in ranks.end().output)
    assert first[0] == second[0] == "0 8"
    assert second[1] == "1 RuntimeError out of luck"
    # Its connection breaks when the other one leaves its groups, or its watch ends it before.
    assert len(first) == 1 or (first[1].startswith("1 ") and "Error" in first[1])
    for line in (*first[2:], *second[2:]):
        assert "RuntimeError this Engine has ended with an error" in line
    assert "rank 1, pipeline stage 1, action 1F0, micro-batch 0" in second[2]


def test_a_program_that_closes_no_engine_ends_well(tmp_path: Path) -> None:
    """A thread of Gloo's that is left would end it with an error."""
    (script := tmp_path / "script.py").write_text("from tests.engine.test_errors import of_nobody; of_nobody()")
    assert Torchrun(tmp_path, 2, str(script)).end(90).status == [0]


def test_arithmetic_of_a_gpu_is_set_or_refused() -> None:
    cuda, wanted = torch.device("cuda", 0), TrainingConfig(precision="tf32", deterministic=True)
    operations = torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.mkldnn.matmul
    with mock.patch("torch.cuda.get_device_name", return_value="Tesla T4"):
        with mock.patch("torch.cuda.get_device_capability", return_value=(7, 5)), pytest.raises(ValueError, match="T4"):
            set_precision(wanted, cuda)
        with mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)):
            set_precision(wanted, cuda)
    assert [each.fp32_precision for each in operations] == ["tf32", "tf32", "ieee"]
    assert torch.are_deterministic_algorithms_enabled()
    set_precision(TrainingConfig(), cuda)
    assert [each.fp32_precision for each in operations] == ["ieee"] * 3
    assert not torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.allow_tf32
