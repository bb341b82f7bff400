"""A trained model's description in its folder, and its model card."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from pydantic import Field, with_config

from megasnn.common.files import STRICT, FreeForm
from megasnn.models.task import Task

_CARD = """\
---
library_name: megasnn
pipeline_tag: {tag}
tags:
- spiking-neural-network
- {name}
---

# {name}

A spiking neural network trained with MegaSNN: {parameters} parameters ({dtype}), T = {time_steps}.

```python
import megasnn

model = megasnn.TrainedModel.from_pretrained("this folder")  # a class of your own: model=CLASS
{call}  # {inputs} -> [{answers}]
```

- Inputs: {samples}. Pixels are scaled to 0 to 1; then `mean` is subtracted, and the rest divided by `std`.
{accuracy}- Dimensions and neuron: {dimensions}
- Training: {training}
- Flags: {flags}
"""


@with_config(STRICT)
@dataclass(frozen=True)
class About:
    """Content of config.json.

    Attributes:
        config: dimensions and neuron, {"model": {...}, "neuron": {...}}.
        samples: how pixels become inputs: each channel's mean and standard deviation, for pixels from 0 to 1, and
            "class_names" by class number, if the data has them.
        training: iteration, the run's flags, and accuracy if known.
        crc32: the weight file's checksum; empty for a model without a folder.
    """

    model: str
    config: dict[str, FreeForm]
    samples: FreeForm = field(default_factory=dict)
    training: FreeForm = field(default_factory=dict)
    crc32: Annotated[str, Field(pattern="^([0-9a-f]{8})?$")] = ""
    format: Literal[1] = 1


def model_card(about: About, time_steps: int, task: Task, parameters: int, dtype: torch.dtype) -> str:
    """The model card's text. Model hubs read its head."""
    shapes = {name: ["N", *each.shape] for name, each in task.inputs.items()}
    has_one_input = len(shapes) == 1
    inputs = str(next(iter(shapes.values())) if has_one_input else shapes)
    training = dict(about.training)
    flags = training.pop("flags", None)
    top1 = training.get("accuracy_top1")
    accuracy = "not known" if top1 is None else f"{top1:.2%}, in training, on its validation data"
    samples = "by the program that trained it, which says how"
    if about.samples:
        samples = json.dumps(about.samples)
    call = "answers = model(inputs)"
    if task.classes and has_one_input:
        call = "logits = model(images)"
    tag = "other"
    accuracy_line = ""
    if task.classes:
        tag = "image-classification"
        accuracy_line = f"- Accuracy (top-1): {accuracy}.\n"
    return _CARD.format(
        name=about.model,
        parameters=f"{parameters:,}",
        dtype=str(dtype).removeprefix("torch."),
        time_steps=time_steps,
        tag=tag,
        inputs=inputs.replace("'N'", "N"),
        answers=", ".join(map(str, ["N", *task.answer.shape])),
        samples=samples,
        call=call,
        accuracy=accuracy_line,
        dimensions=json.dumps(about.config),
        training=json.dumps(training),
        flags=json.dumps(flags),
    )
