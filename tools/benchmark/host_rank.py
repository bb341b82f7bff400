"""A process that measures one checkout's host: a model on a layout, as on a GPU that takes no time.

It can measure another checkout, because it uses only megasnn's public names and the places in `host_places`. This file
and its imports therefore import nothing from megasnn before they know the checkout.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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
_OPTIMIZER: Label = ("optimizer", False)
_WEIGHT_GRADIENTS: Label = ("weight gradients", False)
_MODULES = {places.UNIT: "unit", places.ATTENTION: "attention"}
_FUNCTIONS: dict[places.Paths, Label] = {
    places.CHUNK: ("layers", False),
    places.EXECUTOR: ("executor", False),
    places.CLIP: _OPTIMIZER,
    ("torch.autograd:backward",): ("layers", True),
    ("torch.autograd:grad",): ("layers", True),
}
PARTS: dict[str, tuple[Label, ...]] = {
    "unit_forward": (("unit", False),),
    "unit_backward": (("unit", True),),
    "attention": (("attention", False), ("attention", True)),
    "other_layers": (("layers", False), ("layers", True)),
    "weight_gradients": (_WEIGHT_GRADIENTS,),
    "executor": (("executor", False), ("executor", True)),
    "optimizer": (_OPTIMIZER,),
    "step": (STEP, ("step", True)),
}
"""Parts of a step, and the meter's labels for each."""
_UNTIMED = 10  # steps, in which caches are filled and Python adapts its bytecode


@dataclass(frozen=True)
class HostWork:
    """A row's work.

    Attributes:
        tree: the measured checkout.
        model: name in `megasnn.MODELS`.
        dimensions, flags: for the model, and for `megasnn.Engine`.
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
    """A turn's figures for one micro-batch.

    Attributes:
        parts: milliseconds or calls by part.
        own: the benchmark's own milliseconds, already subtracted.
        c_calls: C functions that Python called.
        substituted: calls by kind of substitute.
    """

    parts: Mapping[str, float]
    own: float = 0.0
    c_calls: Mapping[str, float] = field(default_factory=dict)
    substituted: Mapping[str, float] = field(default_factory=dict)


class HostRank:
    """Builds the tree's Engine; every turn takes some steps. Raises LookupError for a place that the tree lacks."""

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
        """Each part's median processor time over some steps, in milliseconds."""
        seconds: list[Mapping[Label, float]] = []
        own: list[float] = []
        self._meter.counting = False
        with _without_garbage_collection():
            for _ in range(steps):
                self._meter.reset()
                self._meter.measured(self._step)
                seconds.append(self._meter.seconds)
                own.append(self._meter.own)
        scale = 1e3 / self._work.micro_batches
        parts: dict[str, float] = {}
        for name, labels in PARTS.items():
            parts[name] = scale * median(_sum_of(labels, each) for each in seconds)
        return HostFigures(parts, scale * median(own))

    def calls(self) -> HostFigures:
        """Each part's calls in one step."""
        meter = self._meter
        meter.counting = True
        meter.reset()
        with _without_garbage_collection():
            meter.measured(self._step)
        scale = 1 / self._work.micro_batches
        calls = {name: scale * _sum_of(labels, meter.calls) for name, labels in PARTS.items()}
        c_calls = {name: scale * _sum_of(labels, meter.c_calls) for name, labels in PARTS.items()}
        substituted = {kind: scale * number for kind, number in meter.substituted.items()}
        return HostFigures(calls, c_calls=c_calls, substituted=substituted)

    def _step(self) -> None:
        result = self._engine.train_step(*self._batch)
        if result.skipped:
            raise RuntimeError(f"{self._work.name}: the step was skipped, which takes another way than a good one")

    def _random_batch(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn((self._samples, *self._model.input_shape), generator=generator)
        return images, torch.randint(0, self._model.num_classes, (self._samples,), generator=generator)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    # Other checkouts would collect at other times.
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _sum_of(labels: Sequence[Label], figures: Mapping[Label, float]) -> float:
    return sum(figures.get(label, 0) for label in labels)


@contextmanager
def _on_gpu_without_computing(meter: Meter, engine: Any) -> Iterator[None]:
    """Inside, an Engine's steps compute nothing, and tell the meter their parts."""
    marks = Marks(meter)
    with ExitStack() as stack:
        stack.enter_context(without_computing(meter))
        stack.enter_context(places.as_on_gpu(launch(meter)))
        for paths, name in _MODULES.items():
            marked = marks.marked(getattr(*places.resolved(paths)), _always(name))
            stack.enter_context(places.replaced(paths, marked))
        for paths, label in _FUNCTIONS.items():
            around = marks.around(getattr(*places.resolved(paths)), label)
            stack.enter_context(places.replaced(paths, around))
        leave = getattr(*places.resolved(places.WEIGHT_GRADIENTS))
        stack.enter_context(places.replaced(places.WEIGHT_GRADIENTS, _marking_tasks(leave, marks)))
        engine.optimizer.step = marks.around(engine.optimizer.step, _OPTIMIZER)
        yield


def _always(name: str) -> Callable[[Any], str]:
    return lambda module: name


def _marking_tasks(leave: Callable[..., None], marks: Marks) -> Callable[..., None]:
    def marking(gradients: Any, task: Callable[[], None]) -> None:
        leave(gradients, marks.around(task, _WEIGHT_GRADIENTS))

    return marking


def _require_tree(tree: Path) -> None:
    """Raises ValueError if a module of megasnn was imported from another checkout."""
    files = [module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "megasnn"]
    strange = [file for file in files if file is not None and not Path(file).resolve().is_relative_to(tree.resolve())]
    if strange:
        raise ValueError(f"{tree} was to be measured, and {strange[0]} was imported")
