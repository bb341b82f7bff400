"""Task of a model: what its samples hold, what it learns from them, and by which figures it is judged.

Without a word of the model it is the classification of images: `Model.inputs` and `Model.target` say so.
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

_TOP = {"top1": 1, "top5": 5}  # metrics of a classification; a training step counts the first one alone


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
            why = said_of_values(error) or str(error)
            raise ValueError(f"{tried} of the model, tried without values: {why}") from error
        spec = ArraySpec(tuple(answer.shape[1:]), "float" if answer.is_floating_point() else "int")
        return replace(self, evaluated=names, trained=names if self.metrics else self.trained, answer=spec)


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
            f"{name} gives {shape_and_type(found)} for {samples} samples, and should give one for each, "
            f"[{samples}{more}]: take no mean over samples"
        )
    return found
