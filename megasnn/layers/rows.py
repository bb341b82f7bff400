"""What a layer needs of images whose rows ranks share out (`--context-parallel-cut rows`), found in the dry run.

The dry run sees whole images. So a layer that mixes rows notes there how high its input is; which rows a rank has
follows from that alone (`megasnn.parallel.rows.shared_rows`), and residual branches fit each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megasnn.kernels.spike_codec import Content
from megasnn.layers.context import BuildContext
from megasnn.parallel.alike import gather_rows
from megasnn.parallel.rows import NO_ROW, RowMove, lend_rows, move_rows, shared_rows
from megasnn.parallel_state import Group

OUTSIDE: dict[str | None, Callable[[int, int], int]] = {
    None: lambda row, height: NO_ROW,
    "constant": lambda row, height: NO_ROW,
    "reflect": lambda row, height: -row if row < 0 else 2 * (height - 1) - row,
    "replicate": lambda row, height: 0 if row < 0 else height - 1,
    "circular": lambda row, height: row % height,
}
"""By the mode of a padding: which row of an image stands for one outside of it."""


@dataclass(frozen=True)
class Windows:
    """How the rows of a layer's output follow from those of its input.

    Attributes:
        kernel, stride, dilation: along the height.
        before: rows of padding above an image. mode: what stands there, see `OUTSIDE`.
        pool: average pooling of so many rows that comes first.
    """

    kernel: int = 1
    stride: int = 1
    dilation: int = 1
    before: int = 0
    mode: str | None = None
    pool: int = 1

    def inputs(self, outputs: range, height: int) -> tuple[int, ...]:
        """The rows of an image that some rows of its output are computed from, those outside of it by what stands
        there."""
        if not outputs:
            return ()
        pooled = height // self.pool
        first = outputs.start * self.stride - self.before
        last = (outputs.stop - 1) * self.stride - self.before + self.dilation * (self.kernel - 1)
        inside = [row if 0 <= row < pooled else OUTSIDE[self.mode](row, pooled) for row in range(first, last + 1)]
        return tuple(
            NO_ROW if row == NO_ROW else row * self.pool + within for row in inside for within in range(self.pool)
        )


@dataclass(frozen=True)
class Rows:
    """The ranks that share out rows; without others, nothing moves."""

    group: Group

    def needed(self, height: int, outputs: tuple[range, ...], windows: Windows) -> RowMove | None:
        """What brings the input of a layer to the ranks that compute those rows of its output; None where every rank
        has what it needs.

        Args:
            height: of the whole input.
        """
        owned = shared_rows(height, self.group.size)
        move = RowMove(owned, tuple(windows.inputs(rows, height) for rows in outputs))
        return move if move.is_needed else None

    def shared(self, height: int) -> tuple[range, ...]:
        """The rows of whole images that each rank has."""
        return shared_rows(height, self.group.size)

    def below_pooling(self, height: int) -> tuple[range, ...]:
        """The rows that each rank has of what is max-pooled (3, stride 2, padding 1) right behind: those in the middle
        of the windows of its pooled rows, and the next ones."""
        pooled = shared_rows((height + 1) // 2, self.group.size)
        return tuple(range(2 * rows.start, min(2 * rows.stop, height)) for rows in pooled)

    def above(self, owned: tuple[range, ...]) -> RowMove:
        """What brings each rank the row above its own, which the first one does not need."""
        return RowMove(owned, tuple((rows.start - 1,) if rows.start else () for rows in owned))

    def gather(self, x: Tensor, height: int, content: Content) -> Tensor:
        """Whole images of that height; see `megasnn.parallel.alike.gather_rows`. Collective."""
        return gather_rows(x, self.shared(height), self.group, content)

    def move(self, x: Tensor, move: RowMove, content: Content = Content.DENSE, pool: int = 1) -> Tensor:
        """See `megasnn.parallel.rows.move_rows`. Collective."""
        return move_rows(x, move, self.group, content, pool)

    def lend(self, x: Tensor, move: RowMove) -> tuple[Tensor, Tensor]:
        """See `megasnn.parallel.rows.lend_rows`. Collective."""
        return lend_rows(x, move, self.group)


def own_rows_of(frames: Tensor, context: BuildContext) -> Tensor:
    """Of whole images `[T, N, C, H, W]`, what this rank has."""
    rows = rows_of(context)
    if rows is None:
        return frames
    own = rows.shared(frames.shape[3])[rows.group.rank]
    return frames[:, :, :, own.start : own.stop]


def rows_of(context: BuildContext) -> Rows | None:
    """What layers move rows by; None where images are whole on every rank."""
    return Rows(context.context) if context.cut == "rows" and context.context.size > 1 else None
