"""TensorBoard: cards in the order in which they are looked at, and charts of several lines.

TensorBoard sorts cards by name and unfolds the first two groups, so groups and their first cards have numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
"""Group -> its first cards; others follow by name."""


def card(name: str) -> str:
    """Returns the tag of a scalar: "training/loss" -> "1_training/1_loss". Raises ValueError for an unknown group."""
    group, _, rest = name.partition("/")
    if group not in GROUPS or not rest:
        raise ValueError(f"scalar {name!r} belongs to none of the groups {', '.join(GROUPS)}")
    known = GROUPS[group]
    place = f"{known.index(rest) + 1}_" if rest in known else ""
    return f"{list(GROUPS).index(group) + 1}_{group}/{place}{rest}"


def charts() -> dict[str, dict[str, list[object]]]:
    """Returns the tab "Custom Scalars", as `SummaryWriter.add_custom_scalars` takes it."""

    def chart(*names: str) -> list[object]:
        return ["Multiline", [f"^({'|'.join(map(card, names))})$"]]

    return {
        "Training and validation": {
            "loss": chart("training/loss", "validation/loss"),
            "accuracy": chart("training/accuracy", "validation/accuracy_top1", "validation/accuracy_top5"),
            "samples per second": chart("training/samples_per_second"),
            "gradient norm": chart("training/grad_norm"),
            "learning rate": chart("training/learning_rate"),
        },
        "Spikes, mean over the layers": {
            "firing rate, silent and saturated neurons": ["Multiline", [r"^\d_spikes/"]],
        },
        "Resources": {
            "time of an iteration and its phases, ms": ["Multiline", [r"^\d_time/"]],
            "peak memory of each rank, MB": ["Multiline", [r"^\d_memory/"]],
            "traffic of all ranks per iteration, MB": ["Multiline", [r"^\d_communication/.*_mb"]],
        },
    }


class TensorBoard:
    """Writes scalars, texts and pictures of a run. Scalars that were only ever zero are not shown.

    An error, such as a full disk, is told once; nothing more is written then, and training goes on.

    Args:
        directory: of the event files; None writes nothing.
        resumed_iteration: last iteration of the run that this one continues; later points of it are hidden.
        tell: takes a line for the log.
    """

    def __init__(
        self,
        directory: str | Path | None,
        resumed_iteration: int | None = None,
        tell: Callable[[str], None] = print,
    ) -> None:
        self._directory, self._tell = directory, tell
        self._shown: set[str] = set()
        self._writer: Any = None
        if directory is not None:
            self._try(lambda: self._open(None if resumed_iteration is None else resumed_iteration + 1))
            self._call("add_custom_scalars", charts())
            self.flush()

    def _open(self, purge_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._directory), purge_step=purge_step)

    def _try(self, write: Callable[[], object]) -> None:
        try:
            write()
        except Exception as error:
            self._writer = None
            why = f"{type(error).__name__}: {error}"
            self._tell(f"WARNING: TensorBoard's files in {self._directory} cannot be written ({why}); training goes on")

    def _call(self, method: str, *values: object, **options: object) -> None:
        if self._writer is not None:
            self._try(lambda: getattr(self._writer, method)(*values, **options))

    def scalars(self, values: Mapping[str, float], iteration: int) -> None:
        """Writes each `name: value` on the card of that name; nan and infinities as they are."""
        for name, value in values.items():
            tag = card(name)
            if value != 0:
                self._shown.add(tag)
            if tag in self._shown:
                self._call("add_scalar", tag, value, iteration)

    def text(self, tag: str, markdown: str) -> None:
        """Writes a text, which TensorBoard renders as Markdown."""
        self._call("add_text", tag, markdown)

    def picture(self, tag: str, draw: Callable[[], NDArray[np.uint8]], iteration: int) -> None:
        """Writes uint8 `[height, width, 3]`; `draw` makes it, and is called only where it is written."""
        if self._writer is not None:
            self._try(lambda: self._writer.add_image(tag, draw(), iteration, dataformats="HWC"))

    def flush(self) -> None:
        self._call("flush")

    def close(self) -> None:
        self._call("close")
        self._writer = None
