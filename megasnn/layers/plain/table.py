"""Conversions: torch's and SpikingJelly's layer classes as MegaSNN's layers, cut by channel.

Tensor names, initial values, hooks, attributes and dimensions stay: `[T, N, C, ...]` in SpikingJelly's step mode "m",
otherwise `[N, C, ...]`, in which N may be T * N.
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
from megasnn.layers.facts import facts
from megasnn.layers.init import ModuleInitialiser, own_tensors
from megasnn.layers.linear import ParallelLinear
from megasnn.layers.neuron import ParallelNeuron
from megasnn.layers.norm import ParallelBatchNorm
from megasnn.layers.plain.initial_values import initializer_from_module
from megasnn.layers.tensors import declare

_KINDS = {"IFNode": "if", "LIFNode": "lif", "ParametricLIFNode": "plif"}


def convolution(conv: nn.Conv1d | nn.Conv2d, context: BuildContext, initialise: ModuleInitialiser | None) -> nn.Module:
    padding: int | str | tuple[int, ...] = conv.padding
    if padding == "valid":
        padding = 0
    return ParallelConv(
        conv.in_channels,
        conv.out_channels,
        conv.kernel_size,
        context,
        dims=len(conv.kernel_size),
        stride=conv.stride,
        padding=padding,
        padding_mode=conv.padding_mode,
        dilation=conv.dilation,
        groups=conv.groups,
        bias=conv.bias is not None,
        **_initialisers(conv, initialise),
    )


def linear(module: nn.Linear, context: BuildContext, initialise: ModuleInitialiser | None) -> nn.Module:
    """Converts a Linear. Its output is cut, or whole on every rank if the ranks do not divide it."""
    is_divisible = module.out_features % context.tp.size == 0
    style = "column" if is_divisible else "row"
    return ParallelLinear(
        module.in_features,
        module.out_features,
        context,
        style=style,
        bias=module.bias is not None,
        **_initialisers(module, initialise),
    )


def sharded_batch_norm(norm: _BatchNorm, context: BuildContext, initialise: ModuleInitialiser | None) -> nn.Module:
    """Converts a batch norm. In evaluation mode it stays there, also in training."""
    ours = ParallelBatchNorm(
        norm.num_features,
        context,
        eps=norm.eps,
        momentum=norm.momentum,
        affine=norm.affine,
        track_running_stats=norm.track_running_stats,
        **_initialisers(norm, initialise),
    )
    # The input has all time steps.
    ours.time_steps = 1
    # SpikingJelly's BatchNormThroughTime.
    if norm.affine and norm.bias is None:
        ours.register_parameter("bias", None)
        facts(ours).shards.pop("bias")
    if not norm.training:
        vars(ours)["train"] = lambda mode=True: ours
    return ours


def _initialisers(module: nn.Module, initialise: ModuleInitialiser | None) -> dict[str, Any]:
    return {
        "initialise": initializer_from_module(module, initialise, "weight"),
        "initialise_bias": initializer_from_module(module, initialise, "bias"),
    }


class ConvertedDropout(ParallelDropout):
    """Dropout of torch or SpikingJelly, drawn by sample."""

    def __init__(self, dropout: Any, context: BuildContext, initialise: ModuleInitialiser | None) -> None:
        is_spikingjelly = not isinstance(dropout, nn.Dropout)
        super().__init__(dropout.p, "", context, same_at_all_steps=is_spikingjelly)

    def forward(self, x: Tensor) -> Tensor:
        frames = drawn_frames()
        if x.shape[:2] == frames:
            return super().forward(x)
        return super().forward(x.unflatten(0, frames)).flatten(0, 1)


class ConvertedNeuron(ParallelNeuron):
    """SpikingJelly's IFNode, LIFNode or ParametricLIFNode in step mode "m"."""

    once_because = "SpikingJelly's would go on with the potentials of the first call: give each call a neuron"

    def __init__(self, node: Any, context: BuildContext, initialise: ModuleInitialiser | None) -> None:
        super().__init__(spec_of(node), context)
        if self.w is not None:
            shard = context.shard((), partial_gradient=True, initialise=initializer_from_module(node, initialise, "w"))
            declare(self, "w", shard, context.dtype)


def spec_of(node: Any) -> NeuronSpec | None:
    """Description of a SpikingJelly neuron; None if MegaSNN has no such neuron."""
    kind = type(node)
    if not kind.__module__.startswith("spikingjelly.") or kind.__name__ not in _KINDS:
        return None
    surrogate = node.surrogate_function
    names = {entry.spikingjelly: name for name, entry in SURROGATES.items() if entry.spikingjelly}
    name = names.get(type(surrogate).__name__)
    parameters = dict(getattr(surrogate, "_sg_params", {}))
    alpha = parameters.pop("alpha", None)
    beta = parameters.pop("beta", 1.0)
    if name is None or not surrogate.spiking or parameters or beta != 1.0:
        return None
    if node.store_v_seq or node._neuron_precision is not None:
        return None
    sharpness = None if alpha is None else float(alpha)
    return NeuronSpec(
        kind=_KINDS[kind.__name__],
        tau=getattr(node, "tau", 2.0),
        v_threshold=node.v_threshold,
        v_reset=node.v_reset,
        decay_input=getattr(node, "decay_input", True),
        detach_reset=node.detach_reset,
        surrogate=name,
        alpha=sharpness,
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
    """torch's or SpikingJelly's layer class; None for all others, derived classes included."""
    known = type(module).__module__.startswith(("torch.nn.modules.", "spikingjelly.activation_based."))
    return type(module).__name__ if known else None


def in_table(module: nn.Module) -> Conversion | None:
    return CONVERSIONS.get(class_name(module) or "")


def is_multi_step(module: nn.Module) -> bool:
    return getattr(module, "step_mode", "s") == "m"


def convert(module: nn.Module, conversion: Callable[..., nn.Module], *args: Any) -> nn.Module:
    """Converts a plain layer, with its dimensions, hooks and attributes."""
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


def _without_time(ours: nn.Module, x: Tensor, *args: Any) -> Tensor:
    """Forward on `[N, C, ...]`; a linear layer's on any dimensions."""
    forward: Any = type(ours).forward
    if isinstance(ours, ParallelLinear) and x.ndim > 2:
        return forward(ours, x)
    return forward(ours, x.unsqueeze(0), *args).squeeze(0)
