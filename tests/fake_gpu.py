"""A step as a GPU would compute it, on tensors without values: what is started, and what waits.

Tensors say that they are on the CPU, because torch built without CUDA cannot differentiate others, and wherever the
code asks for the device it is answered as on a GPU. Nothing is computed, so that models may have any size.
"""

from __future__ import annotations

import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megasnn.kernels.triton.launch import Launch
from megasnn.layers.blocks import ConvNormNeuron
from megasnn.layers.weight_grad import CastWeights
from tests.recorded_graphs import READS
from tools.benchmark.host_marks import Label, Marks
from tools.benchmark.host_places import as_on_gpu

OUTSIDE = "outside of units"
_STARTS_NOTHING = ("empty", "detach", "_unsafe_view", "alias", "lift_fresh", "new_empty", "_reshape_alias", "resize_")


@dataclass
class Counted:
    """
    Attributes:
        forward, backward: operators that were started for each unit, by its name; the rest is in OUTSIDE.
        waits: where the host would have waited, as "file:line operator".
        numbers: what each operator was given besides tensors, which a graph would give it in every step.
    """

    forward: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    backward: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    waits: list[str] = field(default_factory=list)
    numbers: list[tuple[Any, ...]] = field(default_factory=list)


class _Counting(TorchDispatchMode):
    def __init__(self, counted: Counted) -> None:
        super().__init__()
        self.counted, self.label = counted, (OUTSIDE, False)

    def pause(self) -> None:
        """Hooks start nothing."""

    def enter(self, label: Label) -> None:
        self.label = label

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in READS:
            self.counted.waits.append(f"{_caller()} {name}")
        if name == "_local_scalar_dense":
            return 0.0 if args[0].is_floating_point() else 0
        result = func(*args, **(kwargs or {}))
        if (
            func.namespace != "prim"
            and not func.is_view
            and name not in _STARTS_NOTHING
            and not name.startswith("empty")
        ):
            self.count(name, (args, kwargs))
        return result

    def start(self, launch: Launch, *tensors: Tensor | None) -> None:
        """Takes the place of `Launch.__call__`."""
        self.count(launch.kernel.fn.__name__, (tensors, launch.numbers, launch.constants))

    def count(self, name: str, given: Any) -> None:
        unit, is_backward = self.label
        (self.counted.backward if is_backward else self.counted.forward)[unit][name] += 1
        numbers = (each.shape if isinstance(each, Tensor) else each for each in tree_leaves(given))
        self.counted.numbers.append((name, *numbers))


def _caller() -> str:
    """The place in the package that asked."""
    for frame in reversed(traceback.extract_stack()):
        if "/megasnn/" in frame.filename:
            return f"{frame.filename.split('/megasnn/')[-1]}:{frame.lineno}"
    return "elsewhere"


@contextmanager
def fake_gpu(names: dict[ConvNormNeuron, str] | None = None) -> Iterator[Counted]:
    """Inside, new tensors have no values and what a GPU would be given is counted.

    Args:
        names: of the units to count by themselves.
    """
    counted = Counted()
    counting = _Counting(counted)
    marks, differentiate = Marks(counting), torch.autograd.backward

    def backward(*args: Any) -> None:
        differentiate(*args)
        counting.label = OUTSIDE, True

    def cast(self: CastWeights, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Once a step, for whichever unit is the first."""
        label = counting.label
        counting.label = OUTSIDE, label[1]
        found = original(self, weight, dtype)
        counting.label = label
        return found

    original = CastWeights.cast
    forward = marks.marked(ConvNormNeuron.forward, lambda unit: (names or {}).get(unit, OUTSIDE))
    with ExitStack() as stack:
        # A bound method would not be given the launch that it is called of.
        stack.enter_context(as_on_gpu(lambda launch, *tensors: counting.start(launch, *tensors)))
        stack.enter_context(mock.patch.object(ConvNormNeuron, "forward", forward))
        stack.enter_context(mock.patch("torch.autograd.backward", backward))
        stack.enter_context(mock.patch.object(CastWeights, "cast", cast))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(counting)
        yield counted
