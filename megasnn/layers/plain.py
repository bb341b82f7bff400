"""Plain modules, without sharded layers in them: which they are, and which cannot be computed alike on every layout.

A module says what it mixes by attributes of its class: `mixes_samples = True` where a sample's output depends on other
samples, `mixes_rows = False` where a row of the output depends on the same row of the input alone. MegaSNN's layers
exchange what they need.
"""

from __future__ import annotations

import operator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase
from torch.nn.modules.dropout import _DropoutNd

from megasnn.layers.context import BuildContext
from megasnn.layers.conv import ParallelConv
from megasnn.layers.converted import our_batch_norm
from megasnn.layers.dropout import KeyedLayer
from megasnn.layers.init import own_tensors, where_values_are
from megasnn.layers.linear import ParallelLinear
from megasnn.layers.neuron import NeuronLayer
from megasnn.layers.norm import ParallelBatchNorm
from megasnn.parallel.sharding import is_described

SHARDED = (ParallelConv, ParallelLinear, ParallelBatchNorm, NeuronLayer, KeyedLayer)


_ACTIVATIONS = (
    *(nn.Identity, nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Hardtanh, nn.LeakyReLU, nn.ELU, nn.Softplus),
)


SEQUENCES = (
    *(nn.MultiheadAttention, nn.Transformer, nn.TransformerEncoder, nn.TransformerEncoderLayer),
    *(nn.TransformerDecoder, nn.TransformerDecoderLayer, nn.RNNBase, nn.RNNCellBase),
)


STEPPING = ("MultiStepContainer", "LinearRecurrentContainer", "ElementWiseRecurrentContainer")
"""Containers of SpikingJelly that call what is in them at every time step, in step mode "s"."""


def is_plain(module: nn.Module) -> bool:
    """Tells whether there is no sharded layer in a module."""
    return not any(isinstance(each, SHARDED) or is_described(each) for each in module.modules())


def fold_time(module: nn.Module) -> bool:
    """Tells whether a plain layer is given all time steps as one batch `[T * N, C, ...]`: it consists of torch's
    modules, and none of them works along the first dimension, as attention and recurrent layers do."""
    return all(
        type(each).__module__.startswith("torch.nn.")
        and not isinstance(each, SEQUENCES)
        and getattr(each, "dim", None) != 0
        and getattr(each, "start_dim", None) != 0
        for each in module.modules()
    )


def is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def is_stateful(module: nn.Module) -> bool:
    return callable(getattr(module, "reset", None)) and not isinstance(module, NeuronLayer)


def forget_state(layer: nn.Module) -> None:
    """Resets modules that keep a state, as SpikingJelly's neurons do."""
    for module in layer.modules():
        if is_stateful(module):
            module.reset()  # type: ignore[operator]


# --- refusals


def refuse_what_differs(module: nn.Module) -> None:
    """Raises ValueError for what cannot be computed alike on every layout."""
    if any(map(is_compiled, module.modules())):
        raise ValueError(f"{type(module).__name__} is compiled: give the module itself")
    if where := where_values_are(module):
        raise ValueError(where)
    inside = stepped_inside(module)
    for path, each in module.named_modules():
        what = f"{path or type(each).__name__} ({type(each).__name__})"
        refuse_alone(what, each)
        if isinstance(each, _BatchNorm) and each in inside:
            raise ValueError(f"{what} has the statistics of one time step: take it out of its container")
        if getattr(each, "step_mode", "m") != "m" and each not in inside:
            raise ValueError(f"{what} is in step mode 's': layers take all time steps at once, so give step_mode='m'")


def stepped_inside(module: nn.Module) -> set[nn.Module]:
    """Modules in containers of SpikingJelly's that call them at every time step."""
    containers = [each for each in module.modules() if type(each).__name__ in STEPPING]
    return {part for each in containers for part in each.modules() if part is not each}


def refuse_alone(what: str, module: nn.Module, may_draw: bool = False) -> None:
    """Raises ValueError for what is wrong with one module, without those in it."""
    if not may_draw and _draws(module):
        raise ValueError(f"{what} draws random numbers that depend on the layout: use megasnn.ParallelDropout(p, name)")
    if isinstance(module, _BatchNorm) and our_batch_norm(module) is None:
        raise ValueError(f"{what} is a batch norm with a forward of its own, which ours would not have")
    if isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats:
        raise ValueError(f"{what} keeps statistics of its own replica: give it track_running_stats=False")
    if isinstance(module, (_LazyNormBase, nn.modules.lazy.LazyModuleMixin)):
        raise ValueError(f"{what} does not say its sizes: use the module that is not lazy")
    unsaved = module._non_persistent_buffers_set
    if unsaved:
        raise ValueError(f"{what} has a buffer {min(unsaved)!r} that is not saved; register it as persistent")


def refuse_attached(module: nn.Module) -> None:
    """Raises ValueError for modules that cannot keep their state without its history."""
    for path, each in module.named_modules():
        if is_stateful(each) and not callable(getattr(each, "detach", None)):
            raise ValueError(
                f"{path or type(each).__name__} ({type(each).__name__}) has a `reset` but no `detach`, which "
                "--bptt-steps calls between the windows of a sample: give it one, as SpikingJelly's modules have"
            )


def refuse_plain_parts(module: nn.Module) -> None:
    """Raises ValueError, for a layer with sharded layers in it, for plain modules that work by themselves only, and for
    tensors that do not say how ranks share them."""
    for path, each in module.named_modules():
        kind = type(each).__name__
        what = f"{path} ({kind})" if path else kind
        refuse_alone(what, each)
        if isinstance(each, _BatchNorm):
            raise ValueError(f"{what} inside a layer of MegaSNN's layers: use megasnn.ParallelBatchNorm")
        if hasattr(each, "step_mode") and callable(getattr(each, "reset", None)):
            raise ValueError(
                f"{what} inside a layer of MegaSNN's layers keeps its state from one micro-batch to the next: use "
                "megasnn.ParallelNeuron, or make it a layer of its own"
            )
        for name, _ in own_tensors(each):
            if not is_described(each, name):
                place = f"{path}.{name}" if path else name
                raise ValueError(
                    f"{place} of {kind} does not say how ranks share it: move it, with what is computed from it, to a "
                    f"layer of its own; neurons of one's own declare it with self.per_channel({name!r}, initial value)"
                )


def _draws(module: nn.Module) -> bool:
    """Tells whether a plain module draws random numbers."""
    if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
        return bool(module.dropout)
    named = type(module).__name__ in ("Dropout", "Dropout2d", "DropConnectLinear")
    if isinstance(module, _DropoutNd) or named:
        return bool(module.p)
    return isinstance(module, (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d))


# --- layers that ranks share a micro-batch of


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


ELEMENTWISE = {torch.add, torch.mul, torch.sub, torch.maximum, torch.minimum, operator.add, operator.mul, operator.sub}


def refuse_unshareable(module: nn.Module, context: BuildContext) -> None:
    """Raises ValueError for a layer, or a module in it, that mixes what ranks share out, or does not say that it does
    not."""
    if context.cp.size == 1:
        return
    is_torchs = all(type(each).__module__.startswith("torch.nn.") for each in module.modules())
    for path, each in module.named_modules():
        what = f"{path} ({type(each).__name__})" if path else type(each).__name__
        asked = f"--context-parallel-size {context.cp.size}"
        # A layer of torch's is given [T, N, C], and would take the time for the batch.
        takes_time_for_batch = is_torchs and getattr(each, "batch_first", False) is True
        if context.cut == "samples" and (getattr(each, "mixes_samples", False) or takes_time_for_batch):
            reason = "batch_first=True" if takes_time_for_batch else "mixes_samples"
            raise ValueError(f"{what} mixes samples ({reason}): it cannot be computed with {asked} by samples")
        if context.cut == "rows" and mixes_rows(each):
            raise ValueError(
                f"{what} mixes rows of images, or does not say that it computes each by itself (mixes_rows = False in "
                f"its class): it cannot be computed with {asked} by rows; use --context-parallel-cut samples"
            )


def mixes_rows(module: nn.Module) -> bool:
    """Tells whether a module, without those in it, needs rows that other ranks may have and does not get them
    itself."""
    said = getattr(module, "mixes_rows", None)
    if said is not None:
        return bool(said)
    # Neurons of one's own have surrogate functions of SpikingJelly's in them.
    ours = type(module).__module__.startswith(("megasnn.", "spikingjelly.activation_based.surrogate"))
    return not (ours or type(module) in (*_CONTAINERS, *_ACTIVATIONS) or isinstance(module, NeuronLayer))
