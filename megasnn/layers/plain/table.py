"""Layer classes of torch and SpikingJelly as layers of ours, cut by channel: the table of conversions.

A layer keeps the names of its tensors, its initial values, its hooks and what was set on it. One in SpikingJelly's step
mode "m" is still given `[T, N, C, ...]`, any other `[N, C, ...]`, in which N may be T * N.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from megasnn.common.registry import Registry
from megasnn.kernels import SURROGATES, NeuronSpec
from megasnn.layers.context import BuildContext
from megasnn.layers.conv import ParallelConv
from megasnn.layers.dropout import ParallelDropout, drawn_frames
from megasnn.layers.init import ModuleInitialiser, own_tensors
from megasnn.layers.linear import ParallelLinear
from megasnn.layers.neuron import ParallelNeuron
from megasnn.layers.norm import ParallelBatchNorm
from megasnn.layers.plain.initial_values import initializer_from_module
from megasnn.parallel.sharding import declare, shards_of


def _values(module: nn.Module, initialise: ModuleInitialiser | None) -> dict[str, Any]:
    names = {"initialise": "weight", "initialise_bias": "bias"}
    return {option: initializer_from_module(module, initialise, name) for option, name in names.items()}


def _without_time(ours: nn.Module, x: Tensor, *args: Any) -> Tensor:
    """Forward of a layer of ours on `[N, C, ...]`. A linear one takes any other dimensions as well."""
    forward: Any = type(ours).forward
    if isinstance(ours, ParallelLinear) and x.ndim > 2:
        return forward(ours, x)
    return forward(ours, x.unsqueeze(0), *args).squeeze(0)


def convolution(conv: nn.Conv1d | nn.Conv2d, context: BuildContext, initialise: ModuleInitialiser | None) -> nn.Module:
    """Stands for a Conv1d or Conv2d."""
    return ParallelConv(
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


def linear(module: nn.Linear, context: BuildContext, initialise: ModuleInitialiser | None) -> nn.Module:
    """Stands for a Linear. Its output is cut, or, where it does not divide by the ranks, whole on each of them."""
    return ParallelLinear(
        module.in_features,
        module.out_features,
        context,
        style="row" if module.out_features % context.tp.size else "column",
        bias=module.bias is not None,
        **_values(module, initialise),
    )


def sharded_batch_norm(norm: _BatchNorm, context: BuildContext, initialise: ModuleInitialiser | None) -> nn.Module:
    """Stands for a batch norm. One in evaluation mode uses and keeps its running statistics in training too."""
    ours = ParallelBatchNorm(
        norm.num_features,
        context,
        eps=norm.eps,
        momentum=norm.momentum,
        affine=norm.affine,
        track_running_stats=norm.track_running_stats,
        **_values(norm, initialise),
    )
    ours.time_steps = 1  # the input has all time steps
    if norm.affine and norm.bias is None:  # in SpikingJelly's BatchNormThroughTime
        ours.register_parameter("bias", None)
        shards_of(ours).pop("bias")
    if not norm.training:
        vars(ours)["train"] = lambda mode=True: ours
    return ours


class ConvertedDropout(ParallelDropout):
    """Stands for a Dropout; drawn by sample."""

    def __init__(self, dropout: Any, context: BuildContext, initialise: ModuleInitialiser | None) -> None:
        of_spikingjelly = not isinstance(dropout, nn.Dropout)
        super().__init__(dropout.p, "", context, same_at_all_steps=of_spikingjelly)

    def forward(self, x: Tensor) -> Tensor:
        frames = drawn_frames()
        return super().forward(x) if x.shape[:2] == frames else super().forward(x.unflatten(0, frames)).flatten(0, 1)


class ConvertedNeuron(ParallelNeuron):
    """Stands for SpikingJelly's IFNode, LIFNode and ParametricLIFNode in step mode "m"."""

    once_because = "SpikingJelly's would go on with the potentials of the first call: give each call a neuron"

    def __init__(self, node: Any, context: BuildContext, initialise: ModuleInitialiser | None) -> None:
        super().__init__(spec_of(node), context)
        if self.w is not None:
            shard = context.shard((), partial_gradient=True, initialise=initializer_from_module(node, initialise, "w"))
            declare(self, "w", shard, context.dtype)


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
        **dict.fromkeys(("Conv1d", "Conv2d"), convolution),
        "Linear": linear,
        **dict.fromkeys(("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm"), sharded_batch_norm),
        **dict.fromkeys((f"ThresholdDependentBatchNorm{dims}d" for dims in (1, 2, 3)), sharded_batch_norm),
        "Dropout": ConvertedDropout,
        **dict.fromkeys(_KINDS, ConvertedNeuron),
    },
)


def class_name(module: nn.Module) -> str | None:
    """Name of a layer class of torch's or SpikingJelly's; None of all others, derived ones too."""
    known = type(module).__module__.startswith(("torch.nn.modules.", "spikingjelly.activation_based."))
    return type(module).__name__ if known else None


def in_table(module: nn.Module) -> Conversion | None:
    return CONVERSIONS.get(class_name(module) or "")


def is_multi_step(module: nn.Module) -> bool:
    """Tells whether a layer is given `[T, N, ...]`."""
    return getattr(module, "step_mode", "s") == "m"


def convert(module: nn.Module, conversion: Callable[..., nn.Module], *args: Any) -> nn.Module:
    """The layer that a plain one becomes, called as it was, with its hooks and what was set on it."""
    ours = conversion(module, *args)
    if isinstance(ours, (ParallelConv, ParallelLinear, ParallelBatchNorm)) and not is_multi_step(module):
        vars(ours)["forward"] = partial(_without_time, ours)
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
