"""Tensors of modules that say which part of which global tensor they are: declared, tied, found, and given values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from megasnn.grid import FLAG_OF_AXIS
from megasnn.parallel.sharding import Shard
from megasnn.random import keyed_generator


@dataclass(frozen=True)
class ShardedTensor:
    """A parameter or buffer of a built model with its global name and description."""

    name: str
    tensor: Tensor
    shard: Shard
    is_parameter: bool


def declare_parameter(module: nn.Module, name: str, shard: Shard, dtype: torch.dtype) -> None:
    """Registers a parameter of the shard's local shape on the meta device; `materialise` gives it memory and values."""
    module.register_parameter(name, nn.Parameter(torch.empty(shard.local_shape, dtype=dtype, device="meta")))
    _shards(module)[name] = shard


def declare_buffer(module: nn.Module, name: str, shard: Shard, dtype: torch.dtype) -> None:
    """The same for a buffer."""
    module.register_buffer(name, torch.empty(shard.local_shape, dtype=dtype, device="meta"))
    _shards(module)[name] = shard


def describe_tensor(module: nn.Module, name: str, shard: Shard) -> None:
    """Describes a parameter or buffer that a module has already, on the meta device."""
    _shards(module)[name] = shard


def is_described(module: nn.Module, name: str | None = None) -> bool:
    """Whether tensors of the module itself are described, or the one of this name."""
    described = vars(module).get("_described_shards", {})
    return bool(described) if name is None else name in described


def _shards(module: nn.Module) -> dict[str, Shard]:
    if "_described_shards" not in module.__dict__:
        module.__dict__["_described_shards"] = {}
    return module.__dict__["_described_shards"]


def tie(module: nn.Module, name: str, owner_name: str, owner: nn.Module, name_there: str) -> None:
    """Makes a described tensor a copy of another one, which owns the value; it takes that one's name and description.

    Raises:
        ValueError: they have other shapes, or ranks hold other parts of them.
    """
    if name not in _shards(module) or name_there not in _shards(owner):
        return  # `sharded_tensors` tells what is missing
    mine, theirs = _shards(module)[name], _shards(owner)[name_there]
    if mine.pieces() != theirs.pieces():
        shapes = f"{list(mine.global_shape)} here and {list(theirs.global_shape)} there"
        raise ValueError(
            f"ranks hold other parts of the two, {shapes}: give both layers the same sizes and `style`, or set "
            f"{FLAG_OF_AXIS['tensor']} 1"
        )
    _shards(module)[name] = theirs
    vars(module).setdefault("_owner_names", {})[name] = owner_name


def owner_name(module: nn.Module, name: str, path: str) -> str:
    """Global name of the tensor that a module at this path owns, or has a copy of."""
    called: str = vars(module).get("_owner_names", {}).get(name, f"{path}.{name}")
    return called


def sharded_tensors(named_layers: Iterable[tuple[str, nn.Module]]) -> Iterator[ShardedTensor]:
    """Every parameter and persistent buffer below the given (global name, layer) pairs, in a fixed order; no copies.

    Raises:
        ValueError: a tensor has no description, which would make it invisible to initialisation and checkpoints.
    """
    return (entry for entry, is_copy in _described_tensors(named_layers) if not is_copy)


def copied_tensors(named_layers: Iterable[tuple[str, nn.Module]]) -> Iterator[ShardedTensor]:
    """The copies below these layers, each under the name of what it is a copy of; see `tie`."""
    return (entry for entry, is_copy in _described_tensors(named_layers) if is_copy)


def freeze(named_layers: Iterable[tuple[str, nn.Module]], is_frozen: Callable[[str], bool]) -> None:
    """From now on those parameters of these layers are not trained whose global names are frozen, nor their copies."""
    for entry, _ in _described_tensors(named_layers):
        if entry.is_parameter and is_frozen(entry.name):
            entry.tensor.requires_grad_(False)


def _described_tensors(named_layers: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[ShardedTensor, bool]]:
    """All tensors, and whether each is a copy."""
    for prefix, layer in named_layers:
        for path, module in layer.named_modules(prefix=prefix):
            shards = _shards(module)
            own = chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
            for name, tensor in own:
                if name in module._non_persistent_buffers_set:
                    continue
                if name not in shards:
                    raise ValueError(f"{path}.{name} has no shard description; make it with declare_parameter/_buffer")
                called = owner_name(module, name, path)
                entry = ShardedTensor(called, tensor, shards[name], name in module._parameters)
                yield entry, called != f"{path}.{name}"


def materialise(named_layers: Iterable[tuple[str, nn.Module]], device: torch.device, seed: int) -> None:
    """Gives memory and initial values to every declared tensor of these layers.

    Each value follows from (seed, global name) alone: the global tensor is drawn, this rank's part is kept, so
    the model starts from the same numbers on every layout. At most one global tensor exists at a time. What is tied has
    the same memory.

    Raises:
        ValueError: nothing initialises a tensor.
    """
    layers = list(named_layers)
    values: dict[str, Tensor] = {}
    with torch.no_grad():
        for entry, _ in _described_tensors(layers):
            if entry.name in values:
                continue
            if entry.shard.initialise is None:
                raise ValueError(f"nothing initialises {entry.name}; its Shard needs an `initialise` function")
            # Floating-point values are drawn in float32 whatever the precision: fp64 checks start from the fp32 run's.
            dtype = torch.float32 if entry.tensor.is_floating_point() else entry.tensor.dtype
            full = torch.empty(entry.shard.global_shape, dtype=dtype)
            entry.shard.initialise(full, keyed_generator(seed, "init", entry.name))
            values[entry.name] = _in_memory_order(entry.shard.cut(full).to(device, entry.tensor.dtype))
        for prefix, layer in layers:
            for path, module in layer.named_modules(prefix=prefix):
                for name in _shards(module):
                    value = values[owner_name(module, name, path)]
                    if name in module._parameters:
                        module._parameters[name] = _with_all_of(module._parameters[name], value)
                    else:
                        module._buffers[name] = value.detach()  # a tensor of its own, of the same memory


def _with_all_of(old: nn.Parameter | None, value: Tensor) -> nn.Parameter:
    """A parameter with a value, and what was set on the one before: whether it is trained, attributes, hooks."""
    new = nn.Parameter(value, requires_grad=old is None or old.requires_grad)
    if old is not None:
        vars(new).update(vars(old))
    if old is not None and old.requires_grad:
        for hook in (old._backward_hooks or {}).values():
            new.register_hook(hook)
        for hook in (getattr(old, "_post_accumulate_grad_hooks", None) or {}).values():
            new.register_post_accumulate_grad_hook(hook)
    return new


def parameter_count(tensors: Iterable[ShardedTensor]) -> int:
    """Number of elements of the global parameters described, each counted once."""
    return sum(torch.Size(entry.shard.global_shape).numel() for entry in tensors if entry.is_parameter)


def _in_memory_order(tensor: Tensor) -> Tensor:
    """Kernels of convolutions have channels last, like activations: nothing is reordered when they meet."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor
