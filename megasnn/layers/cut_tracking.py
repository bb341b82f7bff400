"""Follows the dimension that tensor-parallel ranks cut through a layer's forward, on the meta device.

Every tensor of a rank is either *replicated* (the same as on one rank) or *cut*: its slice of one dimension of the
tensor that one rank has. A forward that is not ours runs twice without values: with all channels (`Recorder`), and with
a rank's (`CutTracker`). Both must call the same functions of torch with the same numbers, and a rule for each function
says in which dimension its output is cut. A function without a rule, or one that mixes what is cut, is refused.
MegaSNN's own layers exchange what they need, and are not looked into.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, NamedTuple, NoReturn

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megasnn.layers.channels import UNMARKED, Cut, MixedChannels, cut_of, is_tracked, mark_cut
from megasnn.layers.conv import ParallelConv
from megasnn.layers.linear import MeanLinear, ParallelLinear
from megasnn.layers.neuron import NeuronLayer
from megasnn.layers.norms import ParallelLayerNorm
from megasnn.layers.swapped import SwappedDropout

Shape = tuple[int, ...]


_LOST = Cut(-1)
"""Of secondary outputs that no rule follows: whoever uses one is refused."""


class Event(NamedTuple):
    """A function of torch that was called, or the beginning ("enter") or end ("exit") of a module's forward.

    Attributes:
        name: of the function, or path of the module. constants: arguments that are neither tensors nor sizes.
    """

    kind: str
    name: str
    constants: tuple[object, ...] = ()
    shapes: tuple[Shape, ...] = ()


class _Watch(TorchDispatchMode):
    """Sees functions of torch in a layer's forward, and where its modules' begin and end."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._paths = {id(module): path for path, module in layer.named_modules()}
        self._inside: list[str] = []
        """Paths of the modules whose forward is under way."""
        self._ours: nn.Module | None = None

    @property
    def path(self) -> str:
        """Path of the module whose forward, not one of ours, is under way."""
        known = [path for path in self._inside if path != "?"]
        return known[-1] if known else ""

    def __enter__(self) -> Any:
        self._hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._exit),
        ]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        if self._ours is None and is_tracked():
            self._saw(_Call(function, args, kwargs or {}, output))
        return output

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._ours is None:
            self._inside.append(self._paths.get(id(module), "?"))
            self._began(module, inputs)
            if is_followed(module):
                self._ours = module

    def _exit(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if self._ours in (None, module):
            ours, self._ours = self._ours, None
            self._ended(module, inputs, output, ours is not None)
            self._inside.pop()

    def _saw(self, call: _Call) -> None:
        raise NotImplementedError

    def _began(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        raise NotImplementedError

    def _ended(self, module: nn.Module, inputs: tuple[Any, ...], output: Any, ours: bool) -> None:
        raise NotImplementedError


class Recorder(_Watch):
    """Records what a layer does on one rank.

    Attributes:
        events: in their order.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.events: list[Event] = []

    def _saw(self, call: _Call) -> None:
        if not call.is_identity:
            self.events.append(Event("op", call.name, call.constants, call.shapes))

    def _began(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.events.append(Event("enter", self._inside[-1]))

    def _ended(self, module: nn.Module, inputs: tuple[Any, ...], output: Any, ours: bool) -> None:
        self.events.append(Event("exit", self._inside[-1], (), tuple(tuple(x.shape) for x in _tensors(output))))


class CutTracker(_Watch):
    """Follows the cut dimension through the forward of a layer that a rank has with its channels.

    Args:
        recorded: what the layer does on one rank.
        size: number of tensor parallel ranks.
    Raises:
        MixedChannels: what is cut is mixed, or nothing says that it is not.
    """

    def __init__(self, layer: nn.Module, recorded: Sequence[Event], size: int) -> None:
        super().__init__(layer)
        self._events, self._size = iter(recorded), size
        self._described = dict(_described_cuts(layer))
        self._module: list[nn.Module] = []

    def state(self, tensor: Tensor) -> Cut | None:
        found = cut_of(tensor)
        if found is UNMARKED:
            return self._described.get(id(tensor))
        if found is _LOST:
            self._refuse("uses an output that cannot be followed")
        return found

    def _saw(self, call: _Call) -> None:
        states = [self.state(x) for x in call.tensors]
        if call.is_identity:
            return self._mark(call.outputs, states[0])
        shapes = self._expect("op", call).shapes
        if all(state is None for state in states) and shapes == call.shapes:
            return self._mark(call.outputs, None)
        try:
            cut = _rule(call, states, shapes, self._size)
        except _Mixes as error:
            self._refuse(f"{call.name} {error}", call)
        self._check_learned(call, states)
        for index, (output, shape) in enumerate(zip(call.outputs, shapes, strict=True)):
            fits = cut is not None and _local(shape, cut, self._size) == tuple(output.shape)
            if not fits and index == 0:
                self._refuse(f"{call.name} gives {list(output.shape)} of {list(shape)}", call)
            mark_cut(output, cut if fits else _LOST)
        changed = call.changed
        if changed is not None and self.state(changed) != cut:
            self._refuse(f"{call.name} changes a tensor in place that is cut otherwise", call)

    def _check_learned(self, call: _Call, states: Sequence[Cut | None]) -> None:
        """Refuses a replicated tensor with a gradient beside one that is cut: a rank would see its channels' share of
        that gradient alone."""
        learned = (x for x, state in zip(call.tensors, states, strict=True) if state is None)
        if any(states) and any(x.requires_grad for x in learned):
            self._refuse(f"{call.name} takes a tensor that all ranks have whole and that needs a gradient", call)

    def _mark(self, outputs: Iterable[Tensor], cut: Cut | None) -> None:
        for output in outputs:
            mark_cut(output, cut)

    def _expect(self, kind: str, call: _Call | None = None) -> Event:
        event = next(self._events, None)
        name = self._inside[-1] if call is None else call.name
        if event is None or (event.kind, event.name) != (kind, name):
            self._refuse(f"{name} is not what comes here on one rank")
        if call is not None and call.constants != event.constants:
            self._refuse(f"{name} is called with {_text(call.constants)}, on one rank with {_text(event.constants)}")
        return event

    def _began(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._module.append(module)
        self._expect("enter")
        if is_followed(module):
            self._check_inputs(module, inputs)

    def _check_inputs(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        tensors = _tensors(inputs)
        if "_is_whole" in vars(module):
            return
        if takes_any_cut(module) or not tensors:
            cut = self.state(tensors[0]) if tensors else None
            if tensors and cut is None and any(True for _ in module.parameters()):
                self._refuse("a learned time constant behind an output that all ranks have whole")
            if cut is not None and cut.dim == 0:
                self._refuse("neurons that are given the time cut")
            return
        for x in tensors[:1]:
            cut = self.state(x)
            blocks = 1 if isinstance(module, (ParallelConv, ParallelLinear)) else blocks_of(module)
            if cut is not None and cut != Cut(channels_of(module, x), blocks):
                self._refuse(f"{type(module).__name__} takes channels in dimension {channels_of(module, x)}")

    def _ended(self, module: nn.Module, inputs: tuple[Any, ...], output: Any, ours: bool) -> None:
        self._module.pop()
        if not ours:
            self._expect("exit")
            return
        depth = 0
        for event in self._events:
            depth += {"enter": 1, "exit": -1}.get(event.kind, 0)
            if depth < 0:
                break
        else:
            self._refuse("it is not called here on one rank")
        first = _tensors(inputs)[0] if _tensors(inputs) else None
        for y, shape in zip(_tensors(output), event.shapes, strict=False):
            if cut_of(y) is UNMARKED or takes_any_cut(module):
                same = first is not None and tuple(y.shape) == shape and self.state(first) is None
                cut = None if same else Cut(channels_of(module, y), blocks_of(module))
                mark_cut(y, self.state(first) if first is not None and takes_any_cut(module) else cut)
            state = self.state(y)
            if _local(shape, state, self._size) != tuple(y.shape):
                self._refuse(f"{type(module).__name__} gives {list(y.shape)}, on one rank {list(shape)}")

    def _refuse(self, why: str, call: _Call | None = None) -> NoReturn:
        given = "" if call is None else f", given {' and '.join(str(list(x.shape)) for x in call.tensors)}"
        raise MixedChannels(
            f"{why}{given}: with --tensor-model-parallel-size above 1 a rank has its own channels only, and this is "
            "not known to be right for them; set it to 1, or put what mixes channels into a plain module that is a "
            "layer by itself",
            self.path,
        )


# --- modules


def is_followed(module: nn.Module) -> bool:
    """Tells whether a module is MegaSNN's with all in it, or made whole where it is: then it is not looked into."""
    if "_is_whole" in vars(module):
        return True
    return type(module).forward.__module__.startswith("megasnn.") and all(is_ours(each) for each in module.modules())


def is_ours(module: nn.Module) -> bool:
    """Tells whether a module, without those in it, is MegaSNN's, and nobody else's code has a part in it."""
    return type(module).__module__.startswith("megasnn.")


def takes_any_cut(module: nn.Module) -> bool:
    """Tells whether a module of ours treats every element behind the time by itself, wherever it is cut."""
    return isinstance(module, (NeuronLayer, SwappedDropout))


def channels_of(module: nn.Module, x: Tensor) -> int:
    """The dimension in which a layer of ours takes and gives channels."""
    if isinstance(module, ParallelLinear) and not isinstance(module, MeanLinear):
        return x.ndim - 1
    if isinstance(module, ParallelLayerNorm):
        return x.ndim - len(module.shape)
    return 2 if getattr(module, "multi_step", True) else 1


def blocks_of(module: nn.Module) -> int:
    """Number of blocks that the output channels of a layer of ours consist of, which its last part says."""
    shards = [shard for each in module.modules() for shard in vars(each).get("_described_shards", {}).values()]
    cuts = [cut for shard in shards for axis, cut in shard.cuts if axis == "tensor" and cut.dim == 0]
    return cuts[-1].blocks if cuts else 1


def _described_cuts(layer: nn.Module) -> Iterable[tuple[int, Cut]]:
    for module in layer.modules():
        for name, shard in vars(module).get("_described_shards", {}).items():
            for axis, cut in shard.cuts:
                if axis == "tensor":
                    yield id(getattr(module, name)), Cut(cut.dim, cut.blocks)


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def _text(constants: tuple[object, ...]) -> str:
    return ", ".join(map(str, constants))


# --- functions of torch

_SIZES = ("size", "split_size", "memory_format", "device", "layout", "pin_memory", "implicit", "generator")
_IDENTITY = {"clone", "detach", "alias", "lift_fresh", "_to_copy", "contiguous", "to", "_conj", "resolve_conj"}
_VIEWS = {"view", "_unsafe_view", "_reshape_alias", "reshape", "unflatten", "flatten", "unsqueeze_", "squeeze_"}
_POINTWISE = {
    *("masked_fill", "fill", "copy", "zero", "zeros_like", "ones_like", "empty_like", "full_like", "hardswish"),
    *("log_sigmoid_forward", "_prelu_kernel", "floor_divide", "dropout", "native_dropout"),
}
_CREATE = {"zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty", "scalar_tensor"}
_ALONG = {"_softmax", "_log_softmax", "_safe_softmax", "cumsum", "cumprod", "sort", "topk", "flip", "roll", "glu"} | {
    *("split", "split_with_sizes", "chunk", "index_select", "slice", "kthvalue", "cummax", "cummin"),
}
_MATMUL = {"mm": "ij,jk->ik", "bmm": "bij,bjk->bik", "addmm": "ik,ij,jk->ik", "baddbmm": "bik,bij,bjk->bik"}
_SPATIAL = ("avg_pool", "max_pool", "adaptive_avg_pool", "_adaptive_avg_pool", "adaptive_max_pool", "upsample_") + (
    "_upsample_",
    *("reflection_pad", "replication_pad"),
)


class _Mixes(Exception):
    """Why a function mixes what is cut."""


class _Call:
    """A function of torch with its arguments and outputs."""

    def __init__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        schema, self.tags = function._schema, function.tags
        self.arguments: dict[str, Any] = {each.name: each.default_value for each in schema.arguments}
        self.arguments |= dict(zip(self.arguments, args, strict=False)) | kwargs
        self.name = function.overloadpacket.__name__.rstrip("_")
        self.is_in_place = schema.is_mutable
        self.tensors, self.outputs = _tensors((args, kwargs)), _tensors(output)
        self.shapes = tuple(tuple(x.shape) for x in self.outputs)
        if self.name in _VIEWS:
            self.name = "view"

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

    @property
    def changed(self) -> Tensor | None:
        return self.tensors[0] if self.is_in_place and self.tensors else None

    def dims(self, ndim: int) -> set[int]:
        """The dimensions that the function works along; all where it names none."""
        given = self.arguments.get("dim", self.arguments.get("dims"))
        listed = given if isinstance(given, (list, tuple)) else [] if given is None else [given]
        return {dim % ndim for dim in listed} or set(range(ndim))


def _rule(call: _Call, states: Sequence[Cut | None], shapes: Sequence[Shape], size: int) -> Cut | None:
    """How the outputs of a function are cut. Raises _Mixes."""
    name, tags = call.name, {tag.name for tag in call.tags}
    if name == "view":
        return _viewed(call, states[0], shapes[0], size)
    if name == "expand":
        return _expanded(call, states[0], shapes[0])
    if name in _CREATE:
        return _created(call, shapes[0])
    if "pointwise" in tags or name in _POINTWISE:
        return _pointwise(call, states)
    if name in ("cat", "stack"):
        return _joined(call, states)
    if name in _MATMUL:
        return _multiplied(_MATMUL[name], call, states)
    if name == "convolution" and states[1] is None and states[0] is not None and states[0].dim == 0:
        return states[0]
    cut, others = states[0] if states else None, states[1:]
    if cut is None or any(others):
        raise _Mixes("is not known to be right")
    return _of_one(call, cut, "reduction" in tags)


def _of_one(call: _Call, cut: Cut, reduces: bool) -> Cut:
    """The rules of functions of one tensor."""
    name, x, arguments = call.name, call.tensors[0], call.arguments
    ndim, dim = x.ndim, cut.dim
    if reduces or name in ("logsumexp", "max", "min"):
        dims = call.dims(ndim)
        if dim in dims:
            raise _Mixes(f"along dimension {dim} joins what is cut")
        return cut if arguments.get("keepdim") else cut._replace(dim=dim - sum(each < dim for each in dims))
    if name in _ALONG:
        if dim in call.dims(ndim) and not (name == "split" and cut.blocks == len(call.outputs)):
            raise _Mixes(f"along dimension {dim} mixes what is cut")
        return Cut(dim) if dim in call.dims(ndim) else cut
    if name in ("select", "unbind"):
        (along,) = call.dims(ndim)
        if along == dim:
            raise _Mixes(f"picks in dimension {dim}, which is cut")
        return cut._replace(dim=dim - (along < dim))
    if name == "permute":
        return cut._replace(dim=[each % ndim for each in arguments["dims"]].index(dim))
    if name in ("transpose", "t"):
        first, second = (arguments.get("dim0", 0) % ndim, arguments.get("dim1", 1) % ndim) if ndim > 1 else (0, 0)
        return cut._replace(dim={first: second, second: first}.get(dim, dim))
    if name == "unsqueeze":
        return cut._replace(dim=dim + (arguments["dim"] % (ndim + 1) <= dim))
    if name == "squeeze":
        gone = [each for each in call.dims(ndim) if x.shape[each] == 1]
        if dim in gone:
            raise _Mixes(f"leaves out dimension {dim}, which is cut")
        return cut._replace(dim=dim - sum(each < dim for each in gone))
    if name == "repeat":
        repeats = arguments["repeats"]
        if repeats[len(repeats) - ndim + dim] != 1:
            raise _Mixes(f"repeats dimension {dim}, which is cut")
        return cut._replace(dim=dim + len(repeats) - ndim)
    if name == "native_layer_norm" and dim < ndim - len(arguments["normalized_shape"]):
        return cut
    if name == "native_batch_norm" and dim == 1:
        return cut
    if name == "constant_pad_nd" and dim < ndim - len(arguments["pad"]) // 2:
        return cut
    if name.startswith(_SPATIAL) and dim < ndim - _space(name):
        return cut
    raise _Mixes("is not known to be right")


def _space(name: str) -> int:
    """Number of dimensions that a pooling, padding or interpolation works along."""
    return next(int(letter) for letter in name if letter.isdecimal())


def _viewed(call: _Call, cut: Cut | None, full: Shape, size: int) -> Cut:
    """A view keeps the order of elements: of `outer` runs, which come before the cut one, each rank has its part."""
    if cut is None:
        raise _Mixes("makes another shape on every number of ranks")
    outer, local = prod(call.tensors[0].shape[: cut.dim]) * cut.blocks, call.shapes[0]
    for dim, (here, whole) in enumerate(zip(local, full, strict=True)):
        before = prod(local[:dim])
        if here * size == whole and before and outer % before == 0 and here % (outer // before) == 0:
            return Cut(dim, outer // before)
    raise _Mixes(f"into {list(local)} joins or divides dimension {cut.dim}, which is cut")


def _expanded(call: _Call, cut: Cut | None, full: Shape) -> Cut | None:
    if cut is not None:
        return cut._replace(dim=cut.dim + len(full) - call.tensors[0].ndim)
    return _created(call, full)


def _created(call: _Call, full: Shape) -> Cut | None:
    """Of equal values; which dimension is cut its size tells."""
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
        (each[state.dim + len(each) - x.ndim], state.blocks)
        for each, x, state in zip(inputs.split(","), call.tensors, states, strict=True)
        if state is not None
    }
    if len(cuts) != 1:
        raise _Mixes("multiplies tensors that are cut in different ways")
    ((letter, blocks),) = cuts
    if letter not in output:
        raise _Mixes("sums over what is cut")
    return Cut(output.index(letter), blocks)


def _local(shape: Shape, cut: Cut | None, size: int) -> Shape | None:
    """The shape of a rank's part; None where it cannot be cut so."""
    if cut is None:
        return shape
    if not 0 <= cut.dim < len(shape) or shape[cut.dim] % (size * cut.blocks):
        return None
    return (*shape[: cut.dim], shape[cut.dim] // size, *shape[cut.dim + 1 :])
