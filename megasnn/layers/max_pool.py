"""Max pooling of 3 x 3 pixels, stride 2, padding 1, also of images whose rows ranks share out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasnn.kernels.spike_codec import Content
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.holding import content_of, note_exchanges
from megasnn.layers.rows import Rows, rows_of
from megasnn.parallel.rows import RowMove


class MaxPool(nn.Module):
    """`[T, N, C_local, H, W]` -> `[T, N, C_local, ceil(H / 2), ceil(W / 2)]`.

    Args:
        behind_pooled: whether the input comes from a layer that knows of this pooling, and has computed the rows that
            each rank's pooled ones are of (`ParallelConv(pooled_behind=True)`).
    """

    def __init__(self, context: BuildContext | None = None, *, behind_pooled: bool = False) -> None:
        super().__init__()
        self._rows, self._behind_pooled = rows_of(context_for(context)), behind_pooled
        self._moves: tuple[RowMove, RowMove] | None = None  # of all rows of the windows; of the one above this rank's
        self._content, self._is_at_top = Content.DENSE, True

    def forward(self, x: Tensor) -> Tensor:
        """Raises ValueError for other dimensions."""
        if x.ndim != 5:
            raise ValueError(f"max_pool is for frames [T, N, C, H, W], got {list(x.shape)}")
        frames, padding = x.flatten(0, 1), (1, 1)
        if self._rows is not None and x.is_meta:
            self._note_rows(self._rows, x)
        elif self._rows is not None and self._moves is not None:
            frames = self._rows.move(x, self._moves[0], self._content).flatten(0, 1)
            frames, padding = F.pad(frames, (0, 0, int(self._is_at_top), 1), value=-torch.inf), (0, 1)
        y = F.max_pool2d(frames, kernel_size=3, stride=2, padding=padding)
        return y.unflatten(0, x.shape[:2])

    def above(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The input, to go on with, and the row `[T, N, C_local, 1, W]` above this rank's rows that their windows
        reach, of which the first rank has none; None where images are whole. Collective."""
        if self._rows is None:
            return x, None
        if x.is_meta:
            self._note_rows(self._rows, x)
            return x, None
        assert self._moves is not None
        return self._rows.lend(x, self._moves[1])

    def _note_rows(self, rows: Rows, x: Tensor) -> None:
        """In the dry run, of whole images."""
        height = x.shape[3]
        owned = rows.below_pooling(height) if self._behind_pooled else rows.shared(height)
        pooled = rows.shared((height + 1) // 2)
        windows = tuple(tuple(range(max(2 * each.start - 1, 0), min(2 * each.stop, height))) for each in pooled)
        self._moves = RowMove(owned, windows), rows.above(owned)
        self._content, self._is_at_top = content_of(x), rows.group.rank == 0
        note_exchanges(self)
