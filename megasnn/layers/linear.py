"""A linear layer cut by features, on `[..., features_local]`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megasnn.kernels.products import Products
from megasnn.kernels.spike_codec import Content, bits_of, encode, may_be_sparse
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.init import uniform
from megasnn.layers.row_context import MeanOverSpace
from megasnn.layers.shape_inference import content_of, count_call, join_content, mark_replicated
from megasnn.layers.weight_grad import Leave
from megasnn.parallel.collectives import (
    all_reduce_sum,
    gather_columns,
    join_columns,
    own_channels,
    sum_and_scatter_columns,
)
from megasnn.parallel.sharding import Initialiser, declare_parameter
from megasnn.parallel_state import Group
from megasnn.recompute import cached_collective


class ParallelLinear(nn.Module):
    """`[T, N, in/size]` -> `[T, N, out]`, or `[T, N, out/size]`.

    Style "row" multiplies the features at hand with the matching columns of the weight and sums over the ranks: the
    output is whole on every rank, and the bias is added once, after the sum. Style "column" gathers the input and
    computes this rank's output features. An input that every rank has whole (pixels
    in a row) is not gathered, and style "row" takes this rank's features of it; the dry run shows it.

    Args:
        content: as in ParallelConv.
        initialise, initialise_bias: fill the global weight and bias; by default as torch does.
    Raises:
        ValueError: features that do not divide by the number of ranks, an unknown style.
    """

    multiplies_by_weight = True  # and uses it in no other way: see megasnn.parallel.fsdp

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        context: BuildContext | None = None,
        *,
        initialise: Initialiser | None = None,
        style: str = "row",
        bias: bool = True,
        content: Content | None = None,
        initialise_bias: Initialiser | None = None,
    ) -> None:
        super().__init__()
        context = context_for(context)
        group, default = context.tp, uniform(in_features)
        if style not in ("column", "row"):
            raise ValueError(f"style must be 'column' or 'row', got {style!r}")
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            if size % group.size and (name == "in_features" or style == "column"):
                raise ValueError(f"{name} {size} does not divide by --tensor-model-parallel-size {group.size}")
        self.in_features, self.out_features = in_features, out_features
        self.plan = _Plan(group, style, content or Content.DENSE)
        self._learns_content, self._sparse_products = content is None, context.sparse_products
        self._cast_weights = context.cast_weights
        self.compute_dtype, self.weight_gradients = context.compute_dtype, context.weight_gradients
        cut = 1 if style == "row" else 0
        shard = context.shard((out_features, in_features), cut, initialise=initialise or default)
        declare_parameter(self, "weight", shard, context.dtype)
        self.register_parameter("bias", None)
        if bias:
            dim = None if style == "row" else 0
            shard = context.shard((out_features,), dim, initialise=initialise_bias or default)
            declare_parameter(self, "bias", shard, context.dtype)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_meta:
            return self._dry_run(x)
        owed = self.weight_gradients.of(self.weight)
        if self.plan.whole and self.plan.style == "row":
            x = own_channels(x, self.plan.group)
        weight = self._cast_weights.of(self.weight, self.compute_dtype)
        bits = bits_of(x) if self.plan.content is Content.SPIKES and x.is_contiguous() else None
        y = _Multiply.apply(x.to(self.compute_dtype), bits, weight, *owed, self.plan)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _dry_run(self, x: Tensor) -> Tensor:
        """Learns from the input what it holds; gives the shape of the output. Raises ValueError for features that do
        not fit, and for two inputs in one forward of which only one has all features."""
        again = count_call(self) > 1
        size = self.plan.group.size
        is_whole = size > 1 and x.ndim == 3 and x.shape[-1] == self.in_features
        if x.shape[-1] * size != self.in_features and not is_whole:
            raise ValueError(f"a linear layer of {self.in_features} input features is given {x.shape[-1] * size}")
        if again and is_whole != self.plan.whole:
            raise ValueError("it is called again, and of the two inputs every tensor parallel rank has only one whole")
        content = self.plan.content
        if self._learns_content:
            content = join_content(content, content_of(x)) if again else content_of(x)
        products = Products(self._sparse_products and may_be_sparse(content))
        self.plan = replace(self.plan, content=content, whole=is_whole, products=products)
        whole = self.plan.style == "row"
        features = self.out_features if whole else self.out_features // size
        y = x.new_empty((*x.shape[:-1], features), dtype=self.compute_dtype)
        return mark_replicated(y) if whole else y

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.plan}"


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


@dataclass(frozen=True)
class _Plan:
    """Options that the forward and the backward of one layer have in common."""

    group: Group
    style: str
    content: Content
    whole: bool = False  # the input has all features on every rank
    products: Products = Products()


class _Multiply(torch.autograd.Function):
    """Keeps the packed input for the gradient of the weight, which backward leaves as a task. `bits`: the input, where
    it is packed already."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bits: Tensor | None,
        weight: Tensor,
        anchor: Tensor | None,
        leave: Leave | None,
        plan: _Plan,
    ) -> Tensor:
        rows = x.flatten(0, -2)
        if plan.style == "column" and not plan.whole:
            full, payloads = gather_columns(rows, plan.group, plan.content, bits=bits)
        else:
            full, payloads = rows, [encode(rows.reshape(-1), plan.content, check=True) if bits is None else bits]

        def sums() -> Tensor:
            return all_reduce_sum(_product(full, weight, plan), plan.group, "forward")

        y = cached_collective(sums) if plan.style == "row" and plan.group.size > 1 else _product(full, weight, plan)
        ctx.plan, ctx.leave, ctx.row_shape = plan, leave, rows.shape
        ctx.save_for_backward(weight, *payloads)
        return y.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None, None, None]:
        weight, *payloads = ctx.saved_tensors
        plan: _Plan = ctx.plan
        rows = grad.flatten(0, -2)
        finish = None
        if ctx.needs_input_grad[0]:
            images = plan.products.input_gradient(_as_images(rows), _as_images(weight), torch.Size((1, 1)))
            product = images.flatten(1)
            # Each rank of style "column" used the whole input, and of style "row" its own features.
            if plan.style == "column" and plan.whole:
                all_reduce_sum(product, plan.group, "backward")
            scatter = plan.style == "column" and not plan.whole
            finish = sum_and_scatter_columns(product, plan.group, "backward") if scatter else lambda: product
        if ctx.leave is not None:
            ctx.leave(partial(_add_weight_gradient, plan, payloads, ctx.row_shape, rows))
        return None if finish is None else finish().unflatten(0, grad.shape[:-1]), None, None, None, None, None


def _product(rows: Tensor, weight: Tensor, plan: _Plan) -> Tensor:
    return plan.products.output(_as_images(rows), _as_images(weight)).flatten(1)


def _add_weight_gradient(
    plan: _Plan, payloads: list[Tensor], row_shape: torch.Size, grad: Tensor, total: Tensor
) -> None:
    rows = join_columns(payloads, plan.content, row_shape, grad.dtype)
    plan.products.add_weight_gradient(_as_images(total), _as_images(grad), _as_images(rows))


def _as_images(rows: Tensor) -> Tensor:
    """Views `[R, C]` as `[R, C, 1, 1]`."""
    return rows[:, :, None, None]
