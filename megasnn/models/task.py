"""A model's task: sample arrays, and loss, metrics and answers from the last layer's output.

By default a model classifies images: see `Model.inputs` and `Model.target`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megasnn.common.bundle import Bundle, logits_of, map_entries
from megasnn.layers.shape_inference import said_of_values
from megasnn.models.arrays import ArraySpec, shape_and_type
from megasnn.models.losses import correct_predictions
from megasnn.models.model import Model

_TOP = {"top1": 1, "top5": 5}
_REDUCED = (torch.bfloat16, torch.float16)
TARGET = "target"
"""In a layer's `takes`, the target that is no input. Only the last layer may take it, because the last stage has it."""


@dataclass(frozen=True)
class Task:
    """A model's inputs, target, loss, metrics and answers.

    Attributes:
        target: an array, or an input's name.
        classes: of classification logits `[T, N, classes]`; 0 for other tasks.
        loss, metrics, predict: see `Model`.
        trained, evaluated: metrics of a training step and of an evaluation.
        answer: for one sample.
    """

    inputs: Mapping[str, ArraySpec]
    target: ArraySpec | str
    classes: int
    loss: Callable[[Any, Any], Tensor] | None
    metrics: Callable[[Any, Any], Mapping[str, Tensor]] | None
    predict: Callable[[Any], Tensor]
    trained: tuple[str, ...] = ("top1",)
    evaluated: tuple[str, ...] = ("top1", "top5")
    answer: ArraySpec = ArraySpec(())

    @property
    def input_names(self) -> dict[int, str]:
        """Input names by number: among a layer's sources the model's inputs are -1, -2 and so on."""
        return {-1 - position: name for position, name in enumerate(self.inputs)}

    @property
    def target_number(self) -> int:
        """The target's number among a layer's sources, behind the inputs'."""
        return -1 - len(self.inputs)

    @property
    def target_spec(self) -> ArraySpec:
        return self.inputs[self.target] if isinstance(self.target, str) else self.target

    @property
    def tokens(self) -> int:
        """Tokens in each sample's inputs and target. Raises ValueError without them, or for different numbers."""
        lengths = []
        for name, spec in {**self.inputs, "target": self.target_spec}.items():
            if not spec.over_tokens:
                raise ValueError(
                    f"--context-parallel-cut tokens needs tokens in every input and in the target, and {name} "
                    f"{[*spec.shape]} has none: use samples, or declare ArraySpec(..., over_tokens=True)"
                )
            lengths.append(spec.shape[-1])
        if len(set(lengths)) > 1:
            raise ValueError(f"--context-parallel-cut tokens needs equally many tokens in all arrays, got {lengths}")
        return lengths[0]

    def examples(self, samples: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """Random inputs to measure layers with, equal in every call."""
        draws = torch.Generator().manual_seed(0)
        return {name: each.examples(samples, draws).to(each.type_for(dtype)) for name, each in self.inputs.items()}

    def example_targets(self, samples: int, dtype: torch.dtype) -> Tensor:
        """Random targets, equal in every call."""
        draws = torch.Generator().manual_seed(1)
        return self.target_spec.examples(samples, draws).to(self.target_spec.type_for(dtype))

    def summed_loss(self, named: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
        """(output, target) -> the samples' summed loss. `named` is --loss, used without a loss in the model."""
        own = self.loss
        if own is None:
            return named
        return lambda output, target: _checked("loss", own(_widened(output), target), len(target)).sum()

    @torch.no_grad()
    def sums(self, output: Bundle, target: Tensor, names: Sequence[str]) -> Tensor:
        """Metrics summed over samples, `[names]`."""
        if self.metrics is None:
            top = tuple(_TOP[name] for name in names)
            return correct_predictions(logits_of(output), target, top)
        found = self.metrics(_widened(output), target)
        if not names:
            return target.new_zeros(0)
        return torch.stack([_checked(f"metrics {name}", found[name], len(target)).double().sum() for name in names])

    def answers_of(self, output: Bundle) -> Tensor:
        """The samples' answers, `[N, ...]`. Raises ValueError if `predict` returns another number."""
        answers = self.predict(_widened(output))
        return _checked("predict", answers, logits_of(output).shape[1], ", ...")

    def tried(self, output: Bundle) -> Task:
        """The task with its metrics' names and an answer's shape, found on the meta device.

        Raises:
            ValueError: a task function fails, or returns no value or answer for each sample.
        """
        target = self.target_spec.empty(logits_of(output).shape[1], torch.float32)
        evaluated = self.evaluated
        trained = self.trained
        function = "loss"
        try:
            if self.loss is not None:
                self.summed_loss(self.loss)(output, target)
            function = "metrics"
            if self.metrics is not None:
                evaluated = trained = tuple(self.metrics(output, target))
                self.sums(output, target, evaluated)
            function = "predict"
            answer = self.answers_of(output)
        # Functions of the user's may raise anything.
        except Exception as error:
            why = said_of_values(error) or str(error)
            raise ValueError(f"{function} of the model, tried without values: {why}") from error
        spec = ArraySpec(tuple(answer.shape[1:]), "float" if answer.is_floating_point() else "int")
        return replace(self, evaluated=evaluated, trained=trained, answer=spec)


def task_of(model: Model) -> Task:
    """Raises ValueError for an unknown target, or a target without a loss."""
    inputs = dict(model.inputs)
    target = model.target
    own = model.own_task()
    if not inputs or (isinstance(target, str) and target not in inputs):
        raise ValueError(f"the target is {target!r}, and the inputs are {', '.join(inputs) or 'none'}")
    if "target" in own and "loss" not in own:
        raise ValueError("the losses of --loss are for classes: give a model with a `target` a method `loss`, too")
    classes = 0 if "target" in own else model.num_classes
    metrics: Any = model.metrics
    if metrics is None and not classes:
        metrics = _no_metrics
    # Top-5 of five classes is always right.
    evaluated = ("top1", "top5") if classes > 5 else ("top1",)
    return Task(inputs, target, classes, model.loss, metrics, model.predict or mean_over_time, evaluated=evaluated)


def _no_metrics(output: object, target: object) -> dict[str, Any]:
    return {}


def mean_over_time(output: Bundle) -> Tensor:
    """The default answer."""
    return logits_of(output).mean(0)


def _widened(output: Bundle) -> Any:
    # Losses and metrics are sums of many values, which need float32.
    # No copy where the type is wide enough.
    return map_entries(lambda x: x.float() if x.dtype in _REDUCED else x, output)


def _checked(name: str, found: object, samples: int, more: str = "") -> Tensor:
    """Raises ValueError for anything but `[samples]`, or with `more` `[samples, ...]`."""
    if not isinstance(found, Tensor) or found.shape[:1] != (samples,) or (not more and found.ndim != 1):
        raise ValueError(
            f"{name} gives {shape_and_type(found)} for {samples} samples, and should give one for each, "
            f"[{samples}{more}]: take no mean over samples"
        )
    return found
