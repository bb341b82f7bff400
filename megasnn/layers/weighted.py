"""Base of convolutions and linear layers: the product with a weight that tensor parallel ranks cut by channels.

Its backward has two parts: the gradient of the input, which autograd goes on with, and that of the weight, which is
left as a task. Between them only the packed input is kept, one bit a spike.

A linear layer, on `[..., features_local]`, is a convolution of images of one pixel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasnn.common.recompute import cached_collective
from megasnn.kernels.convolution import (
    average_pool,
    average_pool_gradient,
    convolution_input_gradient,
    convolve,
    pooled_space,
)
from megasnn.kernels.products import Products
from megasnn.kernels.spike_codec import Content, bits_of, encode, may_be_sparse, remember_bits
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.facts import facts
from megasnn.layers.init import uniform
from megasnn.layers.row_context import MeanOverSpace
from megasnn.layers.shape_inference import content_of
from megasnn.layers.tensors import declare
from megasnn.layers.weight_grad import Leave
from megasnn.parallel.collectives import (
    all_reduce_sum,
    from_matrix,
    gather_columns,
    join_columns,
    own_channels,
    sum_and_scatter_columns,
    to_matrix,
)
from megasnn.parallel.sharding import Initialiser, Shard
from megasnn.parallel_state import Group
from megasnn.telemetry.operations import times_used


class Communication(Enum):
    """Communication of a product with the other tensor parallel ranks, in forward and backward."""

    NONE = "none"
    GATHER = "the input is gathered; its gradient is summed, and each rank keeps its channels"
    WHOLE_INPUT = "the input is whole on every rank; its gradient is summed"
    SCATTER = "the output is summed, and each rank keeps its channels; its gradient is gathered"
    WHOLE_OUTPUT = "the output is summed, whole on every rank"


@dataclass(frozen=True)
class ProductOptions:
    """Options that the forward and the backward of a product have in common.

    Attributes:
        communication: with the other ranks of `group`.
        products: forms the product and the weight's gradient, as the convolution's geometry asks.
        content: of the input, which it travels and is kept by.
        pool: average pooling of the input, this many pixels square, behind its gathering.
    """

    group: Group
    communication: Communication
    products: Products
    content: Content = Content.DENSE
    pool: int = 1

    def images(self, x: Tensor, payloads: list[Tensor]) -> Tensor:
        """Images that are convolved, `[T*N, C, H, W]`, of an input with all channels and the payloads it came in."""
        return remember_bits(average_pool(x.flatten(0, 1), self.pool), self.bits_of_images(payloads))

    def bits_of_images(self, payloads: list[Tensor]) -> Tensor | None:
        """Packed spikes that are convolved, where that is what is kept and products may be formed of it."""
        is_kept = self.content is Content.SPIKES and self.pool == 1 and len(payloads) == 1
        return payloads[0] if is_kept and self.products.sparse else None


ProductObserver = Callable[[Tensor, int], None]
"""Takes images that are multiplied, `[frames, C, H, W]`, and the number of time steps that each frame stands for."""


class WeightedLayer(nn.Module):
    """A layer with a weight and perhaps a bias.

    Attributes:
        groups: of the whole weight, as in torch.
        observer: called with the input of every product when set, on ranks whose products count: of ranks that all
            compute the same, the first one's do.
    """

    weight: Tensor
    bias: Tensor | None
    groups = 1

    def __init__(self, context: BuildContext, weight: Shard, bias: Shard | None, options: ProductOptions) -> None:
        super().__init__()
        declare(self, "weight", weight, context.dtype)
        self.register_parameter("bias", None)
        if bias is not None:
            declare(self, "bias", bias, context.dtype)
        self.options, self._of_cut_input = options, options.communication
        self.compute_dtype, self.weight_gradients = context.compute_dtype, context.weight_gradients
        self._cast_weights, self._traceable = context.cast_weights, context.traceable
        self._sparse, self._has_whole_input = context.sparse_products, False
        self.observer: ProductObserver | None = None
        self._time_steps = context.time_steps
        self._counts = context.held_by is None or context.held_by.rank == 0

    def tell_observer(self, x: Tensor) -> None:
        """Tells the observer, if there is one, of an input `[T, N, C, H, W]`."""
        if self.observer is not None and self._counts:
            steps = self._time_steps if len(x) == 1 else 1
            self.observer(average_pool(x.flatten(0, 1), self.options.pool), steps)

    def times_used(self, space: Sequence[int]) -> Tensor:
        """Number of outputs that a value at each pixel of an observed image goes into, `[H, W]`; on all tensor parallel
        ranks together, where it is a value of one of them."""
        outputs, _, *sides = facts(self).shards["weight"].global_shape
        kernel = torch.ones((1, 1, *sides, *[1] * (2 - len(sides))), dtype=torch.float64)
        geometry = replace(self.options.products.geometry, groups=1)
        of_a_channel = times_used(lambda image: self.own_outputs(convolve(image, kernel, geometry)), space)
        is_shared = self.options.communication is Communication.WHOLE_INPUT
        return of_a_channel * (outputs // self.groups) / (self.options.group.size if is_shared else 1)

    def own_outputs(self, images: Tensor) -> Tensor:
        """Outputs of this rank alone: `[frames, C, H, W]` without pixels that another rank computes, too."""
        return images

    def product(self, x: Tensor, bits: Tensor | None) -> Tensor:
        """The product with the weight, of `[T, N, C, H, W]`. Args: bits: of the same spikes, where they are packed."""
        if self._traceable:
            images, on = average_pool(x.flatten(0, 1), self.options.pool), self.options.products.geometry
            kernel, options = _images_kernel(self.weight, x.dtype), (on.stride, on.padding, on.dilation, on.groups)
            return torch.conv2d(images, kernel, None, *options).unflatten(0, x.shape[:2])
        owed = self.weight_gradients.of(self.weight)
        weight = self._cast_weights.of(self.weight, self.compute_dtype)
        return _Product.apply(x.to(self.compute_dtype), bits, weight, *owed, self.options)

    def learn_input(self, x: Tensor, dim: int, channels: int) -> bool:
        """Learns in the dry run what the input holds; tells whether every rank has all of its channels.

        Raises ValueError for another number of them, and for two inputs in one forward of which only one has all.
        """
        found = facts(self)
        again = found.knows_input
        found.knows_input = True
        found.count_call()
        size = self.options.group.size
        whole = size > 1 and x.shape[dim] == channels
        if again and whole != self._has_whole_input:
            raise ValueError("it is called again, and of the two inputs every tensor parallel rank has only one whole")
        have = x.shape[dim] * (1 if whole else size)
        if have != channels:
            raise ValueError(f"a layer of {channels} input channels is given {have}")
        before, options = self.options.content if again else Content.SPIKES, self.options
        content = max(before, content_of(x), key=(Content.SPIKES, Content.COUNTS, Content.DENSE).index)
        products = replace(options.products, sparse=self._sparse and may_be_sparse(content, options.pool))
        communication = self._of_cut_input
        if whole and communication is Communication.GATHER:
            communication = Communication.WHOLE_INPUT
        self.options = replace(options, communication=communication, content=content, products=products)
        self._has_whole_input = whole
        return whole


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bits: Tensor | None,
        weight: Tensor,
        anchor: Tensor | None,
        leave: Leave | None,
        options: ProductOptions,
    ) -> Tensor:
        full, sums = to_matrix(x), options.communication in (Communication.SCATTER, Communication.WHOLE_OUTPUT)
        if options.communication is Communication.GATHER:
            full, payloads = gather_columns(full, options.group, options.content, bits=bits)
        else:
            payloads = [encode(full.reshape(-1), options.content, check=True) if bits is None else bits]

        def output() -> Tensor:
            images = options.images(from_matrix(full, x.shape), payloads)
            y = options.products.output(images, _images_kernel(weight, x.dtype)).unflatten(0, x.shape[:2])
            if options.communication is Communication.SCATTER:
                return from_matrix(sum_and_scatter_columns(to_matrix(y), options.group)(), y.shape)
            return all_reduce_sum(y, options.group) if sums else y

        ctx.options, ctx.leave, ctx.input_shape = options, leave, x.shape
        ctx.save_for_backward(weight, *payloads)
        return cached_collective(output) if sums else output()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Sums the gradient of a gathered input while the weight's task runs, where that runs at once."""
        weight, *payloads = ctx.saved_tensors
        options: ProductOptions = ctx.options
        grad_matrix = to_matrix(grad)
        if options.communication is Communication.SCATTER:
            grad_matrix, _ = gather_columns(grad_matrix, options.group, Content.DENSE)
        grad_images = from_matrix(grad_matrix, grad.shape).flatten(0, 1)
        finish = None
        if ctx.needs_input_grad[0]:
            space = pooled_space(ctx.input_shape[3:], options.pool)
            finish = _start_input_gradient(grad_images, _images_kernel(weight, grad.dtype), options, space)
        if ctx.leave is not None:
            ctx.leave(partial(_add_weight_gradient, options, payloads, ctx.input_shape, grad_images))
        grad_x = None if finish is None else _unpooled(finish(), ctx.input_shape, options.pool)
        return grad_x, None, None, None, None, None


