"""Base of convolutions and linear layers: products with a weight that tensor-parallel ranks divide.

Backward computes the input gradient at once, and leaves the weight gradient as a task. A linear layer, on
`[..., features_local]`, is a convolution of one-pixel images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megasnn.common.autograd import Function
from megasnn.common.recompute import cached_collective
from megasnn.kernels.convolution import (
    average_pool,
    average_pool_gradient,
    convolution_input_gradient,
    convolve,
    pooled_space,
)
from megasnn.kernels.products import Products
from megasnn.kernels.spike_codec import Content, content_of_both, encode, may_be_sparse, remember_bits
from megasnn.layers.context import BuildContext
from megasnn.layers.facts import facts
from megasnn.layers.shape_inference import content_of
from megasnn.layers.tensors import declare
from megasnn.layers.weight_grad import QueueGradient
from megasnn.parallel.collectives import (
    all_reduce_sum,
    from_matrix,
    gather_columns,
    join_columns,
    sum_and_scatter_columns,
    to_matrix,
)
from megasnn.parallel.sharding import Shard
from megasnn.parallel_state import Group
from megasnn.telemetry.operations import times_used

ProductObserver = Callable[[Tensor, int], None]
"""Receives the images of a product, `[frames, C, H, W]`, and the number of time steps that each frame stands for."""


class Communication(Enum):
    """A product's communication with tensor-parallel ranks."""

    NONE = "none"
    GATHER = "gather the input; sum its gradient, and keep this rank's channels"
    WHOLE_INPUT = "every rank has the whole input; sum its gradient"
    SCATTER = "sum the output, and keep this rank's channels; gather its gradient"
    WHOLE_OUTPUT = "sum the output, whole on every rank"


@dataclass(frozen=True)
class ProductOptions:
    """How to compute a layer's product: by which kernels, with which communication, from which packing.

    Attributes:
        products: kernels, with the convolution's geometry.
        content: the input's; sets its packing.
        pool: side of average-pooling windows on the gathered input.
    """

    group: Group
    communication: Communication
    products: Products
    content: Content = Content.DENSE
    pool: int = 1

    def images(self, rows: Tensor, payloads: list[Tensor], like: torch.Size) -> Tensor:
        """`[T*N, C, H, W]` from a matrix of all channels and its packed parts. `like`: `[T, N, any, H, W]`."""
        time, samples, _, height, width = like
        # Frames are joined last: `flatten` gives a single channel the strides of a row-major image.
        images = rows.view(time, samples, height, width, rows.shape[1]).movedim(-1, 2).flatten(0, 1)
        if self.pool > 1:
            images = average_pool(images, self.pool)
        return remember_bits(images, self.bits_of_images(payloads), self.content)

    def bits_of_images(self, payloads: list[Tensor]) -> Tensor | None:
        """Packed images, where sums over spikes use them."""
        are_bits = self.content.is_bits and self.pool == 1 and len(payloads) == 1
        return payloads[0] if are_bits and self.products.sparse else None


