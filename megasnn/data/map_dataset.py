"""Samples of a map-style data set in Python: torch's, torchvision's, SpikingJelly's, tonic's, or one's own."""

from __future__ import annotations

import copyreg
import hashlib
import importlib
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset

from megasnn.augment import SampleKey
from megasnn.common.files import in_message
from megasnn.common.random import seeded_globals
from megasnn.config.checks import as_flag
from megasnn.data.arrays import ArrayFile, fitted
from megasnn.data.formats import BatchFormat, FormatMismatch
from megasnn.data.samples import BrokenSample, SampleSource, broken_sample

TRIED_SAMPLES = 4
"""Samples that a run reads twice before it starts. A random flip goes unnoticed in one of 16 runs."""
_FRAMES_ADVICE = (
    "give arrays of numbers; of events, frames [T, 2, H, W] (SpikingJelly's data_type='frame', tonic's ToFrame)"
)
EVALUATION_KEY = (0, 0)
"""Seed and epoch of an evaluation: each evaluation reads the same values."""


def _by_name(module: ModuleType) -> tuple[Any, ...]:
    return importlib.import_module, (module.__name__,)


# cloudpickle sends every loaded submodule that a function may mean: torch.classes for `self.classes` beside torch. It
# cannot send these two, which have classes of their own (findings/cloudpickle_torch_classes.sh).
for _module in (torch.classes, torch.ops):
    copyreg.pickle(type(_module), _by_name)


def require_map_style(dataset: Any, argument: str) -> None:
    """Raises ValueError unless a data set has a length and samples by index."""
    kind = type(dataset).__name__
    if isinstance(dataset, type):
        raise ValueError(f"{argument}={dataset.__name__} is a class: give an instance of it")
    if isinstance(dataset, DataLoader):
        raise ValueError(f"{argument} is a DataLoader: give its data set; the run reads it with --num-workers")
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise ValueError(
            f"{argument}: {kind} has no samples by index, so no order to shuffle and to resume: give a map-style data "
            "set, with __len__ and __getitem__, or write its samples to shards (--data-path)"
        )
    if not hasattr(dataset, "__len__"):
        raise ValueError(f"{argument}: {kind} has no __len__, and an epoch is as long as the data set: add it")
    if not len(dataset):
        raise ValueError(f"{argument}: {kind} has no samples")


def dataset_title(dataset: Any) -> str:
    """Class and optional name, through torch's Subset and ConcatDataset."""
    if isinstance(dataset, Subset):
        indices = np.asarray(dataset.indices, np.int64)
        digest = hashlib.blake2b(indices.tobytes(), digest_size=4).hexdigest()
        return f"{dataset_title(dataset.dataset)}[{len(indices)} indices {digest}]"
    if isinstance(dataset, ConcatDataset):
        parts: list[Any] = dataset.datasets
        return " + ".join(f"{dataset_title(part)}[{len(part)}]" for part in parts)
    name = getattr(dataset, "name", None)
    kind = type(dataset).__name__
    return f"{kind} {in_message(name)}" if isinstance(name, str) and name else kind


