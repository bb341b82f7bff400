"""What torch is told for a run, what is refused, and sums in the order of the ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from megasnn.engine.configuration import configuration
from megasnn.engine.joining import join_ranks
from megasnn.engine.precision import WORKSPACE, prepare_cublas, require_possible, told_torch
from torch import Tensor, nn

from megasnn import Engine
from megasnn.config import TrainingConfig
from megasnn.parallel_state import (
    destroy_model_parallel,
    get_parallel_state,
    initialize_model_parallel,
    model_parallel_is_initialized,
)
from megasnn.training.main import _train
from tests.engine.test_engine import MODEL, SIZES
from tests.training.runs import Outcome, train, whole

CUDA = torch.device("cuda", 0)


def settings() -> tuple[Any, ...]:
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    operations = cuda, cudnn.conv, cudnn.rnn, torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv
    return (
        *(each.fp32_precision for each in operations),
        cuda.allow_bf16_reduced_precision_reduction,
        *(torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


@pytest.fixture(autouse=True)
def before() -> Iterator[tuple[Any, ...]]:
    """The settings, which a test leaves as they were; and no word of cuBLAS in the environment, if there is no GPU."""
    found = settings()
    with mock.patch.dict(os.environ):
        if not torch.cuda.is_available():
            os.environ.pop(WORKSPACE, None)
        yield found
    assert settings() == found


def test_fp32_is_ieee_everywhere_while_the_engine_is_open(before: tuple[Any, ...]) -> None:
    with Engine(MODEL, **SIZES):
        assert settings() == (*["ieee"] * 5, False, *before[6:])
        # torch.compile reads these, and they raise where they contradict the others.
        assert not torch.backends.cudnn.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32
        assert torch.get_float32_matmul_precision() == "highest"


def test_an_engine_whose_grid_is_gone_makes_room_for_the_next_one() -> None:
    initialize_model_parallel()
    engine = Engine(MODEL, **SIZES)
    destroy_model_parallel()
    with Engine(MODEL, **SIZES, deterministic=True):
        engine.close()
        assert torch.are_deterministic_algorithms_enabled()


def test_an_engine_whose_grid_was_destroyed_leaves_those_after_it_alone() -> None:
    engine = Engine(MODEL, **SIZES)
    destroy_model_parallel()
    with Engine(MODEL, **SIZES) as second:
        engine.close()
        assert get_parallel_state() is second.state
    initialize_model_parallel()
    try:
        Engine(MODEL, **SIZES).close()
        assert model_parallel_is_initialized()  # whoever made the grid destroys it
    finally:
        destroy_model_parallel()


@pytest.mark.parametrize(
    "flags, problem",
    [
        ({"precision": "fp16"}, "--precision fp16: gradients of float16 vanish without a loss scale, .* use bf16"),
        (
            {"precision": "tf32", "device": "cpu"},
            "--precision tf32 is for GPUs, not --device cpu; use --precision fp32",
        ),
        ({"precision": "tf32"}, "--precision tf32 is for GPUs, and this rank computes on a CPU: use --precision fp32"),
    ],
)
def test_refused_on_a_cpu(flags: dict[str, Any], problem: str) -> None:
    with mock.patch("torch.cuda.device_count", return_value=0), pytest.raises(ValueError, match=problem):
        Engine(MODEL, **SIZES, **flags)


def test_refused_on_a_gpu() -> None:
    training = TrainingConfig(precision="tf32", deterministic=True)
    with (
        mock.patch("torch.cuda.get_device_capability", return_value=(7, 5)),
        mock.patch("torch.cuda.get_device_name", return_value="Tesla T4"),
        pytest.raises(ValueError, match=r"needs a GPU of compute capability 8\.0 or more, and Tesla T4 has no"),
    ):
        require_possible(training, CUDA)
    with mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)):
        require_possible(training, CUDA)
        os.environ[WORKSPACE] = ":0:0"
        with pytest.raises(ValueError, match="CUBLAS_WORKSPACE_CONFIG=:0:0 in the environment"):
            require_possible(training, CUDA)


def test_deterministic_too_late() -> None:
    """cuBLAS reads its environment with the first product; nobody knows whether one was formed before."""
    training = TrainingConfig(deterministic=True)
    with (
        mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)),
        mock.patch("torch.cuda.is_initialized", return_value=True),
    ):
        prepare_cublas(training)
        assert WORKSPACE not in os.environ
        with pytest.raises(ValueError, match=f"has used a GPU before: .*set {WORKSPACE}=:4096:8 before the process"):
            require_possible(training, CUDA)
        require_possible(TrainingConfig(), CUDA)
        os.environ[WORKSPACE] = ":16:8"
        require_possible(training, CUDA)
    prepare_cublas(training)
    assert os.environ[WORKSPACE] == ":16:8"


@pytest.mark.parametrize("program", [True, False], ids=["pretrain", "engine"])
def test_cublas_is_told_before_a_run_touches_a_gpu(program: bool) -> None:
    class Touched(Exception):
        pass

    def touch(*args: Any) -> None:
        assert os.environ[WORKSPACE] == ":4096:8"
        raise Touched

    start = "megasnn.training.main.start_process_group" if program else "megasnn.engine.joining.start_process_group"
    config = configuration(MODEL, {**SIZES, "deterministic": True})
    with mock.patch(start, touch), mock.patch("megasnn.training.main.StopSignals"), pytest.raises(Touched):
        _train(config, ()) if program else join_ranks(config)


def test_the_log_says_what_products_are() -> None:
    assert told_torch(TrainingConfig(), torch.device("cpu")) == []
    (told,) = told_torch(TrainingConfig(), CUDA)
    assert told.startswith("products of fp32 are IEEE: TF32 is off")
    assert told.endswith("cuDNN: channels last, algorithms of its own choice, benchmark off")
    (rounded,) = told_torch(TrainingConfig(precision="tf32", deterministic=True), CUDA)
    assert "round their operands to 11 bits" in rounded and "deterministic algorithms only" in rounded


def test_deterministic_algorithms_only() -> None:
    with Engine(MODEL, **SIZES, deterministic=True):
        assert settings()[-4:] == (True, True, False, False) and os.environ[WORKSPACE] == ":4096:8"


def _runs(cache: str) -> list[Outcome]:
    return [train(cache, "--train-iters", "2", "--deterministic") for _ in range(2)]


def test_runs_on_three_ranks_have_the_same_bits(ranks, tmp_path) -> None:
    first, second = (whole(of_run) for of_run in zip(*ranks(3, _runs, str(tmp_path)), strict=True))
    assert first and all(torch.equal(first[name], value) for name, value in second.items())


def _step(**flags: Any) -> tuple[float, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    images, labels = torch.rand(10, 1, 8, 8, generator=generator), torch.arange(10)
    with Engine(MODEL, **SIZES, **flags) as engine:
        return engine.train_step(images, labels).loss, engine.state_dict()


def test_one_rank_computes_what_it_did() -> None:
    (loss, weights), (expected, others) = _step(deterministic=True), _step()
    assert loss == expected and all(torch.equal(weights[name], value) for name, value in others.items())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_steps_on_a_gpu_have_the_same_bits(precision: str) -> None:
    flags = {"device": "cuda", "deterministic": True, "precision": precision}
    (loss, weights), (expected, others) = _step(**flags), _step(**flags)
    assert loss == expected and all(torch.equal(weights[name], value) for name, value in others.items())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_the_gradient_of_max_pooling_on_a_gpu(order: torch.memory_format) -> None:
    """The CPU's bits: where windows overlap, what they give is added in their order."""
    x = torch.randint(0, 4, (64, 32, 33, 34), generator=torch.Generator().manual_seed(0)).float()
    gradients = []
    torch.use_deterministic_algorithms(True)
    try:
        for device in ("cpu", "cuda", "cuda"):
            leaf = x.to(device).contiguous(memory_format=order).requires_grad_()
            y = nn.functional.max_pool2d(leaf, 3, 2, 1)
            grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
            gradients.append(torch.autograd.grad(y, leaf, grad.to(device))[0].cpu())
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(gradients[1], gradients[2]) and torch.equal(gradients[1], gradients[0])