class WeightedLayer(nn.Module):
    """Layer with a weight and an optional bias.

    Attributes:
        groups: the whole weight's, as in torch.
        observer: called with every product's input, if set; on one rank where products are equal.
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
        numerics = context.numerics
        self.options = options
        self.compute_dtype = numerics.compute_dtype
        self.weight_gradients = context.weight_gradients
        self.observer: ProductObserver | None = None
        # The dry run may find a whole input, which needs another communication than a sharded one.
        self._sharded_communication = options.communication
        self._has_whole_input = False
        self._cast_weights = context.cast_weights
        self._traceable = numerics.traceable
        self._sparse = numerics.sparse_products
        self._time_steps = context.time_steps
        # Indexing, because .view would give a single channel other strides.
        self._kernel_index = (..., *[None] * (4 - len(weight.local_shape)))
        # All ranks compute a whole layer, and its operations count once.
        self._is_counted = not context.is_whole or context.state.tp.rank == 0

    def tell_observer(self, x: Tensor) -> None:
        if self.observer is not None and self._is_counted:
            steps = self._time_steps if len(x) == 1 else 1
            self.observer(average_pool(x.flatten(0, 1), self.options.pool), steps)

    def times_used(self, space: Sequence[int]) -> Tensor:
        """Number of outputs, on all tensor-parallel ranks, that depend on each pixel, `[H, W]`."""
        out_channels, _, *sides = facts(self).shards["weight"].global_shape
        kernel = torch.ones((1, 1, *sides, *[1] * (2 - len(sides))), dtype=torch.float64)
        geometry = replace(self.options.products.geometry, groups=1)

        def outputs(image: Tensor) -> Tensor:
            return self.own_outputs(convolve(self.with_edges(image), kernel, geometry))

        used = times_used(outputs, space) * (out_channels // self.groups)
        # All ranks observe a whole input, and the counts of the ranks are added.
        return used / self.options.group.size if self.options.communication is Communication.WHOLE_INPUT else used

    def with_edges(self, images: Tensor) -> Tensor:
        """Input images, padded where the product's kernels do not pad."""
        return images

    def own_outputs(self, images: Tensor) -> Tensor:
        """Outputs without the rows that another rank computes too."""
        return images

    def apply_weight(self, x: Tensor, bits: Tensor | None) -> Tensor:
        """Multiplies `[T, N, C, H, W]` by the weight, without bias. `bits`: packed spikes of x, if known."""
        if self._traceable:
            # torch.export follows no autograd functions of Python.
            images = average_pool(x.flatten(0, 1), self.options.pool)
            kernel = self.weight.to(x.dtype)[self._kernel_index]
            geometry = self.options.products.geometry
            along = geometry.stride, geometry.padding, geometry.dilation, geometry.groups
            return torch.conv2d(images, kernel, None, *along).unflatten(0, x.shape[:2])
        weight = self._parameters["weight"]
        assert weight is not None
        anchor, queue_gradient = self.weight_gradients.outside_autograd(weight)
        kernel = self._cast_weights.cast(weight, self.compute_dtype)[self._kernel_index]
        y: Tensor = _ShardedProduct.apply(x.to(self.compute_dtype), bits, kernel, anchor, queue_gradient, self.options)
        return y

    def operand(self) -> tuple[Tensor, Tensor | None, QueueGradient | None]:
        """The weight in the products' type, without gradient; its anchor; its gradient's queue."""
        anchor, queue_gradient = self.weight_gradients.outside_autograd(self.weight)
        return self._cast_weights.cast(self.weight, self.compute_dtype), anchor, queue_gradient

    def note_input(self, x: Tensor, dim: int, channels: int) -> bool:
        """Records an input's content in the dry run. True if it is whole on every rank.

        Raises ValueError for other channels, or one whole and one sharded input in one forward.
        """
        found = facts(self)
        is_again = found.knows_input
        found.knows_input = True
        found.count_call()
        size = self.options.group.size
        is_whole = size > 1 and x.shape[dim] == channels
        if is_again and is_whole != self._has_whole_input:
            raise ValueError("it is called twice, and tensor-parallel ranks divide only one of the two inputs")
        have = x.shape[dim] if is_whole else x.shape[dim] * size
        if have != channels:
            raise ValueError(f"a layer takes {channels} input channels, got {have}")
        content = content_of(x)
        if is_again:
            # One packing serves all calls: an input with spikes in one call and counts in another holds counts.
            content = content_of_both(self.options.content, content)
        communication = self._sharded_communication
        if is_whole and communication is Communication.GATHER:
            communication = Communication.WHOLE_INPUT
        is_sparse = self._sparse and may_be_sparse(content, self.options.pool)
        products = replace(self.options.products, sparse=is_sparse)
        self.options = replace(self.options, communication=communication, content=content, products=products)
        self._has_whole_input = is_whole
        return is_whole


