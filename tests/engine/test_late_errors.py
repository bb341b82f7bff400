"""An error of a kernel, which a GPU tells of when it is asked for something later on: the place that is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megasnn.engine import Engine
from megasnn.engine.faults import in_full
from megasnn.layers import BuildContext
from megasnn.models.building import describe
from megasnn.parallel_state import destroy_model_parallel, initialize_model_parallel
from megasnn.pipeline.chunk import build_chunk
from megasnn.pipeline.executor import PipelineError, PipelineExecutor
from megasnn.pipeline.step_state import MicroBatchInput
from megasnn.schedule import generate
from megasnn.telemetry.timers import DeviceClock, Timers
from tests.engine.test_engine import MODEL


class BrokenGpu(DeviceClock):
    """Stands for a GPU whose kernel has failed: who waits for it is told."""

    broken = False

    def wait(self) -> None:
        if self.broken:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[BrokenGpu]:
    clock = BrokenGpu(torch.device("cpu"))
    with mock.patch("megasnn.pipeline.executor.DeviceClock", return_value=clock):
        yield clock
    destroy_model_parallel()


def _step(gpu: BrokenGpu, waits: bool) -> None:
    """Two micro-batches on one rank. The kernel breaks in the forward of the first one; at the latest, the host finds
    out in the loss of the second one."""
    state = initialize_model_parallel()
    model = describe(MODEL)
    chunk = build_chunk(model, [range(len(model.layers))], 0, BuildContext(), state.device, 0)
    calls = iter(range(2))

    def loss(logits: Any, labels: Tensor) -> Tensor:
        if next(calls) == 1:
            gpu.wait()
        gpu.broken = True
        return logits.sum()

    images, labels = torch.zeros(2, *MODEL.input_shape), torch.zeros(2, dtype=torch.long)
    executor = PipelineExecutor({0: chunk}, (0,), state, loss, waits=waits)
    executor.train_step(generate("gpipe", 1, 2), [MicroBatchInput(images, labels, 2)] * 2)


@pytest.mark.parametrize(
    ("waits", "place"), [(False, "action 0F1, micro-batch 1"), (True, "action 0F0, micro-batch 0")]
)
def test_the_place(gpu: BrokenGpu, waits: bool, place: str) -> None:
    with pytest.raises(PipelineError, match=place) as caught:
        _step(gpu, waits)
    assert "CUDA_LAUNCH_BLOCKING" in in_full(caught.value, with_traceback=False)


def test_memory_that_is_short_is_noticed_where_it_is() -> None:
    assert "CUDA_LAUNCH_BLOCKING" not in in_full(torch.OutOfMemoryError("CUDA out of memory"), with_traceback=False)


# --- what follows an error asks the GPU for nothing that hides it


def _first_told(work: Callable[[], None]) -> str:
    with pytest.raises(torch.AcceleratorError) as caught:
        work()
    return str(caught.value)


def _fails_again(*args: Any, **options: Any) -> Any:
    raise torch.AcceleratorError("CUDA error: asked again")


def test_a_part_that_is_timed() -> None:
    timers = Timers(torch.device("cpu"))

    def work() -> None:
        with mock.patch.object(DeviceClock, "mark", side_effect=[0.0, torch.AcceleratorError("CUDA error: again")]):
            with timers("part"):
                raise torch.AcceleratorError("CUDA error: the first")

    assert _first_told(work) == "CUDA error: the first" and timers.mean_ms() == {}


def test_leaving_an_engine() -> None:
    engine = Engine(MODEL, micro_batch_size=4, global_batch_size=8, train_iters=2)

    def work() -> None:
        with mock.patch("megasnn.engine.joining.destroy_model_parallel", _fails_again), engine:
            raise torch.AcceleratorError("CUDA error: the first")

    try:
        assert _first_told(work) == "CUDA error: the first"
    finally:
        destroy_model_parallel()
