"""Convolution with sharded channels, on frames `[T, N, C, H, W]` or signals `[T, N, C, L]`.

- **column**: gathers the input, one bit a spike, and computes own output channels. Backward sums the input gradient
  and keeps own channels.
- **row**: multiplies own input channels by the weight's matching slice, sums outputs and keeps own channels. Forward
  and backward both move the dense output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megasnn.kernels.convolution import Geometry, output_space, pooled_space
from megasnn.kernels.layout import flat_in_memory
from megasnn.kernels.products import Products
from megasnn.kernels.spike_codec import bits_of, encode
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.init import uniform
from megasnn.layers.row_context import (
    RowMove,
    divide_rows,
    move_rows,
    note_height,
    rows_to_pool,
    window_rows,
)
from megasnn.layers.weighted import Communication, ProductOptions, WeightedLayer
from megasnn.parallel.sharding import Initialiser, Shard
from megasnn.parallel_state import Group

Style = Literal["column", "row"]
_Size = int | Sequence[int]


class ParallelConv(WeightedLayer):
    """Convolution: `[T, N, C_in/size, H, W]` -> `[T, N, C_out/size, H', W']`.

    The dry run finds the input's content, packing (`megasnn.layers.shape_inference`) and sharding.

    Args:
        kernel_size, stride, padding, dilation, groups, padding_mode: as in torch. With several groups, each rank has
            whole ones, without communication.
        dims: 2 for frames; 1 for signals, with a weight `[out, in, k]`. With kernel_size 1, dims=1 also accepts frames.
        style: "column" computes own output channels from the whole input, "row" multiplies own input channels and
            sums over ranks; None for the cheaper one.
        blocks: equal output parts, each sharded separately (3 for fused q, k, v).
        pool: side of average-pooling windows on the input.
        pooled_behind: a `MaxPool` follows, which exchanges rows itself.
        row_above: the norm's kernel max-pools the output. With divided rows, the first window needs one row that the
            rank above owns; the convolution computes it, too.
        initialise, initialise_bias: fill the global tensors; default: torch's.
    Attributes:
        has_row_above: the output begins with a row that the rank above owns, except in the dry run.
        edges: padding left, right, above and below that the layer adds to its input; None if the product pads.
    Raises:
        ValueError: channels or groups that ranks do not divide; an unknown style or padding mode; a padding that
            pooling or shared pixel rows do not allow; in forward, values that do not fit the packing.
    """

    multiplies_by_weight = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: _Size,
        context: BuildContext | None = None,
        *,
        stride: _Size = 1,
        padding: _Size | str = 0,
        dilation: _Size = 1,
        groups: int = 1,
        bias: bool = False,
        padding_mode: str = "zeros",
        dims: int = 2,
        style: Style | None = None,
        blocks: int = 1,
        pool: int = 1,
        pooled_behind: bool = False,
        row_above: bool = False,
        initialise: Initialiser | None = None,
        initialise_bias: Initialiser | None = None,
    ) -> None:
        # A model's layers are made without the argument: they find the context of the build at work.
        context = context_for(context)
        group = context.tp
        style = _checked_style(style, in_channels, out_channels)
        _check_channels(in_channels, out_channels, groups, group.size)
        window = _window(kernel_size, stride, padding, dilation, dims)
        edges = _edges_to_add(padding_mode, window.sides, pool, context.row_group)
        left, _, above, _ = window.sides if edges is None else [0, 0, 0, 0]
        local_groups = groups if groups == 1 else groups // group.size
        geometry = Geometry(window.stride, (above, left), window.dilation, local_groups)
        # Several groups are cut by their outputs in either style.
        cuts_inputs = style == "row" and groups == 1
        shape = (out_channels, in_channels // groups, *window.kernel[:dims])
        default = uniform(torch.Size(shape[1:]).numel())
        fill_bias = (initialise_bias or default) if bias else None
        weight_shard, bias_shard = _shards(context, shape, cuts_inputs, blocks, initialise or default, fill_bias)
        communication = Communication.NONE
        if groups == 1 < group.size:
            # The dry run turns GATHER into WHOLE_INPUT where ranks have the whole input, such as images.
            communication = Communication.SCATTER if cuts_inputs else Communication.GATHER
        # The unpooled input is sent and stored, because spikes pack into bits; the input gradient is sent pooled.
        options = ProductOptions(group, communication, Products(geometry=geometry), pool=pool)
        super().__init__(context, weight_shard, bias_shard, options)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.dims = dims
        self.groups = groups
        self.padding_mode = padding_mode
        self.edges = edges
        self._kernel = torch.Size(window.kernel)
        takes_each_pixel = max(*window.kernel, *window.stride, pool) == 1
        pads = edges is not None or any(geometry.padding)
        self.mixes_tokens = pads or not takes_each_pixel
        # `options.products` may have another geometry, without padding rows.
        self._geometry = geometry
        self._row_group = context.row_group
        self._row_above = row_above
        self.has_row_above = row_above and self._row_group is not None and self._row_group.rank > 0
        self._move: RowMove | None = None
        if pooled_behind and self._row_group is not None:
            # Equal windows on both sides of a border between ranks must have equal bits.
            # Sums over spikes add in another order than dense products, and each rank chooses by its own measurements.
            self._sparse = False

    def forward(self, x: Tensor, add_bias: bool = True) -> Tensor:
        content = self.options.content
        # Before `unsqueeze`: a view has none of the bits stored with its tensor.
        bits = bits_of(x, content)
        is_signal = x.ndim == 4
        if is_signal:
            x = x.unsqueeze(-1)  # an image of width 1
        if x.is_meta:
            y = self._dry_run(x, is_signal)
            return y.squeeze(-1) if is_signal else y
        if self._row_group is not None and self._move is not None:
            # The bits of the input have none of the rows from other ranks.
            x = move_rows(x, self._move, self._row_group, content)
            bits = encode(flat_in_memory(x.detach()), content) if content.is_bits else None
        if self.observer is not None:
            self.tell_observer(x)
        if self.edges is not None:
            x = self.with_edges(x.flatten(0, 1)).unflatten(0, x.shape[:2])
            # The product packs the padded input.
            bits = None
        y = self.apply_weight(x, bits)
        bias = self._parameters["bias"] if add_bias else None
        if bias is not None:
            # Row style: after the sum over ranks each rank has its own channels, so the bias is added once.
            y = y + bias.to(y.dtype).view(-1, 1, 1)
        return y.squeeze(-1) if is_signal else y

    def _dry_run(self, x: Tensor, is_signal: bool) -> Tensor:
        if is_signal:
            fits = self.dims == 1
        else:
            fits = self.dims == 2 or self._kernel == (1, 1)
        if x.ndim != 5 or not fits:
            wanted = "signals [T, N, C, L]" if self.dims == 1 else "frames [T, N, C, H, W]"
            raise ValueError(f"a convolution with dims={self.dims} takes {wanted}, got {x.ndim} dimensions")
        is_whole = self.note_input(x, 2, self.in_channels)
        if is_whole and self.options.communication is not Communication.WHOLE_INPUT:
            raise ValueError(
                f"a convolution of an unsharded input needs style='column' and groups=1: {self.in_channels} input and "
                f"{self.out_channels} output channels, {self.groups} groups"
            )
        padded = self.with_edges(x.flatten(0, 1))
        pooled = pooled_space(padded.shape[2:], self.options.pool)
        space = output_space(pooled, self._kernel, self._geometry)
        if min(space) < 1:
            raise ValueError(f"an image of {[*x.shape[3:]]} pixels is too small for kernel_size {[*self._kernel]}")
        if self._row_group is not None:
            self._note_rows(self._row_group, x.shape[3], space[0])
        channels = self.out_channels // self.options.group.size
        return x.new_empty((*x.shape[:2], channels, *space), dtype=self.compute_dtype)

    def _note_rows(self, row_group: Group, height: int, output_height: int) -> None:
        note_height(self, height)
        geometry = self._geometry
        pool = self.options.pool
        divide = rows_to_pool if self._row_above else divide_rows
        along = self._kernel[0], geometry.stride[0], geometry.dilation[0], geometry.padding[0], pool
        needed = tuple(window_rows(outputs, *along) for outputs in divide(output_height, row_group.size))
        local_rows = divide_rows(height, row_group.size)
        self._move = None
        if needed != local_rows:
            self._move = RowMove(local_rows, needed, height - height % pool, pool)
            # The exchange brings padding rows along, so the product pads columns only.
            geometry = replace(geometry, padding=(0, geometry.padding[1]))
        self.options = replace(self.options, products=replace(self.options.products, geometry=geometry))

    def with_edges(self, images: Tensor) -> Tensor:
        if self.edges is None:
            return images
        return F.pad(images, self.edges, "constant" if self.padding_mode == "zeros" else self.padding_mode)

    def own_outputs(self, images: Tensor) -> Tensor:
        return images[:, :, 1:] if self.has_row_above else images


def _checked_style(style: Style | None, in_channels: int, out_channels: int) -> Style:
    """The style, by default the one that sends fewer bytes. Raises ValueError for an unknown one."""
    if style is None:
        # Column sends the input gradient once, row the output forward and backward, and a gather of spikes is nearly
        # free. Megatron-LM pairs the styles: its activations are dense.
        return "row" if in_channels > 2 * out_channels else "column"
    if style not in ("column", "row"):
        raise ValueError(f"style must be 'column' or 'row', got {style!r}")
    return style


def _check_channels(in_channels: int, out_channels: int, groups: int, size: int) -> None:
    fits = min(in_channels, out_channels, groups) > 0 and in_channels % groups == out_channels % groups == 0
    if not fits or (groups > 1 and groups % size):
        raise ValueError(
            f"groups {groups} must divide in_channels {in_channels} and out_channels {out_channels} and be a "
            f"multiple of --tensor-model-parallel-size {size}"
        )
    if out_channels % size:
        raise ValueError(f"out_channels {out_channels} does not divide by --tensor-model-parallel-size {size}")


def _shards(
    context: BuildContext,
    shape: tuple[int, ...],
    cuts_inputs: bool,
    blocks: int,
    initialise: Initialiser,
    initialise_bias: Initialiser | None,
) -> tuple[Shard, Shard | None]:
    """Weight and bias, cut by outputs, or with `cuts_inputs` the weight by inputs.

    Args:
        initialise_bias: None for no bias.
    """
    # `context.shard` finds the part of a rank from its coordinates: the product's group gives sizes and communicates.
    if cuts_inputs:
        weight = context.shard(shape, dim=1, initialise=initialise)
    else:
        weight = context.shard(shape, dim=0, blocks=blocks, initialise=initialise)
    if initialise_bias is None:
        return weight, None
    return weight, context.shard(shape[:1], 0, blocks, initialise=initialise_bias)


class _Window(NamedTuple):
    """A convolution's window, each pair along height and width.

    Attributes:
        sides: padding left, right, above and below, in the order of `torch.nn.functional.pad`.
    """

    kernel: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    sides: list[int]


def _window(kernel_size: _Size, stride: _Size, padding: _Size | str, dilation: _Size, dims: int) -> _Window:
    """Raises ValueError for sizes that do not fit `dims`, and another text than 'same' for padding."""
    kernel = along_each("kernel_size", kernel_size, dims)
    strides = along_each("stride", stride, dims)
    dilations = along_each("dilation", dilation, dims)
    if not isinstance(padding, str):
        height, width = along_each("padding", padding, dims)
        return _Window(kernel, strides, dilations, [width, width, height, height])
    if padding != "same":
        raise ValueError(f"padding must be numbers or 'same', got {padding!r}")
    height, width = (step * (size - 1) for size, step in zip(kernel, dilations, strict=True))
    # As in torch, an even kernel has one more row and column behind.
    sides = [width // 2, width - width // 2, height // 2, height - height // 2]
    return _Window(kernel, strides, dilations, sides)


def _edges_to_add(mode: str, sides: list[int], pool: int, row_group: Group | None) -> list[int] | None:
    """Padding that the layer adds to its input; None if the product pads.

    Raises ValueError for an unknown mode, and for edges that pooling or shared pixel rows do not allow.
    """
    left, right, above, below = sides
    # The product's kernels pad with zeros, equally on both sides.
    if mode == "zeros" and left == right and above == below:
        return None
    modes = ("zeros", "reflect", "replicate", "circular")
    if mode not in modes:
        raise ValueError(f"padding_mode must be one of {', '.join(modes)}, got {mode!r}")
    text = f"padding_mode {mode!r} with padding {[*sides]} (left, right, above, below)"
    if pool > 1:
        raise ValueError(f"{text} does not combine with pool={pool}: use padding_mode='zeros' or pool=1")
    if row_group is not None:
        raise ValueError(f"{text} needs whole images: use --context-parallel-cut samples")
    return sides


def along_each(name: str, size: _Size, dims: int) -> tuple[int, int]:
    """Height and width from one size or one per dimension. Raises ValueError for another number."""
    each = (size,) * dims if isinstance(size, int) else tuple(size)
    if dims not in (1, 2) or len(each) != dims:
        raise ValueError(f"{name} {size!r} does not fit dims={dims}: 1 for signals, 2 for frames")
    if dims == 2:
        return each[0], each[1]
    # A signal is an image of width 1.
    width = 0 if name == "padding" else 1
    return each[0], width
