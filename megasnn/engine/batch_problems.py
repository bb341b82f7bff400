"""What is wrong with images and labels that a caller gives an Engine."""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor

from megasnn.config import PretrainConfig
from megasnn.losses import LOSSES

NO_PAIR = object()
"""In the place of labels, where no pair of images and labels was given."""


def image_problem(images: object, config: PretrainConfig, is_used: bool) -> str | None:
    """What is wrong with a batch of images; only their number counts where they are not used."""
    if not _is_dense(images) or images.ndim == 0 or len(images) == 0:
        return f"images must be a tensor [N, ...] of one sample or more, got {_described(images)}"
    wanted = config.model.input_shape
    if is_used and tuple(images.shape[1:]) != wanted:
        sizes = ", ".join(map(str, wanted))
        return f"images must be [N, {sizes}], as the model's input_shape says, got {list(images.shape)}"
    if is_used and images.is_meta:
        return "images have no values, on the meta device; this rank has the first stage"
    if is_used and not images.is_floating_point():
        return f"images must be floating-point values, got {_described(images)}: convert them, as by images.float()"
    return None


def value_problem(images: Tensor) -> str | None:
    """What is wrong with the values of images that no gradient will tell of: neurons hide a nan."""
    wrong = images.numel() - int(images.isfinite().sum())
    return f"images hold {wrong} value(s) that are nan or infinite: no class follows from them" if wrong else None


def label_problem(labels: object, samples: int, config: PretrainConfig, is_used: bool, trains: bool) -> str | None:
    """What is wrong with the labels of a batch of images; only their number counts where they are not used."""
    classes, loss = config.model.num_classes, config.training.loss
    if labels is NO_PAIR:
        return "give images and labels, or an iterable of such pairs, each of which must be a tensor"
    if not _is_dense(labels) or labels.ndim == 0 or len(labels) != samples:
        return f"labels must be a tensor with one for each of the {samples} images, got {_described(labels)}"
    if not is_used:
        return None
    if labels.is_meta:
        return "labels have no values, on the meta device; this rank has the last stage"
    takes_soft = trains and LOSSES[loss].mixes and not config.data.mixes
    if labels.is_floating_point() and labels.ndim > 1 and takes_soft:
        if tuple(labels.shape) != (samples, classes):
            return f"soft labels must be [{samples}, {classes}], got {list(labels.shape)}"
        return None if bool(((labels >= 0) & (labels <= 1)).all()) else "soft labels must be from 0 to 1, and not nan"
    if labels.shape != (samples,) or labels.dtype not in _WHOLE_NUMBERS:
        soft = f", or probabilities [{samples}, {classes}]" if takes_soft else ""
        return f"labels must be class indices [{samples}] of an integer type{soft}, got {_described(labels)}"
    lowest, highest = int(labels.long().min()), int(labels.long().max())
    if not 0 <= lowest <= highest < classes:
        return f"labels are from {lowest} to {highest}; with num_classes {classes} they must be from 0 to {classes - 1}"
    return None


_WHOLE_NUMBERS = (
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)


def _is_dense(value: object) -> TypeGuard[Tensor]:
    """Whether it is a tensor with a place in memory for each value: not a sparse, nested or mkldnn one."""
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested


def _described(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    if value.is_nested:
        return "a nested tensor"
    layout = "" if value.layout is torch.strided else f", which is not dense ({value.layout})"
    return f"{list(value.shape)} of {value.dtype}{layout}"
