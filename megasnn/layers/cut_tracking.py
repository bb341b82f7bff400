"""Follows the dimension that tensor-parallel ranks cut through a layer's forward, on the meta device.

Every tensor of a rank is either *replicated* (the same as on one rank) or *cut*: its slice of one dimension of the
tensor that one rank has. A forward that is not ours runs twice without values: with all channels, which is recorded,
and with a rank's. Both must call the same functions of torch with the same numbers, and a rule for each function
says in which dimension its output is cut. A function without a rule, or one that mixes what is cut, is refused.
MegaSNN's own layers exchange what they need, and are not looked into.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple, NoReturn

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megasnn.layers.conv import ParallelConv
from megasnn.layers.converted import ConvertedDropout
from megasnn.layers.linear import MeanLinear, ParallelLinear
from megasnn.layers.neuron import NeuronLayer
from megasnn.layers.shape_inference import UNMARKED, Cut, MixedChannels, cut_of, is_ours, is_tracked, mark_cut

Shape = tuple[int, ...]
_LOST = Cut(-1)
"""Of secondary outputs that no rule follows: whoever uses one is refused."""


class Event(NamedTuple):
    """A function of torch that was called.

    Attributes:
        constants: arguments that are neither tensors nor sizes. shapes: of the outputs.
    """

    name: str
    constants: tuple[object, ...]
    shapes: tuple[Shape, ...]


class CutTracker(TorchDispatchMode):
    """Sees functions of torch in a layer's forward: records them, or follows the cut dimension through them.

    Args:
        recorded: what the layer does on one rank; None to record it.
        size: number of tensor parallel ranks.
        opaque: paths of modules that are not looked into, besides those of `is_opaque`.
    Attributes:
        events: what was recorded.
    Raises:
        MixedChannels: what is cut is mixed, or nothing says that it is not.
    """

    def __init__(
        self,
        layer: nn.Module,
        recorded: Sequence[Event] | None = None,
        size: int = 1,
        opaque: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._expected = None if recorded is None else iter(recorded)
        self._size, self._described, self._depth = size, dict(_described_cuts(layer)), 0
        self._opaque = [each for path, each in layer.named_modules() if path in opaque or is_opaque(each)]

    def __enter__(self) -> Any:
        self._hooks = [each.register_forward_pre_hook(self._enter) for each in self._opaque]
        self._hooks += [each.register_forward_hook(self._exit) for each in self._opaque]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        if not self._depth and is_tracked():
            call = _Call(function, args, kwargs or {}, output)
            if self._expected is not None:
                self._follow(call)
            elif not call.is_identity:
                self.events.append(Event(call.name, call.constants, call.shapes))
        return output

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._depth += 1
        tensors = _tensors(inputs)
        if self._depth > 1 or self._expected is None or not tensors or "_is_replicated" in vars(module):
            return
        cut, channels = self._state(tensors[0]), _channels_of(module, tensors[0])
        is_norm = "_described_shards" in vars(module) and not isinstance(module, (ParallelConv, ParallelLinear))
        blocks = _blocks_of(module) if is_norm else 1  # of a norm behind fused q, k and v
        if takes_any_cut(module):
            if cut is None and any(True for _ in module.parameters()):
                _refuse("a learned time constant behind an output that all ranks have whole")
            if cut is not None and cut.dim == 0:
                _refuse("neurons that are given the time cut")
        elif cut is not None and cut != Cut(channels, blocks):
            _refuse(f"{type(module).__name__} takes channels in dimension {channels}")

    def _exit(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        self._depth -= 1
        if self._depth or self._expected is None:
            return
        of_input = next((self._state(x) for x in _tensors(inputs)), None)
        follows = takes_any_cut(module) or not any(True for _ in _described_cuts(module))
        for y in _tensors(output):
            if cut_of(y) is UNMARKED or takes_any_cut(module):
                mark_cut(y, of_input if follows else Cut(_channels_of(module, y), _blocks_of(module)))

    def _state(self, tensor: Tensor) -> Cut | None:
        found = cut_of(tensor)
        if found is UNMARKED:
            return self._described.get(id(tensor))
        if found is _LOST:
            _refuse("uses an output that cannot be followed")
        return found

    def _follow(self, call: _Call) -> None:
        """Marks the outputs of a function by those of its inputs."""
        assert self._expected is not None
        states = [self._state(x) for x in call.tensors]
        if call.is_identity:
            for output in call.outputs:
                mark_cut(output, states[0])
            return
        event = next(self._expected, None)
        if event is None or (event.name, event.constants) != (call.name, call.constants):
            _refuse(f"{call.name} of {call.constants} is not what comes here on one rank, {event}")
        cut = None
        if any(states) or event.shapes != call.shapes:
            try:
                cut = _rule(call, states, event.shapes, self._size)
            except _Mixes as error:
                _refuse(f"{call.name} {error}", call)
            # A rank would see its channels' share of that gradient alone.
            if any(x.requires_grad for x, state in zip(call.tensors, states, strict=True) if state is None):
                _refuse(f"{call.name} takes a tensor that all ranks have whole and that needs a gradient", call)
        for index, (output, shape) in enumerate(zip(call.outputs, event.shapes, strict=True)):
            fits = _local_shape(shape, cut, self._size) == tuple(output.shape)
            if not fits and index == 0:
                _refuse(f"{call.name} gives {list(output.shape)} of {list(shape)}", call)
            mark_cut(output, cut if fits else _LOST)
        if call.is_in_place and call.tensors and self._state(call.tensors[0]) != cut:
            _refuse(f"{call.name} changes a tensor in place that is cut otherwise", call)


def _refuse(why: str, call: _Call | None = None) -> NoReturn:
    given = "" if call is None else f", given {' and '.join(str(list(x.shape)) for x in call.tensors)}"
    raise MixedChannels(
        f"{why}{given}: with --tensor-model-parallel-size above 1 a rank has its own channels only, and this is not "
        "known to be right for them; set it to 1, or put what mixes channels into a plain module that is a layer by "
        "itself"
    )


# --- modules


def is_opaque(module: nn.Module) -> bool:
    """Tells whether a module is MegaSNN's with all in it, or replicated where it is: then it is not looked into."""
    if "_is_replicated" in vars(module):
        return True
    return type(module).forward.__module__.startswith("megasnn.") and all(is_ours(each) for each in module.modules())


