"""ParallelBatchNorm cut over channels, its statistics merged over replicas, against nn.BatchNorm in float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor, nn

from megasnn.layers import ParallelBatchNorm
from megasnn.parallel.sync_batch_norm import merge_running_statistics
from megasnn.parallel_state import alone
from tests.distributed.whole import assemble, build, channels_last, context, everybody, mine, parts, random

C, STEPS = 12, 2
CLOSE = dict(rtol=1e-11, atol=1e-11)
OPTIONS = [
    dict(affine=affine, track_running_stats=track, momentum=momentum, blocks=blocks)
    for affine, track, momentum, blocks in product((True, False), (True, False), (0.2, None), (1, 3))
]


def _batch(step: int, space: tuple[int, ...], samples: int = 5) -> Tensor:
    return random(2, samples, C, *space, seed=step) * 3 + torch.linspace(-2, 5, C).view(-1, *[1] * len(space))


def _initial() -> dict[str, Tensor]:
    return {"norm.weight": random(C, seed=70), "norm.bias": random(C, seed=71)}


def _cut(options: dict, space: tuple[int, ...]) -> list:
    group = everybody()
    norm = ParallelBatchNorm(C, context(group), **options)
    tensors = build({"norm": norm}, _initial())
    blocks = options["blocks"]
    norm.recording = True
    outputs, gradients = [], []
    for step in range(STEPS):
        x = channels_last(mine(_batch(step, space), group, blocks=blocks)).requires_grad_()
        y = norm(x)
        (y * mine(random(*_batch(0, space).shape, seed=60), group, blocks=blocks)).sum().backward()
        outputs.append(y.detach())
        gradients.append(x.grad)
        merge_running_statistics([norm], alone("data"), 1)
        assert not norm.pending
    norm.eval()
    outputs.append(norm(channels_last(mine(_batch(9, space), group, blocks=blocks))).detach())
    assert not norm.pending
    shape = tuple(_batch(0, space).shape)
    each = C // blocks // group.size

    def as_parts(name: str, value: Tensor) -> tuple:
        zeros = (0,) * len(space)
        boxes = [
            ((0, 0, block * (C // blocks) + group.rank * each, *zeros), part)
            for block, part in enumerate(value.chunk(blocks, 2))
        ]
        return name, shape, boxes

    named = [as_parts(f"y{i}", y) for i, y in enumerate(outputs)]
    named += [as_parts(f"x{i}", gradient) for i, gradient in enumerate(gradients)]
    return parts(tensors) + [(f"grad {name}", *rest) for name, *rest in parts(tensors, gradients=True)] + named


def _truth(options: dict, space: tuple[int, ...]) -> dict[str, Tensor]:
    kind = nn.BatchNorm2d if len(space) == 2 else nn.BatchNorm1d
    norm = kind(C, **{k: v for k, v in options.items() if k != "blocks"}, dtype=torch.float64)
    if options["affine"]:
        norm.load_state_dict({**norm.state_dict(), **{k.removeprefix("norm."): v for k, v in _initial().items()}})
    found = {}
    for step in range(STEPS):
        x = _batch(step, space).requires_grad_()
        y = norm(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        (y * random(*x.shape, seed=60)).sum().backward()
        found[f"y{step}"], found[f"x{step}"] = y.detach(), x.grad
    norm.eval()
    found[f"y{STEPS}"] = norm(_batch(9, space).flatten(0, 1)).unflatten(0, (2, 5)).detach()
    found |= {f"norm.{name}": value for name, value in norm.state_dict().items()}
    return found | {f"grad norm.{name}": p.grad for name, p in norm.named_parameters()}


def _all_options(space: tuple[int, ...]) -> list:
    return [_cut(options, space) for options in OPTIONS]


@pytest.mark.parametrize("size, space", [(1, (3, 4)), (2, (3, 4)), (4, (6,)), (2, (6,))])
def test_every_option_against_torch(ranks, size, space) -> None:
    everyone = ranks(size, _all_options, space) if size < 4 else ranks(4, _all_options_of_one_block, space)
    for index, options in enumerate(OPTIONS if size < 4 else [o for o in OPTIONS if o["blocks"] == 1]):
        expected, found = _truth(options, space), assemble([rank[index] for rank in everyone])
        assert found.keys() == expected.keys(), options
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, **CLOSE, msg=lambda t, at=(options, name): f"{at}: {t}")


def _all_options_of_one_block(space: tuple[int, ...]) -> list:
    return [_cut(options, space) for options in OPTIONS if options["blocks"] == 1]


SHARES = [[4, 4], [4], [2]]  # micro-batches of three replicas: uneven in number and size


def _replica() -> dict[str, Tensor]:
    group = everybody("data")
    norms = {name: ParallelBatchNorm(C, context(alone("tensor"))) for name in ("one", "two")}
    norms["free"] = ParallelBatchNorm(C, context(alone("tensor")), track_running_stats=False)
    tensors = build(norms, {})
    done = sum(len(share) for share in SHARES[: group.rank])
    for norm in norms.values():
        norm.recording = True
    for index, samples in enumerate(SHARES[group.rank]):
        x = _batch(done + index, (3, 4), samples)
        norms["two"](norms["one"](x) * 2 + x[:, :, :1])
        norms["free"](x)
    merge_running_statistics(list(norms.values()), group, max(map(len, SHARES)))
    assert not any(norm.pending for norm in norms.values())
    return {e.name: e.tensor.clone() for e in tensors if not e.is_parameter}


def test_statistics_of_uneven_replicas_are_those_of_the_whole_batch(ranks) -> None:
    first, second, third = ranks(3, _replica)
    assert first.keys() == {f"{n}.{b}" for n in ("one", "two") for b in nn.BatchNorm2d(1).state_dict() if "_" in b}
    for name, value in first.items():
        assert torch.equal(value, second[name]) and torch.equal(value, third[name]), name
    sizes = [samples for share in SHARES for samples in share]
    inputs: dict[str, list[Tensor]] = {"one": [], "two": []}
    for index, samples in enumerate(sizes):
        x = _batch(index, (3, 4), samples)
        inputs["one"].append(x.flatten(0, 1))
        normed = nn.BatchNorm2d(C, dtype=torch.float64)(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        inputs["two"].append((normed * 2 + x[:, :, :1]).detach().flatten(0, 1))
    for name, batches in inputs.items():
        truth = nn.BatchNorm2d(C, dtype=torch.float64)
        truth(torch.cat(batches))
        for buffer, value in truth.named_buffers():
            torch.testing.assert_close(first[f"{name}.{buffer}"], value, **CLOSE)


def test_statistics_of_bfloat16_are_float32() -> None:
    norm, x = ParallelBatchNorm(C, context(alone("tensor"), torch.float32)), _batch(0, (4, 4)).bfloat16()
    build({"norm": norm}, {})
    norm.recording = True
    assert norm(x).dtype == torch.bfloat16
    ((mean, variance, count),) = norm.pending
    flat = x.float().flatten(0, 1)
    assert mean.dtype == variance.dtype == torch.float32 and count == flat.numel() // C
    torch.testing.assert_close(mean, flat.mean((0, 2, 3)))
    torch.testing.assert_close(variance, flat.var((0, 2, 3), correction=0))
