"""Layer classes of torch and SpikingJelly as layers of ours, cut by channel: the table of conversions.

A layer keeps the names of its tensors, its initial values, its hooks and what was set on it, and how it is called: one
of torch's, or of SpikingJelly's in step mode "s", is given `[N, C, ...]`, in which N may be T * N; one in step mode "m"
is given `[T, N, C, ...]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from megasnn.kernels import SURROGATES, NeuronSpec
from megasnn.layers.context import BuildContext
from megasnn.layers.conv import ParallelConv
from megasnn.layers.dropout import ParallelDropout
from megasnn.layers.init import ModuleInitialiser, initializer_from_module, own_tensors
from megasnn.layers.linear import ParallelLinear
from megasnn.layers.neuron import ParallelNeuron
from megasnn.layers.norm import ParallelBatchNorm, TemporalEffectiveBatchNorm
from megasnn.layers.shape_inference import UNMARKED, cut_of, mark_replicated
from megasnn.parallel.sharding import declare_parameter
from megasnn.registry import Registry


def _values(module: nn.Module, initialise: ModuleInitialiser | None) -> dict[str, Any]:
    names = {"initialise": "weight", "initialise_bias": "bias"}
    return {option: initializer_from_module(module, initialise, name) for option, name in names.items()}


class _Steps(nn.Module):
    """Calls the class behind it, which takes `[T, N, C, ...]`, as the plain layer was called."""

    multi_step: bool
    is_frozen = False
    """Of a norm in evaluation mode, which uses and keeps its running statistics in training too."""

    def train(self, mode: bool = True) -> _Steps:
        return super().train(mode and not self.is_frozen)

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return super().forward(x, *args) if self.multi_step else super().forward(x.unsqueeze(0), *args).squeeze(0)


class ConvertedConv(_Steps, ParallelConv):
    """Stands for a Conv1d or Conv2d."""

    def __init__(
        self, conv: nn.Conv1d | nn.Conv2d, context: BuildContext, initialise: ModuleInitialiser | None
    ) -> None:
        super().__init__(
            conv.in_channels,
            conv.out_channels,
            conv.kernel_size,
            context,
            dims=len(conv.kernel_size),
            stride=conv.stride,
            padding=conv._reversed_padding_repeated_twice[::-2],  # in numbers, of which torch has names too
            dilation=conv.dilation,
            groups=conv.groups,
            bias=conv.bias is not None,
            **_values(conv, initialise),
        )
        self.multi_step = is_multi_step(conv)


class ConvertedLinear(ParallelLinear):
    """Stands for a Linear. Its output is cut, or, where it does not divide by the ranks, whole on each of them."""

    def __init__(self, linear: nn.Linear, context: BuildContext, initialise: ModuleInitialiser | None) -> None:
        super().__init__(
            linear.in_features,
            linear.out_features,
            context,
            style="row" if linear.out_features % context.tp.size else "column",
            bias=linear.bias is not None,
            **_values(linear, initialise),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) if x.ndim > 2 else super().forward(x.unsqueeze(0)).squeeze(0)
        return mark_replicated(y) if self.style == "row" else y


class ConvertedBatchNorm(_Steps, ParallelBatchNorm):
    """Stands for a batch norm: running statistics are merged once per step.

    Args:
        whole: every rank has all channels.
    """

    def __init__(
        self, norm: _BatchNorm, context: BuildContext, initialise: ModuleInitialiser | None, whole: bool = False
    ) -> None:
        super().__init__(norm.num_features, context, **_options(norm, initialise, whole))
        _as_called(self, norm)


class ConvertedTemporalBatchNorm(_Steps, TemporalEffectiveBatchNorm):
    """Stands for SpikingJelly's TemporalEffectiveBatchNorm. Raises ValueError for another number of time steps."""

    def __init__(
        self, norm: Any, context: BuildContext, initialise: ModuleInitialiser | None, whole: bool = False
    ) -> None:
        if len(norm.scale) != context.time_steps:
            raise ValueError(f"it has {len(norm.scale)} time steps, the model {context.time_steps}; set --time-steps")
        scale = initializer_from_module(norm, initialise, "scale")
        super().__init__(norm.num_features, context, initialise_scale=scale, **_options(norm, initialise, whole))
        _as_called(self, norm)


def _options(norm: _BatchNorm, initialise: ModuleInitialiser | None, whole: bool) -> dict[str, Any]:
    return dict(
        eps=norm.eps,
        momentum=norm.momentum,
        affine=norm.affine,
        track_running_stats=norm.track_running_stats,
        whole=whole,
        **_values(norm, initialise),
    )


def _as_called(ours: Any, norm: _BatchNorm) -> None:
    ours.is_frozen = not norm.training
    ours.time_steps = 1  # the input has all time steps
    ours.multi_step = is_multi_step(norm)
    if norm.affine and norm.bias is None:  # in SpikingJelly's BatchNormThroughTime
        drop_tensor(ours, "bias")


