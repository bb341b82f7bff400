"""Convolution cut by channels, on frames `[T, N, C, H, W]` or signals `[T, N, C, L]`.

Between layers every activation is cut by channel, so a convolution has two ways to use several ranks:

- **column**: gather the input's channels, compute this rank's output channels. Forward moves the input, and a spike is
  one bit; backward sums the input gradient and keeps this rank's channels. No sum is taken in forward, so that tensor
  parallelism does not change which neuron fires except through the order of sums inside one convolution.
- **row**: use the channels at hand with the matching input slice of the weight, sum the outputs over the ranks and keep
  this rank's channels. Forward and backward both move the output, dense.

Megatron-LM pairs column and row because its activations are dense. With spikes the gather is nearly free, so column
is cheaper unless the input is more than twice as wide as the output (`cheaper_style`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from megasnn.kernels.convolution import Geometry, output_space, pooled_space
from megasnn.kernels.products import Products
from megasnn.kernels.spike_codec import Content, bits_of, pack_bits
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.init import uniform
from megasnn.layers.row_context import (
    RowMove,
    move_rows,
    note_height,
    rows_to_pool,
    shared_rows,
    window_rows,
)
from megasnn.layers.weighted import Communication, ProductOptions, WeightedLayer
from megasnn.parallel.sharding import Initialiser
from megasnn.parallel_state import Group

Style = Literal["column", "row"]
_Size = int | Sequence[int]


def cheaper_style(in_channels: int, out_channels: int) -> Style:
    """The style that moves fewer bytes: column sends the input gradient once, row the output forward and backward."""
    return "row" if in_channels > 2 * out_channels else "column"


class ParallelConv(WeightedLayer):
    """A convolution over the channels of `[T, N, C_in/size, H, W]`, giving `[T, N, C_out/size, H', W']`.

    Args:
        kernel_size, stride, padding, dilation: as in torch: a number, or one for each dimension; padding is of zeros.
        dims: 2 for frames `[T, N, C, H, W]`, 1 for signals `[T, N, C, L]`, with a weight `[out, in, k]`; with
            kernel_size 1 that takes frames too.
        style: see the module's text; None for the one that moves fewer bytes.
        blocks: the output consists of this many equal parts, each cut by itself (3 for fused q, k, v).
        groups: as in torch; with groups > 1 each rank takes whole groups and nothing is communicated.
        pool: average pooling (this many pixels square, without overlap) of the input, first of all. The input as it is
            travels and is kept, so that spikes stay spikes; the input gradient travels pooled.
        pooled_behind: whether the output, perhaps behind a norm, is max-pooled (`MaxPool`). Where ranks share out rows,
            equal windows on both sides of a border must then give equal bits: products are dense on every rank.
        row_above: whether each rank computes all rows that its max-pooled ones are of (`rows_to_pool`), the one above
            its own rows among them, and whoever takes the output tells it apart.
        initialise, initialise_bias: fill the global weight and bias; by default as torch does.

    An input that every rank has whole (images) is not gathered. The dry run shows that, and what the input holds
    (`megasnn.layers.shape_inference`), which decides how it travels and is kept: a value that does not fit raises
    ValueError in forward.

    Raises:
        ValueError: channels or groups that do not divide by the number of ranks, an unknown style.
    """

    multiplies_by_weight = True  # and uses it in no other way: see megasnn.parallel.fsdp

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: _Size,
        context: BuildContext | None = None,
        *,
        initialise: Initialiser | None = None,
        style: Style | None = None,
        stride: _Size = 1,
        padding: _Size = 0,
        dilation: _Size = 1,
        groups: int = 1,
        bias: bool = False,
        dims: int = 2,
        blocks: int = 1,
        pool: int = 1,
        pooled_behind: bool = False,
        row_above: bool = False,
        initialise_bias: Initialiser | None = None,
    ) -> None:
        context = context_for(context)
        group, rows = context.tp, context.row_group
        style = style or cheaper_style(in_channels, out_channels)
        if style not in ("column", "row"):
            raise ValueError(f"style must be 'column' or 'row', got {style!r}")
        fits = min(in_channels, out_channels, groups) > 0 and in_channels % groups == out_channels % groups == 0
        if not fits or (groups > 1 and groups % group.size):
            raise ValueError(
                f"groups {groups} must divide in_channels {in_channels} and out_channels {out_channels} and be a "
                f"multiple of --tensor-model-parallel-size {group.size}"
            )
        if out_channels % group.size:
            size = group.size
            raise ValueError(f"out_channels {out_channels} does not divide by --tensor-model-parallel-size {size}")
        communication = Communication.NONE
        if groups == 1 < group.size:
            communication = Communication.GATHER if style == "column" else Communication.SCATTER
        kernel = along_each("kernel_size", kernel_size, dims)
        shape = (out_channels, in_channels // groups, *kernel[:dims])
        cut, default = int(style == "row" and groups == 1), uniform(torch.Size(shape[1:]).numel())
        geometry = Geometry(
            stride=along_each("stride", stride, dims),
            padding=along_each("padding", padding, dims),
            dilation=along_each("dilation", dilation, dims),
            groups=groups if groups == 1 else groups // group.size,
        )
        super().__init__(
            context,
            context.shard(shape, cut, blocks if cut == 0 else 1, initialise=initialise or default),
            context.shard((out_channels,), 0, blocks, initialise=initialise_bias or default) if bias else None,
            ProductOptions(group, communication, Products(geometry=geometry), pool=pool),
        )
        self.in_channels, self.out_channels, self.dims = in_channels, out_channels, dims
        self.groups = groups
        self._kernel, self._geometry = torch.Size(kernel), geometry  # that of the plan may be without rows of padding
        self._rows, self._row_above = rows, row_above
        self._move: RowMove | None = None
        if pooled_behind and rows is not None:
            self._sparse = False

    def forward(self, x: Tensor, add_bias: bool = True) -> Tensor:
        """Convolves; without `add_bias` gives what the bias would be added to."""
        is_signal = x.ndim == 4
        x = x.unsqueeze(-1) if is_signal else x  # of width 1
        y = self._dry_run(x, is_signal) if x.is_meta else self._convolved(x, add_bias)
        return y.squeeze(-1) if is_signal else y

    def _convolved(self, x: Tensor, add_bias: bool) -> Tensor:
        holds_spikes = self.options.content is Content.SPIKES
        bits = bits_of(x) if holds_spikes else None
        if self._rows is not None and self._move is not None:
            x = move_rows(x, self._move, self._rows, self.options.content)
            bits = pack_bits(x) if holds_spikes else None
        if self.observer is not None:
            self.tell_observer(x)
        y = self.product(x, bits)
        # After a row style's sum each rank holds its own channels, so the bias is added once, to those.
        return y if self.bias is None or not add_bias else y + self.bias.to(y.dtype).view(-1, 1, 1)

    def _dry_run(self, x: Tensor, is_signal: bool) -> Tensor:
        """Learns from the input what it holds; gives the shape of the output. Raises ValueError for another input."""
        fits = self.dims == 1 if is_signal else self.dims == 2 or self._kernel == (1, 1)
        if x.ndim != 5 or not fits:
            wanted = "signals [T, N, C, L]" if self.dims == 1 else "frames [T, N, C, H, W]"
            raise ValueError(f"a convolution with dims={self.dims} takes {wanted}, and is given {x.ndim} dimensions")
        whole = self.learn_input(x, 2, self.in_channels)
        if whole and self.options.communication is not Communication.WHOLE_INPUT:
            raise ValueError(
                f"a convolution whose input every tensor parallel rank has whole is cut by its outputs: give it style "
                f"'column', and no groups; it has {self.in_channels} channels in and {self.out_channels} out"
            )
        space = output_space(pooled_space(x.shape[3:], self.options.pool), self._kernel, self._geometry)
        if min(space) < 1:
            raise ValueError(f"a convolution with kernel_size {[*self._kernel]} is given {[*x.shape[3:]]} pixels")
        if self._rows is not None:
            self._learn_rows(self._rows, x.shape[3], space[0])
        channels = self.out_channels // self.options.group.size
        return x.new_empty((*x.shape[:2], channels, *space), dtype=self.compute_dtype)

    def _learn_rows(self, rows: Group, height: int, output_height: int) -> None:
        """Finds in the dry run which rows move to which rank. What is above and below an image comes with them, so that
        the product has no padding there."""
        note_height(self, height)
        geometry, pool = self._geometry, self.options.pool
        outputs = (rows_to_pool if self._row_above else shared_rows)(output_height, rows.size)
        along = self._kernel[0], geometry.stride[0], geometry.dilation[0], geometry.padding[0], pool
        needed = tuple(window_rows(each, *along) for each in outputs)
        local_rows = shared_rows(height, rows.size)
        self._move = None if needed == local_rows else RowMove(local_rows, needed, height - height % pool, pool)
        if self._move is not None:
            geometry = replace(geometry, padding=(0, geometry.padding[1]))
        self.options = replace(self.options, products=replace(self.options.products, geometry=geometry))

    def own_outputs(self, images: Tensor) -> Tensor:
        is_doubled = self._row_above and self._rows is not None and self._rows.rank > 0
        return images[:, :, 1:] if is_doubled else images

    def split_row_above(self, y: Tensor) -> tuple[Tensor | None, Tensor]:
        """The row above this rank's of an output with `row_above`, and the others; None where there is none."""
        if not self._row_above or self._rows is None or self._rows.rank == 0 or y.is_meta:
            return None, y
        above, own = y.split((1, y.shape[3] - 1), dim=3)
        return above, own


def along_each(name: str, size: _Size, dims: int) -> tuple[int, int]:
    """A size along height and width, from a number or a number for each of the dimensions; a signal has width 1.

    Raises ValueError for another number of them.
    """
    each = (size,) * dims if isinstance(size, int) else tuple(size)
    if dims not in (1, 2) or len(each) != dims:
        raise ValueError(f"{name} {size!r} does not fit dims={dims}: 1 for signals, 2 for frames")
    return each[0], each[1] if dims == 2 else 0 if name == "padding" else 1
