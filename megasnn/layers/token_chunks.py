"""Rows of q, k and v, divided for causal attention on spikes.

A part is some frames, whose tokens are spans. A span has chunks of tokens. On a CPU one span of a part's frames fits
the cache; on a GPU a single part with a single span holds everything.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megasnn.kernels.spike_codec import Content
from megasnn.parallel_state import Group

VALUES_AT_ONCE = 1 << 17
"""Values of q that a CPU computes together: 0.5 MB in float32, and 6 MB with all intermediate results."""

Part = tuple[slice, list[slice]]
"""Frames that are computed together, and the spans of their tokens, in order."""


@dataclass(frozen=True)
class CausalSpikingAttendSizes:
    """Sizes in the product of `CausalSpikingAttend`, and the ranks that divide its tokens.

    Attributes:
        heads: on this rank.
        width: channels of all heads.
        frames: time steps times samples.
        scale: factor of the output.
        chunk_tokens: tokens in a chunk.
        content: of q, k and v.
        length: tokens on all ranks.
        group: ranks that divide the tokens; None without.
    """

    heads: int
    width: int
    frames: int
    scale: float
    chunk_tokens: int
    content: Content = Content.SPIKES
    length: int = 0
    group: Group | None = None

    @property
    def state_type(self) -> torch.dtype:
        """The smallest type for a state, whose entries are up to the number of tokens."""
        return torch.int16 if self.length <= torch.iinfo(torch.int16).max else torch.int32

    def parts_of(self, rows: Tensor) -> list[Part]:
        """Parts of rows `[frames * L, any]`."""
        tokens = rows.shape[0] // self.frames
        if rows.device.type != "cpu":
            return [(slice(0, self.frames), [slice(0, tokens)])]
        # The values of a span stay in the cache, so that a token costs the same at any length. Short sequences share a
        # part, and a long one has several spans.
        most = max(VALUES_AT_ONCE // (self.width * self.chunk_tokens), 1) * self.chunk_tokens
        spans = [slice(start, min(start + most, tokens)) for start in range(0, tokens, most)]
        frames = max(most // tokens, 1)
        return [(slice(first, min(first + frames, self.frames)), spans) for first in range(0, self.frames, frames)]

    def chunks(self, rows: Tensor, dtype: torch.dtype, frames: slice, span: slice) -> Tensor:
        """A span of rows `[frames * L, blocks * heads * d]`, in chunks.

        Returns `[blocks, frames, heads, chunks, chunk_tokens, d]`. Zeros fill the last chunk: they change no sum.
        """
        by_head = self._by_head(rows, frames, span)
        tokens = by_head.shape[3]
        count = -(-tokens // self.chunk_tokens)
        shape = (*by_head.shape[:3], count * self.chunk_tokens, by_head.shape[4])
        whole = rows.new_empty(shape, dtype=dtype)
        whole[:, :, :, :tokens] = by_head
        # Not by an assignment, which takes its number from the host: no CUDA graph can.
        whole[:, :, :, tokens:].zero_()
        return whole.unflatten(3, (count, self.chunk_tokens))

    def put(self, rows: Tensor, chunks: Tensor, frames: slice, span: slice) -> None:
        """Inverse of `chunks`, into rows of any type."""
        by_head = self._by_head(rows, frames, span)
        by_head.copy_(chunks.flatten(3, 4)[:, :, :, : by_head.shape[3]])

    def _by_head(self, rows: Tensor, frames: slice, span: slice) -> Tensor:
        """View `[blocks, frames, heads, tokens, d]`."""
        tokens = rows.shape[0] // self.frames
        blocks = rows.shape[1] // self.width
        by_frame = rows.view(self.frames, tokens, blocks, self.heads, -1)
        return by_frame[frames, span].permute(2, 0, 3, 1, 4)