class ConvertedDropout(ParallelDropout):
    """Stands for a Dropout; drawn by sample.

    Attributes:
        samples: the positions of the micro-batch's samples, set before each forward of the layer it is in.
    """

    def __init__(self, dropout: Any, context: BuildContext, initialise: ModuleInitialiser | None) -> None:
        of_spikingjelly = not isinstance(dropout, nn.Dropout)
        super().__init__(dropout.p, "", context, same_at_all_steps=of_spikingjelly)
        self.samples: range | None = None
        self._folds = False  # the dry run shows whether it is given [T * N, C, ...]

    def forward(self, x: Tensor, samples: range | None = None) -> Tensor:
        if x.is_meta:
            self._learn_shape(x)
        if self.samples is None or not self._folds:
            return super().forward(x, self.samples)
        return super().forward(x.unflatten(0, (-1, len(self.samples))), self.samples).flatten(0, 1)

    def _learn_shape(self, x: Tensor) -> None:
        """Raises ValueError for channels that are not cut or elsewhere, so that ranks would draw them alike."""
        cut = cut_of(x) if self.group.size > 1 else UNMARKED
        if cut is None or cut is not UNMARKED and (cut.blocks > 1 or cut.dim not in (1, 2)):
            where = "whole on every rank" if cut is None else f"cut in dimension {cut.dim}"
            size = self.group.size
            raise ValueError(
                f"a dropout is given {list(x.shape)}, {where}: with --tensor-model-parallel-size {size} it "
                "takes channels that are cut"
            )
        samples = x.shape[1] if self.samples is None else len(self.samples)
        self._folds = cut.dim == 1 if cut is not UNMARKED else x.shape[1] != samples and len(x) % samples == 0


class ConvertedNeuron(ParallelNeuron):
    """Stands for SpikingJelly's IFNode, LIFNode and ParametricLIFNode in step mode "m"."""

    once_because = "SpikingJelly's would go on with the potentials of the first call: give each call a neuron"

    def __init__(self, node: Any, context: BuildContext, initialise: ModuleInitialiser | None) -> None:
        super().__init__(spec_of(node), context)
        if self.w is not None:
            shard = context.shard((), partial_gradient=True, initialise=initializer_from_module(node, initialise, "w"))
            declare_parameter(self, "w", shard, context.dtype)


_KINDS = {"IFNode": "if", "LIFNode": "lif", "ParametricLIFNode": "plif"}


def spec_of(node: Any) -> NeuronSpec | None:
    """The description of a neuron of SpikingJelly's; None where none of ours computes it."""
    surrogate = node.surrogate_function
    names = {entry.spikingjelly: name for name, entry in SURROGATES.items() if entry.spikingjelly}
    name = names.get(type(surrogate).__name__)
    parameters = dict(getattr(surrogate, "_sg_params", {}))
    alpha = parameters.pop("alpha", None)
    beta = parameters.pop("beta", 1.0)
    own = type(node).__module__.startswith("spikingjelly.") and type(node).__name__ in _KINDS
    known = own and name is not None and surrogate.spiking and not parameters and beta == 1.0
    if not known or node.store_v_seq or node._neuron_precision is not None:
        return None
    return NeuronSpec(
        kind=_KINDS[type(node).__name__],
        tau=getattr(node, "tau", 2.0),
        v_threshold=node.v_threshold,
        v_reset=node.v_reset,
        decay_input=getattr(node, "decay_input", True),
        detach_reset=node.detach_reset,
        surrogate=str(name),
        alpha=None if alpha is None else float(alpha),
    )


Conversion = Callable[[Any, BuildContext, ModuleInitialiser | None], nn.Module]

CONVERSIONS: Registry[Conversion] = Registry(
    "megasnn.shard",
    {
        **dict.fromkeys(("Conv1d", "Conv2d"), ConvertedConv),
        "Linear": ConvertedLinear,
        **dict.fromkeys(("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm"), ConvertedBatchNorm),
        **dict.fromkeys((f"ThresholdDependentBatchNorm{dims}d" for dims in (1, 2, 3)), ConvertedBatchNorm),
        **dict.fromkeys((f"TemporalEffectiveBatchNorm{dims}d" for dims in (1, 2, 3)), ConvertedTemporalBatchNorm),
        "Dropout": ConvertedDropout,
        **dict.fromkeys(_KINDS, ConvertedNeuron),
    },
)
BATCH_NORMS = (ConvertedBatchNorm, ConvertedTemporalBatchNorm)


def class_name(module: nn.Module) -> str | None:
    """Name of a layer class of torch's or SpikingJelly's; None of all others, derived ones too."""
    known = type(module).__module__.startswith(("torch.nn.modules.", "spikingjelly.activation_based."))
    return type(module).__name__ if known else None


def our_batch_norm(norm: _BatchNorm) -> Callable[..., nn.Module] | None:
    """The class of ours that a batch norm is converted to; None where it has a forward of its own."""
    conversion = CONVERSIONS.get(class_name(norm) or "")
    return conversion if conversion in BATCH_NORMS else None


def is_multi_step(module: nn.Module) -> bool:
    """Tells whether a layer is given `[T, N, ...]`."""
    return getattr(module, "step_mode", "s") == "m"


def convert(module: nn.Module, conversion: Callable[..., nn.Module], *args: Any) -> nn.Module:
    """The layer that a plain one becomes: with its hooks, with what was set on it and on its parameters."""
    ours = conversion(module, *args)
    for name, value in vars(module).items():
        is_public = not name.startswith("_") and name not in vars(ours)
        if is_public or "hook" in name:
            vars(ours)[name] = value
    ours.training = module.training
    for name, old in own_tensors(module):
        new = getattr(ours, name, None)
        if new is None or not isinstance(old, nn.Parameter):
            continue
        new.requires_grad_(old.requires_grad)
        vars(new).update(vars(old))
    return ours


def drop_tensor(module: nn.Module, name: str) -> None:
    """Takes a declared parameter away from a layer."""
    module.register_parameter(name, None)
    vars(module)["_described_shards"].pop(name)