def names_of_classes(dataset: Any, num_classes: int) -> tuple[str, ...]:
    """Names in `dataset.classes`, as torchvision and tonic give them; empty unless there are `num_classes`."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    names = getattr(dataset, "classes", None)
    if not isinstance(names, Sequence) or len(names) != num_classes:
        return ()
    return tuple(names) if all(isinstance(name, str) for name in names) else ()


@dataclass(frozen=True)
class ValueFormat(BatchFormat):
    """Samples that are values already: `(inputs, target)`, or inputs alone where the target is one of them.

    Attributes:
        inputs: names for the layers.
        target: name for the loss.
        classes: number of classes; 0 for another target.
        sized_by_flags: the input is images or event frames, whose sizes are flags of the model.
    """

    arrays: tuple[ArrayFile, ...]
    inputs: tuple[str, ...]
    target: str
    classes: int = 0
    sized_by_flags: bool = False

    def named(self, sample: Any) -> dict[str, NDArray[Any]]:
        """A sample's arrays by name. Raises FormatMismatch for other names, shapes or types than the model's."""
        inputs = sample
        target = None
        if self.target not in self.inputs:
            if not isinstance(sample, (tuple, list)) or len(sample) != 2:
                size = f" of {len(sample)}" if isinstance(sample, (tuple, list)) else ""
                raise FormatMismatch(f"is a {type(sample).__name__}{size}: __getitem__ must return (inputs, target)")
            inputs, target = sample
        if len(self.inputs) == 1 and not (isinstance(inputs, Mapping) and self.inputs[0] in inputs):
            inputs = {self.inputs[0]: inputs}
        if not isinstance(inputs, Mapping) or {*inputs} != {*self.inputs}:
            found = ", ".join(map(str, inputs)) if isinstance(inputs, Mapping) else type(inputs).__name__
            raise FormatMismatch(f"has {found}, and the model takes a dict of its inputs, {', '.join(self.inputs)}")
        values = {**inputs} if target is None else {**inputs, self.target: target}
        return {each.name: self._array(each, values[each.name]) for each in self.arrays}

    def _array(self, array: ArrayFile, value: Any) -> NDArray[Any]:
        if self.classes and array.name == self.target:
            return self._class(value)
        if isinstance(value, Image.Image):
            raise FormatMismatch(
                f"has a PIL image for {array.name!r}: give the data set a transform to normalised values, such as "
                "torchvision's Compose([ToTensor(), Normalize(mean, std)])"
            )
        values = _as_array(value)
        if array.dtype == "float" and values.dtype.kind in "biu":
            if len(array.shape) == 3:
                raise FormatMismatch(
                    f"has whole numbers ({values.dtype}) for {array.name!r}: give normalised floating-point values, "
                    "such as (pixels / 255 - mean) / std"
                )
            values = values.astype(np.float32)  # counts of events
        is_sized = self.sized_by_flags and array.name in self.inputs and values.dtype.kind == "f"
        if is_sized and values.shape != array.shape:
            raise FormatMismatch(_other_shape(values.shape, array.shape))
        return fitted(values, array, "")

    def _class(self, value: Any) -> NDArray[Any]:
        found = _as_array(value)
        if found.size != 1 or found.dtype.kind not in "iu":
            raise FormatMismatch(f"has the label {in_message(value)}: give the number of its class, a whole number")
        number = int(found.reshape(()))
        if not 0 <= number < self.classes:
            raise FormatMismatch(
                f"has the label {number}, outside 0..{self.classes - 1}: raise --num-classes (now {self.classes}) or "
                "correct the label"
            )
        return np.array(number, np.int64)

    def batch(self, samples: Sequence[Any]) -> dict[str, NDArray[Any]]:
        """Joins samples into named arrays, images with channels last in memory."""
        joined = {}
        for each in self.arrays:
            parts = [sample[each.name] for sample in samples]
            if each.name in self.inputs and len(each.shape) == 3:
                # The faster layout for convolutions, as for images of shards.
                joined[each.name] = np.stack([part.transpose(1, 2, 0) for part in parts]).transpose(0, 3, 1, 2)
            else:
                joined[each.name] = np.stack(parts)
        return joined


def _other_shape(found: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """Shapes of a data set's images or event frames and of the model's, with the flags that make them equal."""
    names = ("time_steps", "in_channels") if len(expected) == 4 else ("in_channels",)
    flags = []
    if len(found) == len(expected) and found[-1] == found[-2]:
        sizes = {**dict(zip(names, found, strict=False)), "image_size": found[-1]}
        wanted = {**dict(zip(names, expected, strict=False)), "image_size": expected[-1]}
        flags = [as_flag(name, size) for name, size in sizes.items() if size != wanted[name]]
    kind = "event frames" if len(expected) == 4 else "images"
    change = f"set {' '.join(flags)}, or change them" if flags else "change them"
    return f"has {kind} {list(found)}, and the model takes {list(expected)}: {change} in the data set's transform"


def _as_array(value: Any) -> NDArray[Any]:
    """A tensor's, array's or number's values. Raises FormatMismatch for anything else."""
    kind = type(value).__name__
    if isinstance(value, Mapping):
        raise FormatMismatch(f"has a {kind} of {', '.join(map(str, value))}: {_FRAMES_ADVICE}")
    try:
        if isinstance(value, Tensor):
            dense = value.detach().cpu().to_dense()
            # NumPy has no bfloat16.
            return (dense.float() if dense.is_floating_point() else dense).numpy()
        found = np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise FormatMismatch(f"has a {kind} that is no array: {error}") from error
    if found.dtype.names:
        raise FormatMismatch(f"has an array of {', '.join(found.dtype.names)}: {_FRAMES_ADVICE}")
    return found


