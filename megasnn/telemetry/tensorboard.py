"""TensorBoard, written by one rank; the other ranks hold a writer that does nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

BY_SAMPLES = " vs samples"


class TensorBoard:
    """Writes each scalar twice: `tag` against the iteration and `tag vs samples` against consumed samples.

    Args:
        directory: where the event files go; None makes every method do nothing.
        resumed_iteration, resumed_samples: where the run continues. Points that an earlier run wrote to the
            same directory after this place are hidden by TensorBoard; the files themselves stay as they are.
    """

    def __init__(
        self, directory: str | Path | None, resumed_iteration: int | None = None, resumed_samples: int = 0
    ) -> None:
        self._writer: SummaryWriter | None = None
        if directory is None:
            return
        from torch.utils.tensorboard import SummaryWriter

        if resumed_iteration is None:
            self._writer = SummaryWriter(str(directory))
            return
        # A purge hides all points at or after a step without asking which axis the step belongs to. Consumed
        # samples outrun iterations, so all points against samples would go: the valid ones are written again.
        kept = _points_by_samples(directory, resumed_samples)
        self._writer = SummaryWriter(str(directory), purge_step=resumed_iteration + 1)
        for tag, event in kept:
            self._writer.add_scalar(tag, event.value, event.step, walltime=event.wall_time)

    def scalars(self, values: Mapping[str, float], iteration: int, consumed_samples: int) -> None:
        """Writes every `tag: value`; nan and infinities are written as they are."""
        if self._writer is None:
            return
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, iteration)
            self._writer.add_scalar(tag + BY_SAMPLES, value, consumed_samples)

    def text(self, tag: str, markdown: str, iteration: int = 0) -> None:
        """Writes a text, for example the resolved configuration; TensorBoard renders Markdown."""
        if self._writer is not None:
            self._writer.add_text(tag, markdown, iteration)

    def picture(self, tag: str, picture: NDArray[np.uint8], iteration: int) -> None:
        """Writes uint8 `[height, width, 3]`."""
        if self._writer is not None:
            self._writer.add_image(tag, picture, iteration, dataformats="HWC")

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _points_by_samples(directory: str | Path, last_sample: int) -> list[tuple[str, Any]]:
    """The (tag, event) pairs on the samples axis of earlier runs, up to `last_sample` consumed samples."""
    if not Path(directory).is_dir():
        return []
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    history = EventAccumulator(str(directory), size_guidance={SCALARS: 0}).Reload()
    tags = [tag for tag in history.Tags()[SCALARS] if tag.endswith(BY_SAMPLES)]
    return [(tag, event) for tag in tags for event in history.Scalars(tag) if event.step <= last_sample]
