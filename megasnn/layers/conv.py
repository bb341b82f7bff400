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
import torch.nn.functional as F
from torch import Tensor, nn

from megasnn.kernels.convolution import Geometry
from megasnn.kernels.products import ConvolutionProducts
from megasnn.kernels.spike_codec import Content, bits_of, may_be_sparse, pack_bits
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.convolve import Convolve, ConvPlan
from megasnn.layers.holding import content_of, count_call, is_input, joined, note_exchanges
from megasnn.layers.initialisers import uniform
from megasnn.layers.rows import Rows, Windows, rows_of
from megasnn.parallel.rows import RowMove
from megasnn.parallel.sharding import Initialiser, declare_parameter
from megasnn.parallel_state import Group

Style = Literal["column", "row"]
Size = int | Sequence[int]
Pair = tuple[int, int]
PADDING_MODES = {"zeros": "constant", "reflect": "reflect", "replicate": "replicate", "circular": "circular"}


def cheaper_style(in_channels: int, out_channels: int) -> Style:
    """The style that moves fewer bytes: column sends the input gradient once, row the output forward and backward."""
    return "row" if in_channels > 2 * out_channels else "column"


class ParallelConv(nn.Module):
    """A convolution over the channels of `[T, N, C_in/size, H, W]`, giving `[T, N, C_out/size, H', W']`.

    Args:
        kernel_size, stride, padding, dilation: as in torch: a number, or one for each dimension; padding may also be
            "same" or "valid".
        dims: 2 for frames `[T, N, C, H, W]`, 1 for signals `[T, N, C, L]`, with a weight `[out, in, k]`.
        pointwise: on frames or signals, with kernel_size 1 and a weight in the shape of a Conv1d, `[out, in, 1]`.
        style: see the module's text; None for the one that moves fewer bytes.
        whole_input: the input holds all channels on every rank (images), so that nothing is gathered. Only with style
            "column". None: what the dry run shows (`megasnn.layers.holding`).
        content: what the input is known to hold; decides how it travels and how it is kept for backward. None: what the
            dry run shows. Checked: a value that does not fit raises ValueError in forward.
        blocks: the output consists of this many equal parts, each cut by itself (3 for fused q, k, v).
        groups: as in torch; with groups > 1 each rank takes whole groups and nothing is communicated.
        padding_mode: as in torch; applied before the channels are gathered, since padding is per channel.
        pool: average pooling (this many pixels square, without overlap) of the input, first of all. The input as it is
            travels and is kept, so that spikes stay spikes; the input gradient travels pooled.
        pooled_behind: whether the output is max-pooled before anything else takes it (3, stride 2, padding 1): where
            ranks share out rows, each then computes those that its pooled rows are of.
        initialise, initialise_bias: fill the global weight and bias; by default as torch does.

    Raises:
        ValueError: channels or groups that do not divide by the number of ranks, an unknown style or padding mode,
            pooling together with a padding mode that pads first.
    """

    multiplies_by_weight = True  # and uses it in no other way: see megasnn.parallel.fsdp

    weight: Tensor
    bias: Tensor | None
    _move: RowMove | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        context: BuildContext | None = None,
        *,
        initialise: Initialiser | None = None,
        style: Style | None = None,
        stride: Size = 1,
        padding: Size | str = 0,
        dilation: Size = 1,
        padding_mode: str = "zeros",
        groups: int = 1,
        bias: bool = False,
        dims: int = 2,
        pointwise: bool = False,
        whole_input: bool | None = None,
        content: Content | None = None,
        blocks: int = 1,
        pool: int = 1,
        pooled_behind: bool = False,
        initialise_bias: Initialiser | None = None,
    ) -> None:
        super().__init__()
        context = context_for(context)
        group, self._rows, self._move = context.tensor, rows_of(context), None
        self._pooled_behind = pooled_behind
        if style is None:
            style = "column" if whole_input else cheaper_style(in_channels, out_channels)
        kernel = along_each("kernel_size", kernel_size, dims)
        stride, dilation = along_each("stride", stride, dims), along_each("dilation", dilation, dims)
        _check(in_channels, out_channels, kernel, groups, group, style, padding_mode, pointwise, whole_input)
        pads = _pads(padding, kernel, stride, dilation, dims)
        zeros = padding_mode == "zeros" and all(before == after for before, after in pads)
        if pool > 1 and (dims == 1 or not zeros):
            raise ValueError(
                f"pool {pool} comes before padding, and is for frames; padding {padding!r} with padding_mode "
                f"{padding_mode!r} pads first"
            )
        shape = (out_channels, in_channels // groups, *(kernel[:1] if pointwise else kernel[:dims]))
        cut = 1 if style == "row" and groups == 1 else 0
        default = uniform(torch.Size(shape[1:]).numel())
        weight = context.shard(shape, cut, blocks if cut == 0 else 1, initialise=initialise or default)
        declare_parameter(self, "weight", weight, context.dtype)
        self.register_parameter("bias", None)
        if bias:
            shard = context.shard((out_channels,), 0, blocks, initialise=initialise_bias or default)
            declare_parameter(self, "bias", shard, context.dtype)
        self.in_channels, self.out_channels, self.dims, self.pointwise = in_channels, out_channels, dims, pointwise
        self._kernel, self._pads = kernel, pads
        self._padding_mode = None if zeros or not any(map(any, pads)) else PADDING_MODES[padding_mode]
        self._learns_content, self._learns_whole = content is None, whole_input is None
        self.compute_dtype, self.weight_gradients = context.compute_dtype, context.weight_gradients
        self._sparse_products, self._cast_weights = context.sparse_products, context.cast_weights
        geometry = Geometry(
            stride=stride,
            padding=tuple(before for before, _ in pads) if zeros else (0, 0),
            dilation=dilation,
            groups=groups if groups == 1 else groups // group.size,
        )
        self.plan = ConvPlan(
            group=group,
            gather=style == "column" and groups == 1 and not whole_input,
            scatter=style == "row" and groups == 1,
            content=content or Content.DENSE,
            products=ConvolutionProducts(geometry=geometry),
            pool=pool,
            whole=bool(whole_input),
        )

    def forward(self, x: Tensor, add_bias: bool = True) -> Tensor:
        """Without `add_bias`, what the bias would be added to."""
        is_signal = x.ndim == 4
        x = x.unsqueeze(-1) if is_signal else x  # of width 1
        if x.is_meta:
            y = self._dry_run(x, is_signal)
            return y.squeeze(-1) if is_signal else y
        bits = bits_of(x) if self.plan.content is Content.SPIKES else None
        (above, below), (left, right) = self._pads
        if self._rows is not None and self._move is not None:
            x, above, below = self._rows.move(x, self._move, self.plan.content, self.plan.pool), 0, 0
            bits = pack_bits(x) if self.plan.content is Content.SPIKES else None
        if self._padding_mode is not None:
            padded = F.pad(x.flatten(0, 1), (left, right, above, below), self._padding_mode)
            x, bits = padded.unflatten(0, x.shape[:2]), None
        owed = self.weight_gradients.of(self.weight)
        weight = self._cast_weights.of(self.weight, self.compute_dtype)
        y = Convolve.apply(x.to(self.compute_dtype), bits, weight, *owed, self.plan)
        # After a row style's sum each rank holds its own channels, so the bias is added once, to those.
        y = y if self.bias is None or not add_bias else y + self.bias.to(y.dtype).view(-1, 1, 1)
        return y.squeeze(-1) if is_signal else y

    def _dry_run(self, x: Tensor, is_signal: bool) -> Tensor:
        """Learns from the input what it holds and whether it has all channels; gives the shape of the output.

        Raises ValueError for dimensions and a number of channels that do not fit, and for two inputs in one forward of
        which only one has all channels.
        """
        again = count_call(self) > 1
        if x.ndim != 5 or is_signal != (self.dims == 1) and not self.pointwise:
            wanted = "signals [T, N, C, L]" if self.dims == 1 else "frames [T, N, C, H, W]"
            raise ValueError(f"a convolution with dims={self.dims} takes {wanted}, and is given {x.ndim} dimensions")
        group, plan = self.plan.group, self.plan
        whole = self._learns_whole and group.size > 1 and x.shape[2] == self.in_channels
        if self._learns_content:
            plan = replace(plan, content=joined(plan.content, content_of(x)) if again else content_of(x))
        if again and self._learns_whole and whole != plan.whole:
            raise ValueError("it is called again, and of the two inputs every tensor parallel rank has only one whole")
        geometry = plan.products.geometry
        if whole and (plan.scatter or geometry.groups > 1):
            raise ValueError(
                f"a convolution whose input every tensor parallel rank has whole is cut by its outputs: give it style "
                f"'column', and no groups; it has {self.in_channels} channels in and {self.out_channels} out"
            )
        self.plan = replace(plan, gather=plan.gather and not whole, whole=whole or plan.whole)
        expected = self.in_channels if self.plan.whole else self.in_channels / group.size
        if x.shape[2] != expected:
            have = x.shape[2] if self.plan.whole else x.shape[2] * group.size
            raise ValueError(f"a convolution of {self.in_channels} input channels is given {have}")
        along = zip(x.shape[3:], self._kernel, self._pads, geometry.stride, geometry.dilation, strict=True)
        space = [
            (side // plan.pool + sum(pads) - dilation * (kernel - 1) - 1) // stride + 1
            for side, kernel, pads, stride, dilation in along
        ]
        if min(space) < 1:
            raise ValueError(f"a convolution with kernel_size {self._kernel} is given {list(x.shape[3:])} pixels")
        self.plan = replace(self.plan, products=self._chosen_products())
        if self._rows is not None:
            self._note_rows(self._rows, x, space[0])
        return x.new_empty((*x.shape[:2], self.out_channels // group.size, *space), dtype=self.compute_dtype)

    def _note_rows(self, rows: Rows, x: Tensor, output_height: int) -> None:
        """In the dry run: which rows move to which rank. What is above and below an image comes with them."""
        height = x.shape[3]
        outputs = rows.below_pooling(output_height) if self._pooled_behind else rows.shared(output_height)
        geometry = self.plan.products.geometry
        (before, _), _ = self._pads
        windows = Windows(
            self._kernel[0], geometry.stride[0], geometry.dilation[0], before, self._padding_mode, self.plan.pool
        )
        self._move = rows.needed(height, outputs, windows)
        if self._move is not None:
            note_exchanges(self, backward=0 if is_input(x) else 1)
            geometry = replace(geometry, padding=(0, geometry.padding[1]))
            self.plan = replace(self.plan, products=replace(self.plan.products, geometry=geometry))

    def _chosen_products(self) -> ConvolutionProducts:
        sparse = self._sparse_products and may_be_sparse(self.plan.content, self.plan.pool)
        return replace(self.plan.products, sparse=sparse)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, kernel_size={self._kernel}, {self.plan}"


def along_each(name: str, size: Size, dims: int) -> tuple[int, int]:
    """A size along height and width, from a number or a number for each of the dimensions; a signal has width 1.

    Raises ValueError for another number of them.
    """
    if dims not in (1, 2):
        raise ValueError(f"dims must be 1 (signals) or 2 (frames), got {dims}")
    each = (size,) * dims if isinstance(size, int) else tuple(size)
    if len(each) != dims:
        raise ValueError(f"{name} {size!r} has {len(each)} numbers for a convolution with dims={dims}")
    return each[0], each[1] if dims == 2 else 0 if name == "padding" else 1


def _pads(padding: Size | str, kernel: Pair, stride: Pair, dilation: Pair, dims: int) -> tuple[Pair, Pair]:
    """The padding before and after, along height and width.

    Raises ValueError for an unknown name, and for "same" with a stride.
    """
    if padding == "same":
        if stride != (1, 1):
            raise ValueError(f"padding 'same' is for stride 1, got {stride}")
        # As in torch: of an odd sum, the larger part comes behind.
        total = [step * (size - 1) for size, step in zip(kernel, dilation, strict=True)]
        first, second = ((each // 2, each - each // 2) for each in total)
        return first, second
    if isinstance(padding, str) and padding != "valid":
        raise ValueError(f"padding must be a number, 'same' or 'valid', got {padding!r}")
    along, across = along_each("padding", 0 if isinstance(padding, str) else padding, dims)
    return (along, along), (across, across)


def _check(
    in_channels: int,
    out_channels: int,
    kernel: Pair,
    groups: int,
    group: Group,
    style: str,
    padding_mode: str,
    pointwise: bool,
    whole_input: bool | None,
) -> None:
    if style not in ("column", "row"):
        raise ValueError(f"style must be 'column' or 'row', got {style!r}")
    if padding_mode not in PADDING_MODES:
        raise ValueError(f"padding_mode must be one of {sorted(PADDING_MODES)}, got {padding_mode!r}")
    if whole_input and (style == "row" or groups > 1):
        raise ValueError("whole_input is for style 'column' without groups: a row convolution needs its own channels")
    if pointwise and kernel != (1, 1):
        raise ValueError(f"a pointwise convolution has kernel_size 1, got {kernel[0]}")
    if groups < 1 or in_channels % groups or out_channels % groups or (groups > 1 and groups % group.size):
        raise ValueError(
            f"groups {groups} must divide in_channels {in_channels} and out_channels {out_channels} and be a multiple "
            f"of --tensor-model-parallel-size {group.size}"
        )
    cut = {"out_channels": out_channels}
    if whole_input is False or whole_input is None and style == "row":
        cut["in_channels"] = in_channels
    for name, channels in cut.items():
        if channels % group.size:
            raise ValueError(f"{name} {channels} does not divide by --tensor-model-parallel-size {group.size}")
