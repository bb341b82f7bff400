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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megasnn.kernels.convolution import (
    Geometry,
    average_pool,
    average_pool_gradient,
    input_gradient,
    pooled_space,
)
from megasnn.kernels.products import Products
from megasnn.kernels.spike_codec import Content, bits_of, encode, may_be_sparse, pack_bits, remember_bits
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.init import uniform
from megasnn.layers.row_context import (
    RowMove,
    move_rows,
    note_height,
    row_group,
    rows_to_pool,
    shared_rows,
    window_rows,
)
from megasnn.layers.shape_inference import content_of, count_call
from megasnn.layers.weight_grad import Leave
from megasnn.parallel.collectives import (
    all_reduce_sum,
    from_matrix,
    gather_columns,
    join_columns,
    sum_and_scatter_columns,
    to_matrix,
)
from megasnn.parallel.sharding import Initialiser, Shard, declare
from megasnn.parallel_state import Group
from megasnn.recompute import cached_collective

Style = Literal["column", "row"]
Size = int | Sequence[int]


def cheaper_style(in_channels: int, out_channels: int) -> Style:
    """The style that moves fewer bytes: column sends the input gradient once, row the output forward and backward."""
    return "row" if in_channels > 2 * out_channels else "column"


class WeightedLayer(nn.Module):
    """A layer with a weight and perhaps a bias, and the plan of what is exchanged around the product with them."""

    weight: Tensor
    bias: Tensor | None
    plan: ConvPlan

    def __init__(self, context: BuildContext, weight: Shard, bias: Shard | None) -> None:
        super().__init__()
        declare(self, "weight", weight, context.dtype)
        self.register_parameter("bias", None)
        if bias is not None:
            declare(self, "bias", bias, context.dtype)
        self.compute_dtype, self.weight_gradients = context.compute_dtype, context.weight_gradients
        self._cast_weights, self._has_whole_input = context.cast_weights, False
        self._traceable = context.traceable

    def product(self, x: Tensor, bits: Tensor | None) -> Tensor:
        """The product with the weight, of `[T, N, C, H, W]`. Args: bits: of the same spikes, where they are packed."""
        if self._traceable:
            images, on = average_pool(x.flatten(0, 1), self.plan.pool), self.plan.products.geometry
            kernel, options = _images_kernel(self.weight, x.dtype), (on.stride, on.padding, on.dilation, on.groups)
            return torch.conv2d(images, kernel, None, *options).unflatten(0, x.shape[:2])
        owed = self.weight_gradients.of(self.weight)
        weight = self._cast_weights.of(self.weight, self.compute_dtype)
        return Convolve.apply(x.to(self.compute_dtype), bits, weight, *owed, self.plan)

    def learn_input(self, x: Tensor, dim: int, channels: int) -> bool:
        """Learns in the dry run what the input holds; tells whether every rank has all of its channels.

        Raises ValueError for another number of them, and for two inputs in one forward of which only one has all.
        """
        again, size = count_call(self) > 1, self.plan.group.size
        whole = size > 1 and x.shape[dim] == channels
        if again and whole != self._has_whole_input:
            raise ValueError("it is called again, and of the two inputs every tensor parallel rank has only one whole")
        have = x.shape[dim] * (1 if whole else size)
        if have != channels:
            raise ValueError(f"a layer of {channels} input channels is given {have}")
        before = self.plan.content if again else Content.SPIKES
        content = max(before, content_of(x), key=(Content.SPIKES, Content.COUNTS, Content.DENSE).index)
        self.plan, self._has_whole_input = replace(self.plan, content=content), whole
        return whole


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
        padding: Size = 0,
        dilation: Size = 1,
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
        group, rows = context.tp, row_group(context)
        style = style or cheaper_style(in_channels, out_channels)
        if style not in ("column", "row"):
            raise ValueError(f"style must be 'column' or 'row', got {style!r}")
        kernel = along_each("kernel_size", kernel_size, dims)
        _refuse_sizes(in_channels, out_channels, groups, style, group.size)
        shape = (out_channels, in_channels // groups, *kernel[:dims])
        cut = 1 if style == "row" and groups == 1 else 0
        default = uniform(torch.Size(shape[1:]).numel())
        super().__init__(
            context,
            context.shard(shape, cut, blocks if cut == 0 else 1, initialise=initialise or default),
            context.shard((out_channels,), 0, blocks, initialise=initialise_bias or default) if bias else None,
        )
        self._rows, self.row_above = rows, row_above
        self.in_channels, self.out_channels, self.dims = in_channels, out_channels, dims
        self._kernel, self._move = kernel, None
        self._sparse = context.sparse_products and not (pooled_behind and rows is not None)
        geometry = Geometry(
            stride=along_each("stride", stride, dims),
            padding=along_each("padding", padding, dims),
            dilation=along_each("dilation", dilation, dims),
            groups=groups if groups == 1 else groups // group.size,
        )
        self._padding = geometry.padding  # that of the plan is without rows which come with others'
        self.plan = ConvPlan(
            group=group,
            gather=style == "column" and groups == 1 < group.size,
            scatter=style == "row" and groups == 1 < group.size,
            content=Content.DENSE,
            products=Products(geometry=geometry),
            pool=pool,
        )

    def forward(self, x: Tensor, add_bias: bool = True) -> Tensor:
        """Convolves; without `add_bias` gives what the bias would be added to."""
        is_signal = x.ndim == 4
        x = x.unsqueeze(-1) if is_signal else x  # of width 1
        if x.is_meta:
            y = self._dry_run(x, is_signal)
            return y.squeeze(-1) if is_signal else y
        bits = bits_of(x) if self.plan.content is Content.SPIKES else None
        if self._rows is not None and self._move is not None:
            x = move_rows(x, self._move, self._rows, self.plan.content)
            bits = pack_bits(x) if self.plan.content is Content.SPIKES else None
        y = self.product(x, bits)
        # After a row style's sum each rank holds its own channels, so the bias is added once, to those.
        y = y if self.bias is None or not add_bias else y + self.bias.to(y.dtype).view(-1, 1, 1)
        return y.squeeze(-1) if is_signal else y

    def _dry_run(self, x: Tensor, is_signal: bool) -> Tensor:
        """Learns from the input what it holds and whether it has all channels; gives the shape of the output.

        Raises ValueError for dimensions that do not fit, and as `learn_input`.
        """
        fits = self.dims == 1 if is_signal else self.dims == 2 or self._kernel == (1, 1)
        if x.ndim != 5 or not fits:
            wanted = "signals [T, N, C, L]" if self.dims == 1 else "frames [T, N, C, H, W]"
            raise ValueError(f"a convolution with dims={self.dims} takes {wanted}, and is given {x.ndim} dimensions")
        whole = self.learn_input(x, 2, self.in_channels)
        plan, geometry = self.plan, self.plan.products.geometry
        if whole and (plan.scatter or geometry.groups > 1):
            raise ValueError(
                f"a convolution whose input every tensor parallel rank has whole is cut by its outputs: give it style "
                f"'column', and no groups; it has {self.in_channels} channels in and {self.out_channels} out"
            )
        options = self._kernel, self._padding, geometry.stride, geometry.dilation
        space = [
            (side // plan.pool + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
            for side, kernel, padding, stride, dilation in zip(x.shape[3:], *options, strict=True)
        ]
        if min(space) < 1:
            raise ValueError(f"a convolution with kernel_size {self._kernel} is given {list(x.shape[3:])} pixels")
        if self._rows is not None:
            geometry = self._learn_rows(self._rows, x, space[0])
        products = Products(self._sparse and may_be_sparse(plan.content, plan.pool), geometry)
        self.plan = replace(plan, gather=plan.gather and not whole, whole=whole, products=products)
        return x.new_empty((*x.shape[:2], self.out_channels // plan.group.size, *space), dtype=self.compute_dtype)

    def _learn_rows(self, rows: Group, x: Tensor, output_height: int) -> Geometry:
        """Finds in the dry run which rows move to which rank. What is above and below an image comes with them, so that
        the geometry, which is returned, has no padding there."""
        height, geometry = x.shape[3], self.plan.products.geometry
        note_height(self, height)
        outputs = (rows_to_pool if self.row_above else shared_rows)(output_height, rows.size)
        pool = self.plan.pool
        along = self._kernel[0], geometry.stride[0], geometry.dilation[0], self._padding[0], pool
        needed = tuple(window_rows(each, *along) for each in outputs)
        owned = shared_rows(height, rows.size)
        self._move = None if needed == owned else RowMove(owned, needed, height - height % pool, pool)
        if self._move is None:
            return geometry
        return replace(geometry, padding=(0, geometry.padding[1]))

    def split_row_above(self, y: Tensor) -> tuple[Tensor | None, Tensor]:
        """The row above this rank's of an output with `row_above`, and the others; None where there is none."""
        if self._rows is None or self._rows.rank == 0 or y.is_meta:
            return None, y
        above, own = y.split((1, y.shape[3] - 1), dim=3)
        return above, own


def along_each(name: str, size: Size, dims: int) -> tuple[int, int]:
    """A size along height and width, from a number or a number for each of the dimensions; a signal has width 1.

    Raises ValueError for another number of them.
    """
    each = (size,) * dims if isinstance(size, int) else tuple(size)
    if dims not in (1, 2) or len(each) != dims:
        raise ValueError(f"{name} {size!r} does not fit dims={dims}: 1 for signals, 2 for frames")
    return each[0], each[1] if dims == 2 else 0 if name == "padding" else 1


def _refuse_sizes(inputs: int, outputs: int, groups: int, style: str, size: int) -> None:
    if min(inputs, outputs, groups) < 1 or inputs % groups or outputs % groups or (groups > 1 and groups % size):
        raise ValueError(
            f"groups {groups} must divide in_channels {inputs} and out_channels {outputs} and be a multiple of "
            f"--tensor-model-parallel-size {size}"
        )
    for name, channels in (("out_channels", outputs), *([("in_channels", inputs)] if style == "row" else [])):
        if channels % size:
            raise ValueError(f"{name} {channels} does not divide by --tensor-model-parallel-size {size}")


# --- forward and backward: what is exchanged, what is computed, what is kept


@dataclass(frozen=True)
class ConvPlan:
    """Options that the forward and the backward of one convolution have in common."""

    group: Group
    gather: bool
    scatter: bool
    content: Content
    products: Products
    pool: int
    whole: bool = False  # the input has all channels on every rank
    sum_whole: bool = False  # sums over the ranks are whole on every rank


class Convolve(torch.autograd.Function):
    """Keeps the packed input, one bit a spike, for the gradient of the weight, which backward leaves as a task. `bits`:
    the input, where it is packed already.

    Where that task runs at once, the input gradient is exchanged meanwhile.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bits: Tensor | None,
        weight: Tensor,
        anchor: Tensor | None,
        leave: Leave | None,
        plan: ConvPlan,
    ) -> Tensor:
        matrix = to_matrix(x)
        if plan.gather:
            full, payloads = gather_columns(matrix, plan.group, plan.content, bits=bits)
        else:
            full, payloads = matrix, [encode(matrix.reshape(-1), plan.content, check=True) if bits is None else bits]

        def output() -> Tensor:
            images = _pooled_input(payloads, plan, x.shape, x.dtype, from_matrix(full, x.shape))
            return plan.products.output(images, _images_kernel(weight, x.dtype)).unflatten(0, x.shape[:2])

        def sums() -> Tensor:
            y = output()
            if plan.sum_whole:
                return all_reduce_sum(y, plan.group)
            return from_matrix(sum_and_scatter_columns(to_matrix(y), plan.group)(), y.shape)

        ctx.plan, ctx.leave, ctx.input_shape = plan, leave, x.shape
        ctx.save_for_backward(weight, *payloads)
        exchanges = plan.scatter or plan.sum_whole and plan.group.size > 1
        return cached_collective(sums) if exchanges else output()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None, None, None]:
        weight, *payloads = ctx.saved_tensors
        plan: ConvPlan = ctx.plan
        grad_matrix = to_matrix(grad)
        if plan.scatter:
            grad_matrix, _ = gather_columns(grad_matrix, plan.group, Content.DENSE)
        grad_images = from_matrix(grad_matrix, grad.shape).flatten(0, 1)
        finish: Callable[[], Tensor] | None = None
        if ctx.needs_input_grad[0]:
            finish = _start_input_gradient(
                grad_images, _images_kernel(weight, grad.dtype), plan, pooled_space(ctx.input_shape[3:], plan.pool)
            )
            if plan.whole:  # each rank has computed what its own output channels contribute
                all_reduce_sum(finish(), plan.group)
        if ctx.leave is not None:
            add = partial(_add_weight_gradient, plan, payloads, ctx.input_shape, grad_images)
            ctx.leave(add)
        grad_x = None if finish is None else _unpooled(finish(), ctx.input_shape, plan.pool)
        return grad_x, None, None, None, None, None


def _start_input_gradient(grad: Tensor, weight: Tensor, plan: ConvPlan, space: torch.Size) -> Callable[[], Tensor]:
    """Computes the input gradient and, where the input was gathered, starts summing it over the ranks; the returned
    function waits and gives this rank's channels. Apart from backward, which would keep the whole gradient to its
    end."""
    product = input_gradient(grad, weight, plan.products.geometry, space)
    rows = product.movedim(1, -1).reshape(-1, product.shape[1])
    return sum_and_scatter_columns(rows, plan.group) if plan.gather else lambda: rows


def _add_weight_gradient(
    plan: ConvPlan, payloads: list[Tensor], input_shape: torch.Size, grad: Tensor, total: Tensor
) -> None:
    kernel, bits = _images_kernel(total, total.dtype), _bits_of_images(payloads, plan)
    if bits is not None:
        shape = torch.Size((len(grad), *input_shape[2:]))
        if plan.products.add_weight_gradient_of_bits(kernel, grad, bits, shape):
            return
    plan.products.add_weight_gradient(kernel, grad, _pooled_input(payloads, plan, input_shape, grad.dtype))


def _pooled_input(
    payloads: list[Tensor], plan: ConvPlan, shape: torch.Size, dtype: torch.dtype, full: Tensor | None = None
) -> Tensor:
    """Images that are convolved, `[T*N, C, H, W]`, channels last, from the payloads that are kept.

    Args:
        shape: of the input that this rank has. full: the input with all channels, where it is there unpacked.
    """
    if full is None:
        size = torch.Size((shape.numel() // shape[2], shape[2]))
        full = from_matrix(join_columns(payloads, plan.content, size, dtype), shape)
    return remember_bits(average_pool(full.flatten(0, 1), plan.pool), _bits_of_images(payloads, plan))


def _bits_of_images(payloads: list[Tensor], plan: ConvPlan) -> Tensor | None:
    """Packed spikes that are convolved, where that is what is kept and products may be formed of it."""
    is_kept = plan.content is Content.SPIKES and plan.pool == 1 and len(payloads) == 1
    return payloads[0] if is_kept and plan.products.sparse else None


def _images_kernel(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Two-dimensional, in the type that is computed in."""
    return weight[(..., *[None] * (4 - weight.ndim))].to(dtype)  # .view would give a single channel other strides


def _unpooled(matrix: Tensor, shape: torch.Size, pool: int) -> Tensor:
    """Gradient of the pooled input, as a matrix, as the gradient of the input, which has this `shape`."""
    if pool == 1:
        return from_matrix(matrix, shape)
    images = from_matrix(matrix, (*shape[:3], *pooled_space(shape[3:], pool))).flatten(0, 1)
    return average_pool_gradient(images, pool, shape[3:]).unflatten(0, shape[:2])