def takes_any_cut(module: nn.Module) -> bool:
    """Tells whether a module of ours treats every element behind the time by itself, wherever it is cut."""
    return isinstance(module, (NeuronLayer, ConvertedDropout))


def _channels_of(module: nn.Module, x: Tensor) -> int:
    """The dimension in which a layer of ours takes and gives channels."""
    if isinstance(module, ParallelLinear) and not isinstance(module, MeanLinear):
        return x.ndim - 1
    return 2 if getattr(module, "multi_step", True) else 1


def _blocks_of(module: nn.Module) -> int:
    """Number of blocks that the output channels of a layer of ours consist of, which its last part says."""
    cuts = [cut for _, cut in _described_cuts(module) if cut.dim == 0]
    return cuts[-1].blocks if cuts else 1


def _described_cuts(layer: nn.Module) -> Iterator[tuple[int, Cut]]:
    for module in layer.modules():
        for name, shard in vars(module).get("_described_shards", {}).items():
            for axis, cut in shard.cuts:
                if axis == "tp":
                    yield id(getattr(module, name)), Cut(cut.dim, cut.blocks)


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def _local_shape(shape: Shape, cut: Cut | None, size: int) -> Shape | None:
    """The shape of a rank's part; None where it cannot be cut so."""
    if cut is None:
        return shape
    if not 0 <= cut.dim < len(shape) or shape[cut.dim] % (size * cut.blocks):
        return None
    return (*shape[: cut.dim], shape[cut.dim] // size, *shape[cut.dim + 1 :])


# --- functions of torch: all that are known to be right

_SIZES = ("size", "split_size", "memory_format", "device", "layout", "pin_memory", "implicit", "generator")
_IDENTITY = {"clone", "detach", "alias", "lift_fresh", "_to_copy", "contiguous", "to"}
_VIEWS = {"view", "_unsafe_view", "_reshape_alias", "reshape", "unflatten", "flatten"}
_POINTWISE = {"masked_fill", "fill", "copy", "zero", "zeros_like", "ones_like", "empty_like", "full_like"}
_CREATE = {"zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty", "expand"}
_REDUCTIONS = {"logsumexp", "max", "min"}
_ALONG = {"_softmax", "_safe_softmax", "_log_softmax", "cumsum", "flip", "roll", "split", "split_with_sizes", "slice"}
_MATMUL = {"mm": "ij,jk->ik", "bmm": "bij,bjk->bik"}
_SPATIAL = ("avg_pool", "max_pool", "adaptive_avg_pool", "_adaptive_avg_pool", "adaptive_max_pool", "upsample_")


class _Mixes(Exception):
    """Why a function mixes what is cut."""


class _Call:
    """A function of torch with its arguments and outputs."""

    def __init__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        schema = function._schema
        self.tags = {tag.name for tag in function.tags}
        self.arguments: dict[str, Any] = {each.name: each.default_value for each in schema.arguments}
        self.arguments |= dict(zip(self.arguments, args, strict=False)) | kwargs
        name = function.overloadpacket.__name__.rstrip("_")
        self.name = "view" if name in _VIEWS else name
        self.is_in_place = schema.is_mutable
        self.tensors, self.outputs = _tensors((args, kwargs)), _tensors(output)
        self.shapes = tuple(tuple(x.shape) for x in self.outputs)

    @property
    def is_identity(self) -> bool:
        if not self.tensors or self.is_in_place:
            return False
        unchanged = self.name in ("slice", "view", "expand") and self.shapes == (tuple(self.tensors[0].shape),)
        return self.name in _IDENTITY or unchanged

    @property
    def constants(self) -> tuple[object, ...]:
        """Arguments that are to be the same on every number of ranks."""
        if self.name == "_to_copy":
            return ()
        kept = (value for name, value in self.arguments.items() if name not in _SIZES and not _tensors(value))
        return tuple(tuple(value) if isinstance(value, list) else value for value in kept)

    def dims(self, ndim: int) -> set[int]:
        """The dimensions that the function works along; all where it names none."""
        given = self.arguments.get("dim", self.arguments.get("dims"))
        listed = given if isinstance(given, (list, tuple)) else [] if given is None else [given]
        return {dim % ndim for dim in listed} or set(range(ndim))


def _rule(call: _Call, states: Sequence[Cut | None], shapes: Sequence[Shape], size: int) -> Cut | None:
    """Cut of the outputs of a function. Raises _Mixes."""
    name, first = call.name, states[0] if states else None
    if name == "view" and first is not None:
        return _viewed(call, first, shapes[0], size)
    if name == "expand" and first is not None:
        return first._replace(dim=first.dim + len(shapes[0]) - call.tensors[0].ndim)
    if name in _CREATE:
        return _created(call, shapes[0])
    if "pointwise" in call.tags or name in _POINTWISE:
        return _pointwise(call, states)
    if name in ("cat", "stack"):
        return _joined(call, states)
    if name in _MATMUL:
        return _multiplied(_MATMUL[name], call, states)
    if first is None or any(states[1:]):
        raise _Mixes("is not known to be right")
    along = call.dims(call.tensors[0].ndim)
    for names, rule in _OF_ONE.items():
        if name in names:
            return rule(call, first, along)
    if "reduction" in call.tags or name in _REDUCTIONS:
        return _without(call, first, along, "joins")
    if name.startswith(_SPATIAL) and first.dim < call.tensors[0].ndim - int(next(filter(str.isdecimal, name))):
        return first
    raise _Mixes("is not known to be right")


def _without(call: _Call, cut: Cut, along: set[int], does: str) -> Cut:
    """Rule of a function that takes dimensions away."""
    if cut.dim in along:
        raise _Mixes(f"{does} dimension {cut.dim}, which is cut")
    return cut if call.arguments.get("keepdim") else cut._replace(dim=cut.dim - sum(dim < cut.dim for dim in along))


def _along(call: _Call, cut: Cut, along: set[int]) -> Cut:
    if cut.dim not in along:
        return cut
    if call.name == "split" and cut.blocks == len(call.outputs):
        return Cut(cut.dim)
    raise _Mixes(f"along dimension {cut.dim} mixes what is cut")


def _transposed(call: _Call, cut: Cut, along: set[int]) -> Cut:
    ndim = call.tensors[0].ndim
    first, second = (call.arguments.get(name, default) % ndim for default, name in enumerate(("dim0", "dim1")))
    return cut._replace(dim={first: second, second: first}.get(cut.dim, cut.dim))


def _permuted(call: _Call, cut: Cut, along: set[int]) -> Cut:
    return cut._replace(dim=[dim % call.tensors[0].ndim for dim in call.arguments["dims"]].index(cut.dim))


def _unsqueezed(call: _Call, cut: Cut, along: set[int]) -> Cut:
    return cut._replace(dim=cut.dim + (call.arguments["dim"] % (call.tensors[0].ndim + 1) <= cut.dim))


def _squeezed(call: _Call, cut: Cut, along: set[int]) -> Cut:
    return _without(call, cut, {dim for dim in along if call.tensors[0].shape[dim] == 1}, "leaves out")


_OF_ONE: dict[tuple[str, ...], Callable[[_Call, Cut, set[int]], Cut]] = {
    tuple(_ALONG): _along,
    ("select", "unbind"): lambda call, cut, along: _without(call, cut, along, "picks in"),
    ("permute",): _permuted,
    ("transpose", "t"): _transposed,
    ("unsqueeze",): _unsqueezed,
    ("squeeze",): _squeezed,
}


def _viewed(call: _Call, cut: Cut, full: Shape, size: int) -> Cut:
    """A view keeps the order of elements: of `outer` runs, which come before the cut one, each rank has its part."""
    outer, local = prod(call.tensors[0].shape[: cut.dim]) * cut.blocks, call.shapes[0]
    for dim, (here, whole) in enumerate(zip(local, full, strict=True)):
        before = prod(local[:dim])
        if here * size == whole and before and outer % before == 0 and here % (outer // before) == 0:
            return Cut(dim, outer // before)
    raise _Mixes(f"into {list(local)} joins or divides dimension {cut.dim}, which is cut")


def _created(call: _Call, full: Shape) -> Cut | None:
    """Rule of equal values; which dimension is cut its size tells."""
    differs = [dim for dim, (here, whole) in enumerate(zip(call.shapes[0], full, strict=True)) if here != whole]
    if len(differs) > 1:
        raise _Mixes("makes more than one dimension smaller")
    return Cut(differs[0]) if differs else None


def _pointwise(call: _Call, states: Sequence[Cut | None]) -> Cut | None:
    """Elements meet that stand in the same place, counted from the last dimension."""
    ndim = max(x.ndim for x in call.tensors)
    cuts = {state._replace(dim=state.dim - x.ndim) for x, state in zip(call.tensors, states, strict=True) if state}
    if len(cuts) != 1:
        raise _Mixes("meets tensors that are cut in different ways")
    (cut,) = cuts
    for x, state in zip(call.tensors, states, strict=True):
        if state is None and x.ndim >= -cut.dim and x.shape[cut.dim] != 1:
            raise _Mixes("meets a tensor that is not cut")
    return cut._replace(dim=cut.dim + ndim)


def _joined(call: _Call, states: Sequence[Cut | None]) -> Cut | None:
    cut = states[0]
    if cut is None or any(state != cut for state in states):
        raise _Mixes("joins tensors that are cut in different ways")
    along = call.arguments["dim"] % (call.tensors[0].ndim + (call.name == "stack"))
    if call.name == "stack":
        return cut._replace(dim=cut.dim + (along <= cut.dim))
    if along == cut.dim:
        raise _Mixes(f"along dimension {cut.dim} joins what is cut")
    return cut


def _multiplied(letters: str, call: _Call, states: Sequence[Cut | None]) -> Cut | None:
    inputs, output = letters.split("->")
    cuts = {
        (each[state.dim], state.blocks)
        for each, state in zip(inputs.split(","), states, strict=True)
        if state is not None
    }
    if len(cuts) != 1:
        raise _Mixes("multiplies tensors that are cut in different ways")
    ((letter, blocks),) = cuts
    if letter not in output:
        raise _Mixes("sums over what is cut")
    return Cut(output.index(letter), blocks)