class _ShardedProduct(Function):
    """A layer's product, with its communication: `[T, N, C, H, W]` -> `[T, N, C_out, H', W']`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bits: Tensor | None,
        kernel: Tensor,
        anchor: Tensor | None,
        queue_gradient: QueueGradient | None,
        options: ProductOptions,
    ) -> Tensor:
        shape = x.shape
        # The matrix serves the gather, which adds the other ranks' channels, and the packing. `options.images` is its
        # inverse, except for pooling: both are views where channels are last in memory.
        rows = to_matrix(x)
        if options.communication is Communication.GATHER:
            rows, payloads = gather_columns(rows, options.group, options.content, bits=bits)
        elif bits is None:
            payloads = [encode(rows.view(-1), options.content, check=True)]
        else:
            payloads = [bits]
        ctx.options = options
        ctx.queue_gradient = queue_gradient
        ctx.input_shape = shape
        # The packed input, one bit a spike, is the only copy for backward.
        ctx.save_for_backward(kernel, *payloads)
        if options.communication in (Communication.SCATTER, Communication.WHOLE_OUTPUT):
            # Ranks have parts of each output's sum.
            return cached_collective(partial(_sum_output, options, rows, payloads, shape, kernel))
        images = options.products.convolve(options.images(rows, payloads, shape), kernel)
        return images.view(*shape[:2], *images.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kernel, *payloads = ctx.saved_tensors
        options: ProductOptions = ctx.options
        shape: torch.Size = ctx.input_shape
        time, samples, _, height, width = grad.shape
        rows = to_matrix(grad)
        if options.communication is Communication.SCATTER:
            rows, _ = gather_columns(rows, options.group, Content.DENSE)
        grad_images = rows.view(time, samples, height, width, rows.shape[1]).movedim(-1, 2).flatten(0, 1)
        grad_x = None
        finish = None
        if ctx.needs_input_grad[0]:
            # Starts the sum over ranks; the weight's task below runs meanwhile, unless deferred.
            space = shape[3:] if options.pool == 1 else pooled_space(shape[3:], options.pool)
            grad_x, finish = _start_input_gradient(grad_images, kernel, options, space)
        if ctx.queue_gradient is not None:
            ctx.queue_gradient(partial(_add_weight_gradient, options, payloads, shape, grad_images.detach()))
        if finish is not None:
            grad_x = finish()
        if grad_x is not None and options.pool == 1:
            grad_x = from_matrix(grad_x, shape)
        elif grad_x is not None:
            pooled = from_matrix(grad_x, (*shape[:3], *pooled_space(shape[3:], options.pool))).flatten(0, 1)
            grad_x = average_pool_gradient(pooled, options.pool, shape[3:]).unflatten(0, shape[:2])
        return grad_x, None, None, None, None, None


def _sum_output(
    options: ProductOptions, rows: Tensor, payloads: list[Tensor], shape: torch.Size, kernel: Tensor
) -> Tensor:
    """The ranks' sum: this rank's channels, or all of them."""
    images = options.products.convolve(options.images(rows, payloads, shape), kernel)
    y = images.view(*shape[:2], *images.shape[1:])
    if options.communication is Communication.SCATTER:
        return from_matrix(sum_and_scatter_columns(to_matrix(y), options.group)(), y.shape)
    return all_reduce_sum(y, options.group)


def _start_input_gradient(
    grad: Tensor, kernel: Tensor, options: ProductOptions, space: torch.Size
) -> tuple[Tensor | None, Callable[[], Tensor] | None]:
    """Input gradient for own channels as a matrix, or a function that waits for its sum over ranks."""
    # Local here: variables in `_ShardedProduct.backward` would hold the images' memory until its end.
    grad_input = convolution_input_gradient(grad, kernel, options.products.geometry, space)
    rows = grad_input.movedim(1, -1).reshape(-1, grad_input.shape[1])
    if options.communication is Communication.GATHER:
        return None, sum_and_scatter_columns(rows, options.group)
    if options.communication is Communication.WHOLE_INPUT:
        # Each rank has the gradient from its own output channels.
        all_reduce_sum(rows, options.group)
    return rows, None


def _add_weight_gradient(
    options: ProductOptions, payloads: list[Tensor], input_shape: torch.Size, grad: Tensor, total: Tensor
) -> None:
    kernel = total[(..., *[None] * (4 - total.ndim))]
    products = options.products
    channels = input_shape[2]
    if options.communication is Communication.GATHER:
        channels *= options.group.size
    if products.sparse:
        bits = options.bits_of_images(payloads)
        shape = torch.Size((len(grad), channels, *input_shape[3:]))
        are_spikes = options.content is Content.SPIKES
        if bits is not None and are_spikes and products.add_weight_gradient_of_bits(kernel, grad, bits, shape):
            return
    size = (input_shape.numel() // input_shape[2], channels)
    # No variable for the unpacked input: it is larger than the pooled images, and would live during the product.
    images = options.images(join_columns(payloads, options.content, size, grad.dtype), payloads, input_shape)
    products.add_weight_gradient(kernel, grad, images)
