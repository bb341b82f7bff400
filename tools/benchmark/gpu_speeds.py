"""The check of a GPU, speed of kernels: bytes a second beside those of a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median

import torch
from torch import Tensor

from megasnn.kernels import NeuronSpec
from megasnn.kernels.codec import pack_bits, unpack_bits
from megasnn.kernels.norm_neuron import Norm, Unit
from tools.benchmark.gpu import Figure, Setting
from tools.benchmark.harness import seconds

ROUNDS, REPEATS = 5, 10
FORWARD, BACKWARD = 0.8, 0.7  # of a copy's bytes a second
LARGER_THAN_CACHE = 3.0
AHEAD, MOST_AHEAD = 32, 512  # copies that the device is given before what is timed


def speeds(setting: Setting, case: str = "") -> Iterator[Figure]:
    """The four calls of a unit, and packing."""
    for dtype in (torch.bfloat16, torch.float32):
        yield from _speeds_of(setting, dtype)


def _speeds_of(setting: Setting, dtype: torch.dtype) -> Iterator[Figure]:
    from megasnn.kernels.triton import calls

    shape = (2, 2, 8, 4, 4) if setting.is_tiny else (4, 64, 128, 56, 56)
    name = str(dtype).removeprefix("torch.")
    x, g, target = (_normal(setting, *shape, dtype=dtype) for _ in range(3))
    size, bits = x.nbytes, x.numel() // 8
    if setting.is_gpu:  # what a cache holds between two calls would come faster than memory gives it
        cache = torch.cuda.get_device_properties(setting.device).L2_cache_size
        note = f"{cache / 1e6:.0f} MB of cache"
        yield Figure(f"input of {name}, x the cache", size / cache, "x", LARGER_THAN_CACHE, note=note)

    def copy() -> Tensor:
        return target.copy_(x)

    copied = _rate(setting, copy, 2 * size, copy)
    yield Figure(f"copy, {name}", copied / 1e9, "GB/s", note="x".join(map(str, shape)))
    unit = Unit(NeuronSpec(), 1e-5, False, shape[0])
    ones = torch.ones(shape[2], device=setting.device)
    norm = Norm(ones.double() * 0, ones.double(), ones, ones)
    sums, carried = calls.backward_sums(x, g, norm, None, unit, False)
    count, packed = x.numel() // shape[2], pack_bits(x)

    def input_gradient() -> Tensor:
        return calls.input_gradient(x, g, norm, None, unit, sums, count, carried)

    work: list[tuple[str, Callable[[], object], int, float | None]] = [
        ("statistics", lambda: calls.statistics(x), size, FORWARD),
        ("normalise, charge, fire", lambda: calls.fire(x, norm, None, unit, True), 2 * size + bits, FORWARD),
        ("sums of backward", lambda: calls.backward_sums(x, g, norm, None, unit, False), 2 * size, BACKWARD),
        ("gradient of the input", input_gradient, 3 * size, BACKWARD),
        ("packing of bits", lambda: pack_bits(x), size + bits, None),
        ("unpacking of bits", lambda: unpack_bits(packed, x.shape, dtype=dtype), size + bits, None),
    ]
    for what, run, moved, least in work:
        rate = _rate(setting, run, moved, copy)
        target_share = None if least is None else setting.target(least)
        yield Figure(f"{what}, {name}", rate / copied, "x a copy", target_share, note=f"{rate / 1e9:.0f} GB/s")


def _rate(setting: Setting, run: Callable[[], object], moved: int, copy: Callable[[], object]) -> float:
    """Bytes a second: the median of some rounds, after one to warm up."""
    return moved / median([seconds_of_call(setting, run, copy) for _ in range(1 + ROUNDS)][1:])


def seconds_of_call(setting: Setting, run: Callable[[], object], copy: Callable[[], object]) -> float:
    """Of the device alone. It is busy with copies until the host has issued all calls, so that it never waits for one:
    the first event must not have come by then.

    Raises:
        RuntimeError: the host takes longer than the most copies.
    """
    if not setting.is_gpu:
        return seconds(run)
    run()  # compiled, and its memory taken
    ahead = AHEAD
    while ahead <= MOST_AHEAD:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        setting.wait()
        for _ in range(ahead):
            copy()
        begin.record()
        for _ in range(REPEATS):
            run()
        end.record()
        was_busy = not begin.query()
        end.synchronize()
        if was_busy:
            return 1e-3 * begin.elapsed_time(end) / REPEATS
        ahead *= 2
    raise RuntimeError(f"the host issues {REPEATS} calls in more time than the device copies {MOST_AHEAD} times")


def _normal(setting: Setting, *shape: int, dtype: torch.dtype) -> Tensor:
    """`[T, N, C, H, W]` with the channels last in memory."""
    time, samples, channels, *space = shape
    generator = torch.Generator(setting.device).manual_seed(0)
    values = torch.randn(
        time, samples, *space, channels, generator=generator, device=setting.device, dtype=torch.float32
    )
    return values.to(dtype).movedim(-1, 2)
