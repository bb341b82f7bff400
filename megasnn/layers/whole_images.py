"""What becomes of images whose rows ranks share out where a layer wants whole ones, or has done with space."""

from __future__ import annotations

from torch import Tensor, nn

from megasnn.kernels.spike_codec import Content
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.holding import content_of, note_exchanges
from megasnn.layers.rows import rows_of
from megasnn.parallel.alike import alike_images, sum_alike


class WholeImages(nn.Module):
    """`[T, N, C_local, own rows, W]` -> `[T, N, C_local, H, W]` on every rank that shares the rows, for a layer that
    takes each pixel by itself; elsewhere images are whole already.

    What is computed from them, all of it the same on every rank, goes through `used`: gradients travel there, and so
    where the images have become small.
    """

    def __init__(self, context: BuildContext | None = None) -> None:
        super().__init__()
        self._rows, self._height, self._content = rows_of(context_for(context)), 0, Content.DENSE

    def forward(self, x: Tensor) -> Tensor:
        if self._rows is None:
            return x
        if x.is_meta:
            self._height, self._content = x.shape[3], content_of(x)
            self._rows.shared(x.shape[3])  # refuses what it cannot
            note_exchanges(self)
            return x
        return self._rows.gather(x, self._height, self._content)

    def used(self, x: Tensor, pool: int = 1) -> Tensor:
        """What was computed from the images: they themselves, or pooled over squares of so many pixels."""
        if self._rows is None or x.is_meta:
            return x
        owned = self._rows.shared(self._height)
        needed = tuple(range(rows.start // pool, min(-(-rows.stop // pool), x.shape[3])) for rows in owned)
        return alike_images(x, needed, self._rows.group)


class MeanOverSpace(nn.Module):
    """`[T, N, C_local, *space]` -> `[T, N, C_local]`, the same on every rank that shares rows."""

    def __init__(self, context: BuildContext | None = None) -> None:
        super().__init__()
        self._rows, self._pixels = rows_of(context_for(context)), 0

    def forward(self, x: Tensor) -> Tensor:
        # With the channels last also in the gradient, which residual sums take its memory order from.
        pixels = x.movedim(2, -1).flatten(2, -2)
        if self._rows is None or x.is_meta:
            self._pixels = pixels.shape[2]  # in the dry run of whole images
            if self._rows is not None:
                note_exchanges(self, 1)
            return pixels.mean(dim=2)
        return sum_alike(pixels.sum(dim=2), self._rows.group) / self._pixels
