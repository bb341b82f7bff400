"""Layer tensors: declared with shards, tied, listed by global name, initialised."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from megasnn.common.grid import FLAG_OF_AXIS
from megasnn.common.random import keyed_generator
from megasnn.layers.facts import facts
from megasnn.layers.init import ModuleInitialiser
from megasnn.parallel.sharding import Initialiser, Shard, ShardedTensor


def declare(module: nn.Module, name: str, shard: Shard, dtype: torch.dtype, is_parameter: bool = True) -> None:
    """Registers a tensor with the shard's local shape on the meta device, until `materialise`."""
    tensor = torch.empty(shard.local_shape, dtype=dtype, device="meta")
    if is_parameter:
        module.register_parameter(name, nn.Parameter(tensor))
    else:
        module.register_buffer(name, tensor)
    facts(module).shards[name] = shard


def initialise_further(layer: nn.Module, path: str, initialise: ModuleInitialiser) -> None:
    """Calls a user's function after the initialisers of a layer's tensors.

    The function receives a module's copy with global tensors and without submodules.

    Args:
        path: the layer's global name.
    """
    for inner, module in layer.named_modules(prefix=path):
        shards = facts(module).shards
        for name, shard in shards.items():
            assert shard.initialise is not None, f"{inner}.{name}"
            further = partial(_further_values, module, inner, name, initialise, shard.initialise)
            shards[name] = replace(shard, initialise=further)


def _further_values(
    module: nn.Module,
    path: str,
    name: str,
    initialise: ModuleInitialiser,
    first: Initialiser,
    full: Tensor,
    generator: torch.Generator,
) -> None:
    first(full, generator)
    # Shapes of a rank's own part would give other values on every layout.
    copied = copy.copy(module)
    tensors: dict[str, Tensor] = {}
    for each, shard in facts(module).shards.items():
        tensors[each] = full if each == name else torch.empty(shard.global_shape, dtype=full.dtype, device="meta")
    copied._parameters = {each: nn.Parameter(tensors[each], False) for each in module._parameters if each in tensors}
    copied._buffers = {each: tensors[each] for each in module._buffers if each in tensors}
    copied._modules = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator.initial_seed())
        initialise(copied, path)
    full.copy_(getattr(copied, name))


def tie(module: nn.Module, name: str, owner_name: str, owner: nn.Module, name_there: str) -> None:
    """Makes a described tensor a copy, with the owner's global name and shard.

    Raises ValueError for other shapes, or if ranks hold other parts.
    """
    if name not in facts(module).shards or name_there not in facts(owner).shards:
        return  # `sharded_tensors` tells what is missing
    mine = facts(module).shards[name]
    theirs = facts(owner).shards[name_there]
    if mine.pieces() != theirs.pieces():
        shapes = f"{list(mine.global_shape)} here and {list(theirs.global_shape)} there"
        raise ValueError(
            f"ranks hold other parts of the two, {shapes}: give both layers the same sizes and `style`, or set "
            f"{FLAG_OF_AXIS['tp']} 1"
        )
    facts(module).shards[name] = theirs
    facts(module).owner_names[name] = owner_name


def owner_name(module: nn.Module, name: str, path: str) -> str:
    """Global name of a module's tensor: its owner's if it is tied."""
    return facts(module).owner_names.get(name, f"{path}.{name}")


def sharded_tensors(named_layers: Iterable[tuple[str, nn.Module]]) -> Iterator[ShardedTensor]:
    """Parameters and persistent buffers of (global name, layer) pairs, in a fixed order, without copies.

    Raises ValueError for a tensor without a shard.
    """
    return (entry for entry in described_tensors(named_layers) if not entry.is_copy)


def described_tensors(named_layers: Iterable[tuple[str, nn.Module]]) -> Iterator[ShardedTensor]:
    """As `sharded_tensors`, with copies."""
    for prefix, layer in named_layers:
        for path, module in layer.named_modules(prefix=prefix):
            shards = facts(module).shards
            own = chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
            for name, tensor in own:
                if name in module._non_persistent_buffers_set:
                    continue
                # Initialisation and checkpoints would miss it.
                if name not in shards:
                    raise ValueError(f"{path}.{name} has no shard description; make it with `declare`")
                called = owner_name(module, name, path)
                yield ShardedTensor(
                    name=called,
                    tensor=tensor,
                    shard=shards[name],
                    is_parameter=name in module._parameters,
                    is_copy=called != f"{path}.{name}",
                )


def materialise(named_layers: Iterable[tuple[str, nn.Module]], device: torch.device, seed: int) -> None:
    """Gives every declared tensor memory and initial values. Tied tensors share memory.

    Each value follows from (seed, global name) alone, on every layout. At most one global tensor exists at a time.
    Raises ValueError, with the name, if an initialiser raises.
    """
    layers = list(named_layers)
    values: dict[str, Tensor] = {}
    with torch.no_grad():
        for entry in described_tensors(layers):
            if entry.name in values:
                continue
            assert entry.shard.initialise is not None, entry.name
            # Floating-point values are drawn in float32 whatever the precision: fp64 checks start from the fp32 run's.
            dtype = torch.float32 if entry.tensor.is_floating_point() else entry.tensor.dtype
            full = torch.empty(entry.shard.global_shape, dtype=dtype)
            try:
                entry.shard.initialise(full, keyed_generator(seed, "init", entry.name))
            except Exception as error:
                # A function of the user's may raise anything.
                kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
                raise ValueError(f"initial values of {entry.name}: {kind}{error}") from error
            value = entry.shard.cut(full).to(device, entry.tensor.dtype)
            # Kernels of convolutions have channels last, like activations: nothing is reordered when they meet.
            is_kernel = value.ndim == 4
            values[entry.name] = value.contiguous(memory_format=torch.channels_last) if is_kernel else value
        for prefix, layer in layers:
            for path, module in layer.named_modules(prefix=prefix):
                for name in facts(module).shards:
                    value = values[owner_name(module, name, path)]
                    if name in module._parameters:
                        module._parameters[name] = _with_all_of(module.get_parameter(name), value)
                    else:
                        # A distinct tensor with the same memory.
                        module._buffers[name] = value.detach()


def _with_all_of(old: nn.Parameter, value: Tensor) -> nn.Parameter:
    new = nn.Parameter(value, requires_grad=old.requires_grad)
    vars(new).update(vars(old))
    if not old.requires_grad:  # torch takes no hooks
        return new
    for hook in (old._backward_hooks or {}).values():
        new.register_hook(hook)
    for hook in (getattr(old, "_post_accumulate_grad_hooks", None) or {}).values():
        new.register_post_accumulate_grad_hook(hook)
    return new
