"""The check of a GPU, what a step starts: for each unit of convolution, norm and neurons, forward and backward apart.

A profile holds what the host starts, in its order, and marks where a unit's forward or backward begins and ends.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from megasnn.layers import ConvNormNeuron
from tools.benchmark.gpu import Setting

Direction = Literal["forward", "backward"]
OUTSIDE = "outside of units"
_MARK = "launches of "
_LAUNCHES = re.compile(r"cu(?:da)?(?:Launch|Memcpy|Memset|GraphLaunch)")


@dataclass
class Launches:
    """
    Attributes:
        forward, backward: what the host started, by the name of the unit; the rest is in OUTSIDE.
        done: what the device did, all together.
    """

    forward: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    backward: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    done: int = 0

    @property
    def total(self) -> int:
        return sum(self.forward.values()) + sum(self.backward.values())

    @property
    def outside(self) -> int:
        return self.forward[OUTSIDE] + self.backward[OUTSIDE]

    def most(self, direction: Direction) -> tuple[int, str]:
        """Of any unit, and which that is."""
        found = {name: count for name, count in getattr(self, direction).items() if name != OUTSIDE}
        name = max(found, key=found.__getitem__)
        return found[name], name


def launches(run: Callable[[], object], units: Mapping[str, ConvNormNeuron], setting: Setting) -> Launches:
    """What `run` starts on a GPU: kernels, copies and graphs; on a CPU the operators that call no other.

    Raises:
        RuntimeError: the device has done more than the host was seen to start.
    """
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if setting.is_gpu else [ProfilerActivity.CPU]
    with _marked(units), profile(activities=activities) as trace:
        run()
        setting.wait()
    events = list(trace.events())
    found = by_unit(events, setting.is_gpu)
    found.done = sum(map(_is_of_device, events)) if setting.is_gpu else found.total
    if not found.done or found.total < 0.9 * found.done:
        raise RuntimeError(
            f"the profiler saw the host start {found.total} things and the device do {found.done}: is its access to "
            "the GPU restricted?"
        )
    return found


def by_unit(events: Iterable[Any], is_gpu: bool) -> Launches:
    """What the events of a profile come to."""
    found = Launches()
    name, counts = OUTSIDE, found.forward
    for event in sorted(events, key=lambda each: each.time_range.start):
        if event.device_type != DeviceType.CPU:
            continue
        if event.name.startswith(_MARK):
            direction, name = event.name.removeprefix(_MARK).split(" ", 1)
            counts = getattr(found, direction)
        elif _LAUNCHES.match(event.name) if is_gpu else not event.cpu_children:
            counts[name] += 1
    return found


def _is_of_device(event: Any) -> bool:
    """Not what a profile repeats on the device of names that the host has given."""
    return event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)


@contextmanager
def _marked(units: Mapping[str, ConvNormNeuron]) -> Iterator[None]:
    """Inside, the calls of units are marked in profiles. The backward of a unit ends with the gradient of its input, or
    where that has none, with all that is differentiated at once."""
    differentiate = torch.autograd.backward

    def backward(*args: Any, **options: Any) -> None:
        differentiate(*args, **options)
        _mark("backward", OUTSIDE)

    hooks = [hook for name, unit in units.items() for hook in _hooks(name, unit)]
    try:
        with mock.patch.object(torch.autograd, "backward", backward):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _hooks(name: str, unit: ConvNormNeuron) -> Iterator[Any]:
    def begin(_: object, inputs: tuple[Tensor, ...]) -> None:
        _mark("forward", name)
        if inputs[0].requires_grad:
            inputs[0].register_hook(lambda _: _mark("backward", OUTSIDE))

    def end(_: object, __: object, spikes: Tensor) -> None:
        _mark("forward", OUTSIDE)
        if spikes.grad_fn is not None:
            # Behind the hooks of the spikes, which may be another unit's input.
            spikes.grad_fn.register_prehook(lambda _: _mark("backward", name))

    yield unit.register_forward_pre_hook(begin)
    yield unit.register_forward_hook(end)


def _mark(direction: Direction, name: str) -> None:
    with record_function(f"{_MARK}{direction} {name}"):
        pass
