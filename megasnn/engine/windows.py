"""Time windows for truncated backpropagation (--bptt-steps).

Each window runs as a micro-batch. Neurons keep their state between windows; gradients stop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megasnn.common.bundle import Bundle, EntryKey, bundle_of, entries_of
from megasnn.config import PretrainConfig
from megasnn.models.build import describe_model
from megasnn.models.description import ModelDescription
from megasnn.models.task import Task
from megasnn.pipeline.microbatch_state import MicroBatchInput


def describe_windows(config: PretrainConfig) -> ModelDescription:
    """One window's model. Raises ValueError if a shape depends on the number of time steps."""
    model: Any = config.model
    whole = describe_model(model, config.neuron.spec)
    steps = config.training.bptt_steps
    if steps is None or steps == model.time_steps:
        return whole
    # A weight over all time steps, as a parallel spiking neuron's [T, T], cannot be applied to a window.
    of_window = describe_model(replace(model, time_steps=steps), config.neuron.spec)
    shapes = {entry.name: entry.shard.global_shape for entry in of_window.tensors}
    for entry in whole.tensors:
        if shapes.get(entry.name) != entry.shard.global_shape:
            raise ValueError(
                f"{entry.name} depends on --time-steps {model.time_steps}: the model cannot be shown windows of "
                f"--bptt-steps {steps}"
            )
    return of_window


def windows_of(micro: MicroBatchInput, task: Task, windows: int, steps: int) -> list[MicroBatchInput]:
    """Cuts a micro-batch along time. An input without time goes to every window."""
    cut = []
    for number in range(windows):
        inputs = micro.inputs
        if isinstance(inputs, Mapping):
            own = slice(number * steps, (number + 1) * steps)
            inputs = {name: x[:, own] if task.inputs[name].over_time else x for name, x in inputs.items()}
        cut.append(replace(micro, inputs=inputs, goes_on=number > 0))
    return cut


class WindowOutputs:
    """Outputs, joined after a micro-batch's last window."""

    def __init__(self, windows: int) -> None:
        self._windows = windows
        self._outputs: list[dict[EntryKey, Tensor]] = []

    def complete(self, output: Bundle) -> Bundle | None:
        """Adds the next window's output. After the last, returns all time steps, detached."""
        self._outputs.append({key: entry.detach() for key, entry in entries_of(output).items()})
        if len(self._outputs) < self._windows:
            return None
        whole = {}
        for key in self._outputs[0]:
            # Time is the first dimension of every output.
            whole[key] = torch.cat([each[key] for each in self._outputs])
        self._outputs.clear()
        return bundle_of(whole)

    def clear(self) -> None:
        self._outputs.clear()
