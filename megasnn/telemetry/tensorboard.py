"""TensorBoard, written by one rank; the other ranks hold a writer that does nothing.

TensorBoard sorts cards by name and unfolds the first two groups. So groups have a number, and so have the cards of
those that have an order of their own: what is looked at most stands first. What stands against consumed samples is one
folded group at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megasnn.telemetry.tried import Tried

if TYPE_CHECKING:
    from megasnn.telemetry.event_file import EventWriter

Flag = bool | str | float | int
# Group -> its cards in the order they are looked at; cards that are not named here come after them by name.
GROUPS: dict[str, tuple[str, ...]] = {
    "training": ("loss", "accuracy", "samples_per_second", "grad_norm", "learning_rate"),
    "validation": ("loss", "accuracy_top1", "accuracy_top5"),
    "spikes": ("firing_rate", "silent", "saturated"),
    "time": ("iteration_ms",),
    "memory": (),
    "pipeline": (),
    "communication": (),
    "data": (),
}
BY_SAMPLES = "vs_samples/"
EARLIER_BY_SAMPLES = " vs samples"  # the end of such a tag in event files of earlier versions


def card(name: str) -> str:
    """The tag of a scalar: "training/loss" -> "1_training/1_loss". Raises ValueError for a group that is not known."""
    group, _, rest = name.partition("/")
    if group not in GROUPS or not rest:
        raise ValueError(f"scalar {name!r} belongs to none of the groups {', '.join(GROUPS)}")
    known = GROUPS[group]
    place = f"{known.index(rest) + 1}_" if rest in known else ""
    return f"{list(GROUPS).index(group) + 1}_{group}/{place}{rest}"


def charts() -> dict[str, dict[str, list[object]]]:
    """Charts of several lines for the tab "Custom Scalars", as `SummaryWriter.add_custom_scalars` takes them."""

    def chart(*names: str) -> list[object]:
        return ["Multiline", [_pattern(names)]]

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


def _pattern(names: Iterable[str]) -> str:
    return f"^({'|'.join(card(name) for name in names)})$"


class TensorBoard:
    """Writes each scalar twice: against the iteration, and in the group "vs_samples" against consumed samples.

    Nothing raises: a folder that cannot be written now is told once, and written later (megasnn.telemetry.event_file).
    A scalar that has only been 0 so far has no card: its zeros are written when another value comes.

    Args:
        directory: where the event files go; None makes every method do nothing.
        resumed_iteration, resumed_samples: where the run continues. Points that an earlier run wrote to the
            same directory after this place are hidden by TensorBoard; the files themselves stay as they are.
        tell: takes a line for the log.
    """

    def __init__(
        self,
        directory: str | Path | None,
        resumed_iteration: int | None = None,
        resumed_samples: int = 0,
        tell: Callable[[str], None] = print,
    ) -> None:
        self._tried = Tried(tell)
        self._writer: EventWriter | None = None
        self._zeros: dict[str, list[tuple[int, int]]] = {}
        self._shown: set[str] = set()
        if directory is not None:
            with self._tried("TensorBoard"):
                self._writer = self._open(directory, resumed_iteration, resumed_samples)
                self._writer.add_custom_scalars(charts())
            self.flush()

    def _open(self, directory: str | Path, resumed_iteration: int | None, resumed_samples: int) -> EventWriter:
        from megasnn.telemetry.event_file import EventWriter

        if resumed_iteration is None:
            return EventWriter(str(directory))
        writer = EventWriter(str(directory), purge_step=resumed_iteration + 1)
        # A purge hides all points at or after a step without asking which axis the step belongs to. Consumed
        # samples outrun iterations, so all points against samples would go: the valid ones are written again.
        with self._tried(f"reading the earlier events in {directory}"):
            for tag, event in _points_by_samples(directory, resumed_samples):
                writer.add_scalar(tag, event.value, event.step, walltime=event.wall_time)
        return writer

    def scalars(self, values: Mapping[str, float], iteration: int, consumed_samples: int) -> None:
        """Writes every `name: value` on the card of that name; nan and infinities are written as they are."""
        if self._writer is None:
            return
        with self._tried("scalars for TensorBoard"):
            for name, value in values.items():
                self._scalar(self._writer, card(name), value, (iteration, consumed_samples))

    def _scalar(self, writer: EventWriter, tag: str, value: float, at: tuple[int, int]) -> None:
        points = [(at, value)]
        if tag not in self._shown:
            if value == 0:
                # The first zero and the last one draw the same line as all of them.
                self._zeros[tag] = [*self._zeros.get(tag, [])[:1], at]
                return
            self._shown.add(tag)
            points = [*((place, 0.0) for place in self._zeros.pop(tag, [])), *points]
        for (iteration, samples), each in points:
            writer.add_scalar(tag, each, iteration)
            writer.add_scalar(BY_SAMPLES + tag, each, samples)

    def flags(self, values: Mapping[str, Flag], metrics: Sequence[str]) -> None:
        """The run's line in the tab "HParams", where runs are compared.

        Args:
            values: flags by name. metrics: names of scalars whose last values stand beside them.
        """
        if self._writer is None:
            return
        with self._tried("flags for TensorBoard"):
            from torch.utils.tensorboard.summary import hparams

            # SummaryWriter.add_hparams would make another run for them, with its values only.
            for summary in hparams(dict(values), dict.fromkeys(map(card, metrics), 0.0)):
                self._writer._get_file_writer().add_summary(summary)

    def text(self, tag: str, markdown: str, iteration: int = 0) -> None:
        """Writes a text, for example the resolved configuration; TensorBoard renders Markdown."""
        if self._writer is None:
            return
        with self._tried(f"the text {tag!r} for TensorBoard"):
            self._writer.add_text(tag, markdown, iteration)

    def picture(self, tag: str, draw: Callable[[], NDArray[np.uint8]], iteration: int) -> None:
        """Writes uint8 `[height, width, 3]`, which `draw` makes where it is needed."""
        if self._writer is None:
            return
        with self._tried(f"the picture {tag!r} for TensorBoard"):
            self._writer.add_image(tag, draw(), iteration, dataformats="HWC")

    def flush(self) -> None:
        if self._writer is None:
            return
        with self._tried(f"writing to {self._writer.log_dir}"):
            self._writer.flush()

    def close(self) -> None:
        self.flush()
        self._writer = None


def _points_by_samples(directory: str | Path, last_sample: int) -> list[tuple[str, Any]]:
    """The (tag, event) pairs on the samples axis of earlier runs, up to `last_sample` consumed samples."""
    if not Path(directory).is_dir():
        return []
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    history = EventAccumulator(str(directory), size_guidance={SCALARS: 0}).Reload()
    tags = [tag for tag in history.Tags()[SCALARS] if tag.startswith(BY_SAMPLES) or tag.endswith(EARLIER_BY_SAMPLES)]
    return [(tag, event) for tag in tags for event in history.Scalars(tag) if event.step <= last_sample]