class _Sent(NamedTuple):
    """A data set on its way to a worker, which makes it at the first sample: earlier, nobody would hear of an error."""

    content: bytes
    title: str

    def made(self) -> Any:
        """Raises ValueError if the worker cannot make it."""
        try:
            return cloudpickle.loads(self.content)
        except Exception as error:
            # Imports and classes of the user's may raise any.
            raise ValueError(
                f"{self.title} cannot be made in a data worker ({type(error).__name__}: {error}): make its modules "
                "importable there (PYTHONPATH), or read in the training process (--num-workers 0)"
            ) from error


class MapDataset(SampleSource):
    """Samples of a map-style data set, checked against the model.

    While a sample is read, the global generators of torch, NumPy and Python are seeded by seed, epoch and sample.
    """

    def __init__(self, dataset: Any, format: ValueFormat) -> None:
        self.format: ValueFormat = format
        self._dataset = dataset

    @cached_property
    def _title(self) -> str:
        return dataset_title(self._dataset)

    def __reduce__(self) -> tuple[Any, ...]:
        # By value where pickle has no name: classes of the script and of notebooks, lambdas of transforms. Workers do
        # not run the script.
        try:
            content = cloudpickle.dumps(self._dataset)
        except Exception as error:
            # A class of the user's may raise any.
            raise ValueError(
                f"{self._title} cannot be sent to data workers ({type(error).__name__}: {error}): open files at the "
                "first use in __getitem__, or read in the training process (--num-workers 0)"
            ) from error
        return MapDataset, (_Sent(content, self._title), self.format)

    def __len__(self) -> int:
        return len(self._dataset)

    def describe(self, index: int) -> str:
        return f"sample {index} of {self._title}"

    def fingerprint(self) -> str:
        # Not from values: a hash over them would read the whole data set before the first step.
        return f"{len(self)} samples of {self._title}"

    def sample(self, index: int, key: SampleKey | None = None) -> dict[str, NDArray[Any]]:
        """Arrays by name; without a key as in every evaluation."""
        if isinstance(self._dataset, _Sent):
            self._dataset = self._dataset.made()
        with seeded_globals("sample", *(key or (*EVALUATION_KEY, index))):
            try:
                found = self._dataset[index]
            except MemoryError:
                # Too little memory is no damage.
                raise
            except Exception as error:
                # A data set may raise any.
                why = f"cannot be read: {type(error).__name__}: {error}, {_place(error)}"
                raise broken_sample(self.describe(index), why, "correct the data set") from error
        try:
            return self.format.named(found)
        except FormatMismatch as error:
            raise ValueError(f"{self.describe(index)} {error}") from error
        except ValueError as error:
            raise broken_sample(self.describe(index), f"cannot be used: {error}", "correct the data set") from error

    def require_repeatable(self) -> None:
        """Raises ValueError for samples that do not fit the model, or differ when they are read again."""
        step = max(1, len(self) // TRIED_SAMPLES)
        for index in range(0, len(self), step)[:TRIED_SAMPLES]:
            try:
                first = self.sample(index)
                again = self.sample(index)
            except BrokenSample:
                # Reported when it is due, or skipped.
                continue
            for name, values in first.items():
                if not np.array_equal(values, again[name]):
                    raise ValueError(
                        f"{self.describe(index)}: {name!r} differs when it is read again with the same seed, and "
                        "ranks and resumed runs need equal values: draw from the global generators of torch, numpy "
                        "or random, which the run seeds for each sample, not from a generator of the data set's own"
                    )


def _place(error: Exception) -> str:
    """File and line of the innermost call."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    if last.filename == "<dynamic-code>":
        # cloudpickle's name for the script, whose classes were sent.
        return f"line {last.lineno} of the script, in {last.name}"
    return f"{last.filename}:{last.lineno}"
