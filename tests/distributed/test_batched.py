"""At the end of a step all tensors are taken together: what is started does not grow with their number."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megasnn.layers import BuildContext, ParallelBatchNorm
from megasnn.layers.shape_inference import calls_of
from megasnn.optim.average import WeightAverage
from megasnn.optim.lamb import Lamb
from megasnn.optim.norms import sums_of_squares
from megasnn.parallel.sharding import Shard, ShardedTensor, materialise
from megasnn.parallel.sync_batch_norm import merge_running_statistics
from megasnn.parallel_state import Group

BETAS, EPS, RATE = (0.9, 0.999), 1e-6, 0.01


class Started(TorchDispatchMode):
    """Counts the operators that compute something, by name. What the host reads is counted in tests/gpu_waits.py."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if not function.is_view and name != "_local_scalar_dense":
            self.operators[name] += 1
        return function(*args, **(kwargs or {}))


def started(work: Callable[[], object]) -> Counter[str]:
    with Started() as counted:
        work()
    return counted.operators


def norms(values: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
    if not values:
        return {}
    found = torch._foreach_norm(list(values.values()), 2, dtype=torch.float64)
    return dict(zip(values, found, strict=True))


def lamb(parameters: Sequence[Tensor]) -> Lamb:
    """The first half decays."""
    half = len(parameters) // 2
    groups = [{"params": [*parameters[:half]], "weight_decay": 0.1}, {"params": [*parameters[half:]]}]
    return Lamb(groups, RATE, BETAS, EPS, norms)


def by_formula(parameter: Tensor, gradients: Sequence[Tensor], weight_decay: float) -> Tensor:
    p, mean, square = parameter.detach().clone(), torch.zeros_like(parameter), torch.zeros_like(parameter)
    for step, g in enumerate(gradients, 1):
        mean.lerp_(g, 1 - BETAS[0])
        square.mul_(BETAS[1]).addcmul_(g, g, value=1 - BETAS[1])
        below = (square.sqrt() / math.sqrt(1 - BETAS[1] ** float(step))).add_(EPS)
        update = (mean / (1 - BETAS[0] ** float(step))).div_(below).add_(p, alpha=weight_decay)
        size, length = p.norm(dtype=torch.float64), update.norm(dtype=torch.float64)
        if weight_decay and size > 0 and length > 0:
            update.mul_(size / length)
        p.sub_(update, alpha=RATE)
    return p


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lamb_has_the_bits_of_one_tensor_by_itself(dtype: torch.dtype) -> None:
    """Channels last, scalars, no rows, zeros, and a tensor that has fewer steps behind it than the others."""
    random = torch.Generator().manual_seed(0)

    def values(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype).normal_(generator=random)

    made = [values(8, 4, 3, 3).to(memory_format=torch.channels_last), values(5, 7), values(0, 7), torch.zeros(3, 3)]
    made = [each.to(dtype) for each in (*made, values(9), values(), torch.zeros(4), values(6))]
    gradients = [[torch.zeros_like(p) if p.ndim == 2 and p.shape[0] == 5 else values(*p.shape) for p in made]]
    gradients += [[values(*p.shape) for p in made] for _ in range(2)]
    parameters = [torch.nn.Parameter(each.clone(memory_format=torch.preserve_format)) for each in made]
    optimizer, late = lamb(parameters), 4
    for step, given in enumerate(gradients):
        for number, (parameter, gradient) in enumerate(zip(parameters, given, strict=True)):
            parameter.grad = None if number == late and step == 0 else gradient
        optimizer.step()
    for number, (parameter, before) in enumerate(zip(parameters, made, strict=True)):
        of_it = [given[number] for given in gradients[number == late :]]
        assert torch.equal(parameter, by_formula(before, of_it, 0.1 if number < 4 else 0.0)), number
        assert parameter.stride() == before.stride()


Record = tuple[Tensor, Tensor, int]


def norm_of(channels: int, momentum: float | None, calls: int) -> ParallelBatchNorm:
    norm = ParallelBatchNorm(channels, BuildContext(), momentum=momentum)
    materialise([("norm", norm)], torch.device("cpu"), 0)
    vars(norm)["_calls"] = calls
    return norm


def recorded(norm: ParallelBatchNorm, forwards: int, random: torch.Generator) -> list[Record]:
    """What it would have recorded in so many forwards."""
    assert norm.running_mean is not None
    made = []
    for number in range(forwards * calls_of(norm)):
        mean, variance = (torch.empty_like(norm.running_mean).normal_(generator=random) for _ in range(2))
        made.append((mean, variance.square(), 12 + number // calls_of(norm)))
    norm.pending = [*made]
    return made


def by_itself(norm: ParallelBatchNorm, records: Sequence[Record]) -> tuple[Tensor, Tensor]:
    """The running statistics of one norm behind a step, call by call and micro-batch by micro-batch."""
    assert norm.running_mean is not None and norm.running_var is not None
    running = norm.running_mean.clone(), norm.running_var.clone()
    batches = norm.num_batches_tracked.clone()
    for call in range(calls_of(norm)):
        of_call = records[call :: calls_of(norm)]
        total = torch.tensor(float(sum(count for _, _, count in of_call)), dtype=torch.float64)
        mean, squares = (torch.zeros(norm.channels, dtype=torch.float64) for _ in range(2))
        for value, _, count in of_call:
            mean += value.double() * (count / total)
        for value, variance, count in of_call:
            squares += count * (variance.double() + (value.double() - mean) ** 2)
        batches += 1
        weight = batches.double().reciprocal() if norm.momentum is None else norm.momentum
        for buffer, new in zip(running, (mean, squares / (total - 1).clamp_min(1)), strict=True):
            buffer.mul_(1 - weight).add_(weight * new.to(buffer.dtype))
    return running


def test_merged_statistics_have_the_bits_of_one_norm_by_itself() -> None:
    """Of several momentums and numbers of calls, over steps of several micro-batches."""
    random = torch.Generator().manual_seed(0)
    norms = [norm_of(5, 0.1, 1), norm_of(3, None, 2), norm_of(4, 0.1, 2)]
    norms += [norm_of(2, 0.3, 1), norm_of(6, None, 1)]
    for step in range(3):
        if step == 2:
            norms[1].num_batches_tracked += 7  # loaded from elsewhere
        records = [recorded(norm, 3, random) for norm in norms]
        expected = [by_itself(norm, its) for norm, its in zip(norms, records, strict=True)]
        merge_running_statistics(norms, Group("dp"), 4)
        for norm, (mean, variance) in zip(norms, expected, strict=True):
            assert norm.running_mean is not None and norm.running_var is not None
            assert torch.equal(norm.running_mean, mean) and torch.equal(norm.running_var, variance)
            assert not norm.pending
    assert [int(norm.num_batches_tracked) for norm in norms] == [3, 13, 6, 3, 3]


def test_a_norm_of_several_layers_takes_their_statistics_one_after_another() -> None:
    random, norm = torch.Generator().manual_seed(0), norm_of(3, 0.1, 2)
    records = recorded(norm, 1, random)
    expected = by_itself(norm, records)
    vars(norm)["_calls"] = 1
    norm.pending = records[:1]
    behind = records[1][0].double(), records[1][1].double() * 12 / 11
    merge_running_statistics([norm], Group("dp"), 1, lambda found: [*found, (norm, *behind)])
    assert norm.running_mean is not None and norm.running_var is not None
    assert torch.equal(norm.running_mean, expected[0])
    torch.testing.assert_close(norm.running_var, expected[1])


def lamb_step(count: int) -> Callable[[], object]:
    parameters = [torch.nn.Parameter(torch.ones(3, 2)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.ones(3, 2)
    optimizer = lamb(parameters)
    optimizer.step()  # makes its state
    return optimizer.step


def squares(count: int) -> Callable[[], object]:
    values = [torch.randn(3, 2) for _ in range(count)]
    squares = partial(sums_of_squares, values, torch.device("cpu"))
    assert torch.allclose(squares(), torch.stack(values).double().square().sum((1, 2)), rtol=1e-14)
    return squares


def average(count: int) -> Callable[[], object]:
    tensors = [torch.ones(2, dtype=kind) for _ in range(count) for kind in (torch.float32, torch.int64)]
    average = WeightAverage([ShardedTensor("", each, Shard((2,)), False) for each in tensors], 0.9)
    for each in tensors:
        each += 1
    average.update()
    for entry in average.tensors:
        expected = 1.1 if entry.tensor.is_floating_point() else 2
        torch.testing.assert_close(entry.tensor, torch.full_like(entry.tensor, expected))
    return average.update


def merging(count: int, forwards: int = 2, momentum: float | None = 0.1) -> Callable[[], object]:
    norms = [norm_of(3, momentum, 1) for _ in range(count)]
    for norm in norms:
        recorded(norm, forwards, torch.Generator())
    return partial(merge_running_statistics, norms, Group("dp"), forwards)


@pytest.mark.parametrize("make", [lamb_step, squares, average, merging, partial(merging, momentum=None)])
def test_what_is_started_does_not_grow_with_the_tensors(make: Callable[[int], Callable[[], object]]) -> None:
    few, many = started(make(10)), started(make(100))
    assert few == many and few.total() < 50


def test_merging_starts_an_operator_for_each_sum_that_has_an_order() -> None:
    assert started(merging(3, 12)).total() - started(merging(3, 2)).total() == 10 * 2
