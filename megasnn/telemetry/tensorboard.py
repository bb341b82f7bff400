"""TensorBoard: ordered cards, and charts with several lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasnn.telemetry.log import BestEffort

# TensorBoard sorts cards by name and unfolds two groups: numbers in the names put the important ones first.
GROUPS: dict[str, tuple[str, ...]] = {
    "training": ("loss", "accuracy", "samples_per_second", "grad_norm", "learning_rate", "consumed_samples"),
    "validation": ("loss", "accuracy_top1", "accuracy_top5"),
    "spikes": ("firing_rate", "silent", "saturated"),
    "time": ("iteration_ms",),
    "memory": (),
    "pipeline": (),
    "communication": (),
    "data": (),
}
"""Maps each group to its first cards; other cards follow in alphabetical order."""
COMPARED = "validation/accuracy_top1", "validation/loss", "training/loss"
"""Scalars that the tab HParams compares runs by."""


def card(name: str) -> str:
    """A scalar's tag: "1_training/1_loss" for "training/loss". Raises ValueError for an unknown group."""
    group, _, rest = name.partition("/")
    if group not in GROUPS or not rest:
        raise ValueError(f"scalar {name!r} belongs to none of the groups {', '.join(GROUPS)}")
    number = list(GROUPS).index(group) + 1
    first_cards = GROUPS[group]
    if rest in first_cards:
        rest = f"{first_cards.index(rest) + 1}_{rest}"
    return f"{number}_{group}/{rest}"


def charts() -> dict[str, dict[str, list[object]]]:
    """For `SummaryWriter.add_custom_scalars`."""

    def chart(*names: str) -> list[object]:
        tags = "|".join(card(name) for name in names)
        return ["Multiline", [f"^({tags})$"]]

    return {
        "Training and validation": {
            # TensorBoard gives every line of a run one colour: with two runs, a chart of both would be unreadable.
            "training loss": chart("training/loss"),
            "validation loss": chart("validation/loss"),
            "training accuracy": chart("training/accuracy"),
            "validation accuracy, top-1": chart("validation/accuracy_top1"),
            "validation accuracy, top-5": chart("validation/accuracy_top5"),
            "training perplexity": chart("training/perplexity"),
            "validation perplexity": chart("validation/perplexity"),
            "validation bits per byte": chart("validation/bits_per_byte"),
            "samples per second": chart("training/samples_per_second"),
            "tokens per second": chart("training/tokens_per_second"),
            "gradient norm": chart("training/grad_norm"),
            "learning rate": chart("training/learning_rate"),
        },
        "Spikes, mean over the layers": {
            "firing rate, silent and saturated neurons": ["Multiline", [r"^\d_spikes/"]],
        },
        "Resources": {
            "time of an iteration and its phases, ms": ["Multiline", [r"^\d_time/"]],
            "peak memory of a rank, largest and mean, MB": ["Multiline", [r"^\d_memory/"]],
            "traffic of all ranks per iteration, MB": ["Multiline", [r"^\d_communication/.*_mb"]],
        },
    }


class TensorBoard:
    """A scalar has no card until it is not zero.

    After the first error, such as a full disk, nothing more is written.

    Args:
        continued_iteration: hides later points.
    """

    def __init__(
        self, directory: str | Path | None, best_effort: BestEffort, continued_iteration: int | None = None
    ) -> None:
        self._best_effort = best_effort
        self._name = f"writing TensorBoard's files in {directory}"
        self._shown: set[str] = set()
        self._writer: Any = None
        if directory is None:
            return
        with best_effort(self._name):
            from torch.utils.tensorboard import SummaryWriter

            # Points after the checkpoint are from steps that the continuing run repeats.
            purge_step = None if continued_iteration is None else continued_iteration + 1
            self._writer = SummaryWriter(str(directory), purge_step=purge_step)
        self._write(lambda writer: writer.add_custom_scalars(charts()))
        self.flush()

    def _write(self, act: Callable[[Any], object]) -> None:
        writer = self._writer
        if writer is None:
            return
        self._writer = None  # stays None if `act` fails
        with self._best_effort(self._name):
            act(writer)
            self._writer = writer

    def scalars(self, values: Mapping[str, float], iteration: int) -> None:
        """Values by name, such as "training/loss"; nan and infinities as they are."""
        shown = {}
        for name, value in values.items():
            tag = card(name)
            # Cards with nothing but zeros, such as skipped samples, would only fill the page.
            if value != 0:
                self._shown.add(tag)
            if tag in self._shown:
                shown[tag] = value

        def add_shown(writer: Any) -> None:
            for tag, value in shown.items():
                writer.add_scalar(tag, value, iteration)

        self._write(add_shown)

    def hyperparameters(self, values: Mapping[str, bool | int | float | str]) -> None:
        """For the tab HParams, which compares the runs of a sweep by flags and last losses and accuracies."""

        def add(writer: Any) -> None:
            from torch.utils.tensorboard.summary import hparams

            # `SummaryWriter.add_hparams` would write to a run of its own, without the curves.
            for summary in hparams(dict(values), dict.fromkeys(map(card, COMPARED))):
                writer.file_writer.add_summary(summary)

        self._write(add)

    def text(self, tag: str, markdown: str) -> None:
        self._write(lambda writer: writer.add_text(tag, markdown))

    def picture(self, tag: str, draw: Callable[[], NDArray[np.uint8]], iteration: int) -> None:
        """`draw` returns uint8 `[height, width, 3]`; not called where nothing is written."""
        self._write(lambda writer: writer.add_image(tag, draw(), iteration, dataformats="HWC"))

    def flush(self) -> None:
        self._write(lambda writer: writer.flush())

    def close(self) -> None:
        self._write(lambda writer: writer.close())
        self._writer = None
