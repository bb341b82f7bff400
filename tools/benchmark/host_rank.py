"""A process that measures the host of one checkout: a model on a layout, as on a GPU that takes no time.

Of megasnn it uses what is public, and the places of `host_places`: so that it can measure another checkout. This file
and what it imports therefore import nothing from megasnn before they know which.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from tools.benchmark import host_places as places
from tools.benchmark.host_marks import Label, Marks, Meter
from tools.benchmark.host_substitutes import join_fake_ranks, launch, without_computing

STEP: Label = ("step", False)  # what is around the other parts
PARTS: dict[str, tuple[Label, ...]] = {
    "unit_forward": (("unit", False),),
    "unit_backward": (("unit", True),),
    "attention": (("attention", False), ("attention", True)),
    "other_layers": (("layers", False), ("layers", True)),
    "weight_gradients": (("weight gradients", False),),
    "executor": (("executor", False), ("executor", True)),
    "optimizer": (("optimizer", False),),
    "step": (STEP, ("step", True)),
}
"""Parts of a step, and what the meter calls them."""
_UNTIMED = 3  # steps, in which caches are filled


@dataclass(frozen=True)
class HostWork:
    """Work of a row.

    Attributes:
        name: of the row. tree: a checkout, whose megasnn is measured.
        model: its name in `megasnn.MODELS`. dimensions, flags: of the model and of `megasnn.Engine`.
    """

    name: str
    tree: Path
    model: str
    dimensions: Mapping[str, Any]
    flags: Mapping[str, Any]
    ranks: int = 1
    micro_batches: int = 1


@dataclass(frozen=True)
class HostFigures:
    """Figures of a turn, of one micro-batch.

    Attributes:
        parts: of each part the milliseconds or the calls. own: milliseconds of the benchmark itself, taken off.
        c_calls: functions of C that Python called. substituted: calls of substitutes, by their kind.
    """

    parts: Mapping[str, float]
    own: float = 0.0
    c_calls: Mapping[str, float] = field(default_factory=dict)
    substituted: Mapping[str, float] = field(default_factory=dict)


class HostRank:
    """Builds an Engine of the tree when made; every turn takes some steps. Raises LookupError for a place that the tree
    does not have."""

    def __init__(self, task: tuple[HostWork, int, str]) -> None:
        self._work, _, _ = task
        sys.path.insert(0, str(self._work.tree))
        import megasnn

        torch.set_num_threads(1)
        if self._work.ranks > 1:
            join_fake_ranks(self._work.ranks)
        self._meter = Meter(STEP)
        self._model = megasnn.MODELS[self._work.model](**self._work.dimensions)
        self._engine = megasnn.Engine(self._model, **self._work.flags)
        self._samples = int(self._work.flags["global_batch_size"])
        self._inside = ExitStack()
        self._inside.enter_context(_on_gpu_without_computing(self._meter, self._engine))
        self._batch = self._random_batch()
        for _ in range(_UNTIMED):
            self._step()
        _require_tree(self._work.tree)
        self._meter.calibrate()

    def time(self, steps: int) -> HostFigures:
        """Medians over some steps of the processor time of each part, in milliseconds."""
        seconds: list[Counter[Label]] = []
        own: list[float] = []
        self._meter.counting = False
        gc.collect()
        gc.disable()  # it comes at other times in other trees
        for _ in range(steps):
            self._meter.reset()
            self._meter.measured(self._step)
            seconds.append(self._meter.seconds)
            own.append(self._meter.own)
        gc.enable()
        scale = 1e3 / self._work.micro_batches
        parts = {name: median(sum(each[label] for label in of) for each in seconds) for name, of in PARTS.items()}
        return HostFigures({name: scale * value for name, value in parts.items()}, scale * median(own))

    def calls(self) -> HostFigures:
        """Calls of each part, in one step."""
        self._meter.counting = True
        self._meter.reset()
        gc.collect()
        gc.disable()
        self._meter.measured(self._step)
        gc.enable()
        found = [self._by_part(each) for each in (self._meter.calls, self._meter.c_calls)]
        count = self._work.micro_batches
        substituted = {kind: number / count for kind, number in self._meter.substituted.items()}
        return HostFigures(found[0], c_calls=found[1], substituted=substituted)

    def _by_part(self, counts: Counter[Label]) -> dict[str, float]:
        count = self._work.micro_batches
        return {name: sum(counts[label] for label in labels) / count for name, labels in PARTS.items()}

    def _step(self) -> None:
        result = self._engine.train_step(*self._batch)
        if result.skipped:
            raise RuntimeError(f"{self._work.name}: the step was skipped, which takes another way than a good one")

    def _random_batch(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn((self._samples, *self._model.input_shape), generator=generator)
        return images, torch.randint(0, self._model.num_classes, (self._samples,), generator=generator)


@contextmanager
def _on_gpu_without_computing(meter: Meter, engine: Any) -> Iterator[None]:
    """Inside, the steps of an Engine compute nothing, and tell the meter their parts."""
    marks = Marks(meter)
    modules = {places.UNIT: "unit", places.ATTENTION: "attention", places.CHUNK: None}
    with ExitStack() as stack:
        stack.enter_context(without_computing(meter))
        stack.enter_context(places.as_on_gpu(launch(meter)))
        for paths, name in modules.items():
            holder, method = places.resolved(paths)
            forward = getattr(holder, method)
            if name is None:
                stack.enter_context(places.replaced(paths, marks.around(forward, ("layers", False))))
            else:
                stack.enter_context(places.replaced(paths, marks.marked(forward, lambda module, name=name: name)))
        for paths, label in ((places.EXECUTOR, ("executor", False)), (places.CLIP, ("optimizer", False))):
            stack.enter_context(places.replaced(paths, marks.around(getattr(*places.resolved(paths)), label)))
        leave = getattr(*places.resolved(places.WEIGHT_GRADIENTS))
        stack.enter_context(places.replaced(places.WEIGHT_GRADIENTS, _marks_tasks(leave, marks)))
        for paths in (("torch.autograd:backward",), ("torch.autograd:grad",)):
            stack.enter_context(places.replaced(paths, marks.around(getattr(*places.resolved(paths)), ("layers", True))))
        engine.optimizer.step = marks.around(engine.optimizer.step, ("optimizer", False))
        yield


def _require_tree(tree: Path) -> None:
    """Raises ValueError where a module of megasnn has come from another checkout."""
    files = [module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "megasnn"]
    strange = [file for file in files if file is not None and not Path(file).resolve().is_relative_to(tree.resolve())]
    if strange:
        raise ValueError(f"{tree} was to be measured, and {strange[0]} was imported")


def _marks_tasks(leave: Any, marks: Marks) -> Any:
    def marking(gradients: Any, task: Any) -> None:
        leave(gradients, marks.around(task, ("weight gradients", False)))

    return marking
