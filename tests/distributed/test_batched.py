"""At the end of a step all tensors are taken together: what is started does not grow with their number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megasnn.layers import BuildContext, ParallelBatchNorm
from megasnn.layers.facts import facts
from megasnn.layers.tensors import materialise
from megasnn.optim.average import WeightAverage
from megasnn.optim.lamb import Lamb
from megasnn.optim.norms import sums_of_squares
from megasnn.parallel.sharding import Shard, ShardedTensor
from megasnn.parallel.sync_batch_norm import RunningStatistics
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


def lamb(parameters: Sequence[Tensor], decaying: int) -> Lamb:
    """The first ones decay."""
    groups = [{"params": [*parameters[:decaying]], "weight_decay": 0.1}, {"params": [*parameters[decaying:]]}]
    return Lamb(groups, RATE, BETAS, EPS, norms)


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
    together, singly = (
        [torch.nn.Parameter(each.clone(memory_format=torch.preserve_format)) for each in made] for _ in range(2)
    )
    optimizers = [lamb(together, 4), *(lamb([each], number < 4) for number, each in enumerate(singly))]
    for step, given in enumerate(gradients):
        for number, gradient in enumerate(given):
            for parameter in (together[number], singly[number]):
                parameter.grad = None if number == 4 and step == 0 else gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
        if step == 0:  # a tensor of zeros takes Adam's step
            torch.testing.assert_close(together[3].detach(), -RATE * given[3].sign(), rtol=0, atol=1e-4)
    for number, (parameter, other, before) in enumerate(zip(together, singly, made, strict=True)):
        assert torch.equal(parameter, other) and parameter.stride() == before.stride(), number
        assert not before.numel() or not torch.equal(parameter, before), number


Record = tuple[Tensor, Tensor, int]


def norm_of(channels: int, momentum: float | None, calls: int) -> ParallelBatchNorm:
    norm = ParallelBatchNorm(channels, BuildContext(), momentum=momentum)
    materialise([("norm", norm)], torch.device("cpu"), 0)
    facts(norm).calls = calls
    return norm


def recorded(norm: ParallelBatchNorm, forwards: int, random: torch.Generator) -> list[Record]:
    """What it would have recorded in so many forwards."""
    assert norm.running_mean is not None
    made = []
    for number in range(forwards * norm.calls):
        mean, variance = (torch.empty_like(norm.running_mean).normal_(generator=random) for _ in range(2))
        made.append((mean, variance.square(), 12 + number // norm.calls))
    norm.pending = [*made]
    return made


def test_merged_statistics_have_the_bits_of_one_norm_by_itself() -> None:
    """Of several momentums and numbers of calls, over steps of several micro-batches. What they should be:
    tests/distributed/test_norms.py, tests/models/test_called_again.py."""
    random = torch.Generator().manual_seed(0)
    kinds = [(5, 0.1, 1), (3, None, 2), (4, 0.1, 2), (2, 0.3, 1), (6, None, 1)]
    norms, others = ([norm_of(*kind) for kind in kinds] for _ in range(2))
    statistics = RunningStatistics(norms, Group("dp"))
    for step in range(3):
        if step == 2:  # loaded from elsewhere
            for each in (norms[1], others[1]):
                each.num_batches_tracked += 7
        for norm, other in zip(norms, others, strict=True):
            other.pending = recorded(norm, 3, random)
            RunningStatistics([other], Group("dp")).merge(4)
        statistics.merge(4)
        for norm, other in zip(norms, others, strict=True):
            assert torch.equal(norm.running_mean, other.running_mean) and not norm.pending
            assert torch.equal(norm.running_var, other.running_var)
    assert [int(norm.num_batches_tracked) for norm in norms] == [3, 13, 6, 3, 3]


def test_a_norm_of_several_layers_takes_their_statistics_one_after_another() -> None:
    random, norm, other = torch.Generator().manual_seed(0), norm_of(3, 0.1, 2), norm_of(3, 0.1, 2)
    records = recorded(norm, 1, random)
    other.pending = [*records]
    behind = records[1][0].double(), records[1][1].double() * 12 / 11
    RunningStatistics([other], Group("dp")).merge(1)
    facts(norm).calls = 1
    norm.pending = records[:1]
    RunningStatistics([norm], Group("dp"), lambda found: [*found, (norm, *behind)]).merge(1)
    assert torch.equal(norm.running_mean, other.running_mean)
    torch.testing.assert_close(norm.running_var, other.running_var)


def lamb_step(count: int) -> Callable[[], object]:
    parameters = [torch.nn.Parameter(torch.ones(3, 2)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.ones(3, 2)
    optimizer = lamb(parameters, count // 2)
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
        # The decay of the first step is (1 + 0) / (10 + 0): 0.1 x 1 + 0.9 x 2.
        expected = 1.9 if entry.tensor.is_floating_point() else 2
        torch.testing.assert_close(entry.tensor, torch.full_like(entry.tensor, expected))
    return average.update


def merging(count: int, forwards: int = 2, momentum: float | None = 0.1) -> Callable[[], object]:
    norms = [norm_of(3, momentum, 1) for _ in range(count)]
    for norm in norms:
        recorded(norm, forwards, torch.Generator())
    return partial(RunningStatistics(norms, Group("dp")).merge, forwards)


@pytest.mark.parametrize("make", [lamb_step, squares, average, merging, partial(merging, momentum=None)])
def test_what_is_started_does_not_grow_with_the_tensors(make: Callable[[int], Callable[[], object]]) -> None:
    few, many = started(make(10)), started(make(100))
    assert few == many and few.total() < 50


def test_merging_starts_an_operator_for_each_sum_that_has_an_order() -> None:
    assert started(merging(3, 12)).total() - started(merging(3, 2)).total() == 10 * 2