def _start_input_gradient(
    grad: Tensor, weight: Tensor, options: ProductOptions, space: torch.Size
) -> Callable[[], Tensor]:
    """Computes the input gradient and, where the input was gathered, starts summing it over the ranks; the returned
    function waits and gives this rank's channels. Backward itself would keep the whole gradient to its end."""
    product = convolution_input_gradient(grad, weight, options.products.geometry, space)
    rows = product.movedim(1, -1).reshape(-1, product.shape[1])
    if options.communication is Communication.GATHER:
        return sum_and_scatter_columns(rows, options.group)
    # A rank has computed the part of its own output channels.
    if options.communication is Communication.WHOLE_INPUT:
        all_reduce_sum(rows, options.group)
    return lambda: rows


def _add_weight_gradient(
    options: ProductOptions, payloads: list[Tensor], input_shape: torch.Size, grad: Tensor, total: Tensor
) -> None:
    kernel, bits = _images_kernel(total, total.dtype), options.bits_of_images(payloads)
    if bits is not None:
        shape = torch.Size((len(grad), *input_shape[2:]))
        if options.products.add_weight_gradient_of_bits(kernel, grad, bits, shape):
            return
    size = torch.Size((input_shape.numel() // input_shape[2], input_shape[2]))
    # No variable keeps the input, which is larger than the pooled images, during the product.
    images = options.images(
        from_matrix(join_columns(payloads, options.content, size, grad.dtype), input_shape), payloads
    )
    options.products.add_weight_gradient(kernel, grad, images)


def _images_kernel(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Two-dimensional, in the type that is computed in."""
    return weight[(..., *[None] * (4 - weight.ndim))].to(dtype)  # .view would give a single channel other strides


def _unpooled(matrix: Tensor, shape: torch.Size, pool: int) -> Tensor:
    """Gradient of the pooled input, as a matrix, as the gradient of the input, which has this `shape`."""
    if pool == 1:
        return from_matrix(matrix, shape)
    images = from_matrix(matrix, (*shape[:3], *pooled_space(shape[3:], pool))).flatten(0, 1)
    return average_pool_gradient(images, pool, shape[3:]).unflatten(0, shape[:2])


class ParallelLinear(WeightedLayer):
    """`[T, N, in/size]` -> `[T, N, out]`, or `[T, N, out/size]`.

    Style "row" multiplies the features at hand with the matching columns of the weight and sums over the ranks: the
    output is whole on every rank, and the bias is added once, after the sum. Style "column" gathers the input and
    computes this rank's output features. An input that every rank has whole (pixels in a row) is not gathered, and
    style "row" takes this rank's features of it; the dry run shows it.

    Args:
        initialise, initialise_bias: fill the global weight and bias; by default as torch does.
    Raises:
        ValueError: features that do not divide by the number of ranks, an unknown style.
    """

    multiplies_by_weight = True  # and uses it in no other way: see megasnn.parallel.fsdp

    def __init__(
        self,
        in_features: int,
        out_features: int,
        context: BuildContext | None = None,
        *,
        initialise: Initialiser | None = None,
        style: str = "row",
        bias: bool = True,
        initialise_bias: Initialiser | None = None,
    ) -> None:
        context = context_for(context)
        group, default = context.tp, uniform(in_features)
        if style not in ("column", "row"):
            raise ValueError(f"style must be 'column' or 'row', got {style!r}")
        weight_dim, bias_dim = (1, None) if style == "row" else (0, 0)
        communication = Communication.WHOLE_OUTPUT if style == "row" else Communication.GATHER
        super().__init__(
            context,
            context.shard((out_features, in_features), weight_dim, initialise=initialise or default),
            context.shard((out_features,), bias_dim, initialise=initialise_bias or default) if bias else None,
            ProductOptions(group, communication if group.size > 1 else Communication.NONE, Products()),
        )
        self.in_features, self.out_features, self.style = in_features, out_features, style
        self._counts = self._counts and context.counts_logits  # where rows were shared out, space is gone

    def forward(self, x: Tensor) -> Tensor:
        if x.is_meta:
            return self._dry_run(x)
        if self._traceable:
            return F.linear(x, self.weight, self.bias)
        if self._has_whole_input and self.style == "row":
            x = own_channels(x, self.options.group)
        if self.observer is not None:
            self.tell_observer(x.reshape(len(x), -1, x.shape[-1], 1, 1))
        bits = bits_of(x) if self.options.content is Content.SPIKES and x.is_contiguous() else None
        y = self.product(x.reshape(1, -1, x.shape[-1], 1, 1), bits).view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _dry_run(self, x: Tensor) -> Tensor:
        """Learns from the input what it holds; gives the shape of the output. Raises ValueError as `learn_input`."""
        whole = self.learn_input(x, -1, self.in_features)
        if whole and x.ndim != 3:
            raise ValueError(f"an input that every tensor parallel rank has whole is [T, N, C] here, got {[*x.shape]}")
        features = self.out_features // (1 if self.style == "row" else self.options.group.size)
        return x.new_empty((*x.shape[:-1], features), dtype=self.compute_dtype)


class MeanLinear(ParallelLinear):
    """Mean over the space, then a linear layer: `[T, N, C_local, *space]` -> logits `[T, N, num_classes]`."""

    multiplies_by_weight = True  # and uses it in no other way: see megasnn.parallel.fsdp

    def __init__(
        self, in_features: int, out_features: int, context: BuildContext | None = None, **options: Any
    ) -> None:
        super().__init__(in_features, out_features, context, **options)
        self.mean = MeanOverSpace(context)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.mean(x))
