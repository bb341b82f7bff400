"""Task of a model: what its samples hold, what it learns from them, and by which figures it is judged.

Without a word of the model it is the classification of images: `Model.inputs` and `Model.target` say so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from megasnn.bundle import Bundle, logits_of, map_entries
from megasnn.losses.sums import correct_predictions

if TYPE_CHECKING:
    from megasnn.models.model import Model

_TOP = {"top1": 1, "top5": 5}  # metrics of a classification; a training step counts the first one alone


@dataclass(frozen=True)
class ArraySpec:
    """Array that every sample has: an input of the model, or its target.

    Attributes:
        shape: of one sample.
        dtype: "float" for the type that the model computes in, "int" for whole numbers (int64).
        below: whole numbers are from 0 to below - 1, as every batch is checked for; None: they may be any.
        over_time: True where the first dimension of an input is T, so that each time step has its own part.
        file: ending of its file in shards, "npy", "mask.npy" or "seg.png"; without one, an input is the image of the
            sample, and a target its class.
    """

    shape: tuple[int, ...]
    dtype: Literal["float", "int"] = "float"
    below: int | None = None
    over_time: bool = False
    file: str = ""

    def type_for(self, floating: torch.dtype) -> torch.dtype:
        """Type of the values in a model that computes in the type `floating`."""
        return floating if self.dtype == "float" else torch.int64

    def empty(self, samples: int, floating: torch.dtype) -> Tensor:
        """Samples on the meta device."""
        return torch.empty((samples, *self.shape), dtype=self.type_for(floating), device="meta")

    def examples(self, samples: int, generator: torch.Generator) -> Tensor:
        """Random samples that layers are measured on."""
        shape = (samples, *self.shape)
        if self.dtype == "int":
            return torch.randint(self.below or 2, shape, generator=generator)
        return torch.randn(shape, generator=generator)

    def frames(self, samples: Tensor) -> Tensor:
        """Samples as layers take them: `[T, N, ...]`, or `[1, N, ...]` of an input that all time steps see.

        Args:
            samples: `[N, *shape]`; where all time steps see the same, also `[T, N, *shape]`.
        Raises:
            ValueError: samples of another shape.
        """
        found, dims = tuple(samples.shape), len(self.shape)
        if self.over_time and found[1:] == self.shape:
            return samples.transpose(0, 1)
        if not self.over_time and len(found) in (dims + 1, dims + 2):
            return samples.unsqueeze(0) if len(found) == dims + 1 else samples
        sizes = ", ".join(map(str, ["N", *self.shape]))
        raise ValueError(f"expected samples [{sizes}]{'' if self.over_time else ' or [T, N, ...]'}, got {list(found)}")

    def problem(self, name: str, values: Any, samples: int | None, reads: bool) -> str | None:
        """Reason why values are no batch of these arrays; None where they are.

        Args:
            samples: number of them; None for any. reads: False looks at that number alone.
        """
        fits = isinstance(values, Tensor) and values.ndim > 0 and 0 < len(values) == (samples or len(values))
        if fits and reads:
            is_whole = not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)
            fits = values.shape[1:] == self.shape and (is_whole if self.dtype == "int" else values.is_floating_point())
        if not fits:
            kind = "whole numbers, of an integer type," if self.dtype == "int" else "floating-point values"
            shape = ", ".join(map(str, [samples or "N", *self.shape]))
            return f"{name} must be {kind} [{shape}], one sample or more, as the model says; got {_described(values)}"
        if reads and self.below is not None and values.numel():
            lowest, highest = int(values.long().min()), int(values.long().max())
            if not 0 <= lowest <= highest < self.below:
                return (
                    f"{name} are from {lowest} to {highest}, and must be below {self.below} (num_classes, or `below`)"
                )
        return None


@dataclass(frozen=True)
class Task:
    """
    Attributes:
        inputs: by name. target: an array, or the name of the input that it is.
        classes: size of the logits `[T, N, classes]` of a classification; 0 of other tasks.
        loss: (output, target) -> the loss of each sample, `[N]`; None for that of --loss.
        metrics: (output, target) -> figures of each sample by name, each `[N]`; None for top-1, and top-5 of more than
            five classes.
        predict: output -> the answer for each sample, `[N, ...]`.
        trained, evaluated: names of the metrics of a training step, and of an evaluation.
        answer: what `predict` gives for a sample.
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
    def target_spec(self) -> ArraySpec:
        return self.inputs[self.target] if isinstance(self.target, str) else self.target

    def examples(self, samples: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """Inputs that layers are measured on, always the same ones."""
        draws = torch.Generator().manual_seed(0)
        return {name: each.examples(samples, draws).to(each.type_for(dtype)) for name, each in self.inputs.items()}

    def summed_loss(self, named: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
        """(output, target) -> the sum of the samples' losses: the model's own, or the `named` one."""
        own = self.loss
        if own is None:
            return named
        return lambda output, target: _values("loss", own(_raised(output), target), len(target)).sum()

    @torch.no_grad()
    def sums(self, output: Bundle, target: Tensor, names: Sequence[str]) -> Tensor:
        """Sums of metrics over the samples, `[names]`."""
        if self.metrics is None:
            return correct_predictions(logits_of(output), target, tuple(_TOP[name] for name in names))
        found = self.metrics(_raised(output), target)
        if not names:
            return target.new_zeros(0)
        return torch.stack([_values(f"metrics {name}", found[name], len(target)).double().sum() for name in names])

    def answers_of(self, output: Bundle) -> Tensor:
        answers = self.predict(_raised(output))
        return _values("predict", answers, logits_of(output).shape[1], ", ...")

    def tried(self, output: Bundle) -> Task:
        """The same task with what a dry run finds, on the meta device. Raises ValueError where a function of it fails,
        or gives something else than a value, or an answer, for each sample."""
        target, names = self.target_spec.empty(logits_of(output).shape[1], torch.float32), self.evaluated
        tried = "loss"
        try:
            if self.loss is not None:
                self.summed_loss(self.loss)(output, target)
            tried = "metrics"
            if self.metrics is not None:
                names = tuple(self.metrics(output, target))
                self.sums(output, target, names)
            tried = "predict"
            answer = self.answers_of(output)
        except Exception as error:
            why = str(error)
            if isinstance(error, RuntimeError) and "meta" in why.lower():  # torch's words: a dry run has shapes alone
                why = "sizes and branches must not depend on values: instead of x[mask], sum x * mask over each sample"
            raise ValueError(f"{tried} of the model, tried without values: {why}") from error
        spec = ArraySpec(tuple(answer.shape[1:]), "float" if answer.is_floating_point() else "int")
        return replace(self, evaluated=names, trained=names if self.metrics else self.trained, answer=spec)


def task_of(model: Model) -> Task:
    """The task of a model. Raises ValueError for a target that is no input's name, and for one without a loss."""
    inputs, target, own = dict(model.inputs), model.target, model.own_task()
    if not inputs or (isinstance(target, str) and target not in inputs):
        raise ValueError(f"the target is {target!r}, and the inputs are {', '.join(inputs) or 'none'}")
    if "target" in own and "loss" not in own:
        raise ValueError("the losses of --loss are for classes: give a model with a `target` a method `loss`, too")
    classes = 0 if "target" in own else model.num_classes
    metrics: Any = model.metrics or (None if classes else lambda output, target: {})
    evaluated = ("top1", "top5") if classes > 5 else ("top1",)  # top-5 of five classes is always right
    return Task(inputs, target, classes, model.loss, metrics, model.predict or mean_over_time, evaluated=evaluated)


def mean_over_time(output: Bundle) -> Tensor:
    """The logits' mean over time, the answer of a model that says no other."""
    return logits_of(output).mean(0)


def _raised(output: Bundle) -> Any:
    """Reduced precision as float32: losses and metrics are sums of many values."""
    return map_entries(lambda x: x.float() if x.dtype in (torch.bfloat16, torch.float16) else x, output)


def _values(name: str, found: object, samples: int, more: str = "") -> Tensor:
    """Result of a function of the model. Raises ValueError for one that is not `[samples]`, or not `[samples, ...]`."""
    if not isinstance(found, Tensor) or found.shape[:1] != (samples,) or (not more and found.ndim != 1):
        raise ValueError(
            f"{name} gives {_described(found)} for {samples} samples, and should give one for each, [{samples}{more}]: "
            "take no mean over samples"
        )
    return found


def _described(value: object) -> str:
    return f"{list(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
