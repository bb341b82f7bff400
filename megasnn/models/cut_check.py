"""Check that layers of which a rank has its channels compute what they do with all of them, in one process.

A layer that is not MegaSNN's runs on random numbers, with all channels and with those of the first, the second and the
last rank. At every call of a module in it, and at the end, a rank's tensors are to be the same as one rank's, or its
part of them; so are gradients. MegaSNN's own modules and those that are whole on every rank exchange what they need:
they are not computed, but give random numbers, of which a rank is given its part. So no neuron hides anything by being
silent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from megasnn.bundle import Bundle, entries_of, map_entries
from megasnn.layers.conv import ParallelConv
from megasnn.layers.converted import ConvertedDropout
from megasnn.layers.dropout import ParallelDropout, drawn_frames
from megasnn.layers.linear import MeanLinear, ParallelLinear
from megasnn.layers.neuron import NeuronLayer, SpikingNeuron
from megasnn.layers.replicated import Gathered, apply_layer, forget_state, is_whole
from megasnn.layers.shape_inference import inferring_requires_grad, is_ours
from megasnn.models.description import DRY_SAMPLES, Cuts
from megasnn.models.layer import Computed
from megasnn.parallel.sharding import Cut

TOLERANCE = 1e-9  # relative to the largest value, in float64


class MixedChannels(ValueError):
    """A forward that computes something else where a rank has some of the channels.

    Attributes:
        path: of the innermost module whose forward it is, with the layer's name.
    """

    def __init__(self, path: str, why: str, size: int) -> None:
        super().__init__(
            f"{path}: {why}: with --tensor-model-parallel-size {size} a rank has its own channels only; set it to 1, "
            "or put what mixes channels into a plain module that is a layer by itself"
        )
        self.path = path


def is_known(layer: nn.Module) -> bool:
    """Tells whether a module is MegaSNN's with all in it, or whole where it stands: then its inside is not checked."""
    return is_whole(layer) or all(
        type(each).forward.__module__.startswith("megasnn.")
        and not isinstance(each, Computed)
        and (is_ours(each) or not isinstance(each, SpikingNeuron))
        for each in layer.modules()
    )


def check_layer(
    name: str, one: nn.Module, layer: nn.Module, inputs: Sequence[tuple[Bundle, Cuts]], size: int
) -> Cuts | None:
    """Checks a layer that is built for one of `size` ranks against one that is built for one.

    Args:
        inputs: what it takes, with all channels, on the meta device or an example; how ranks cut the entries.
    Returns:
        how the entries of its output are cut; None of a layer that is MegaSNN's or whole, which is not computed.
    Raises:
        MixedChannels: it computes something else with a rank's channels.
        ValueError: it cannot be computed on random numbers.
    """
    cuts = [cut for _, of_input in inputs for cut in of_input]
    if is_whole(layer):
        folded = vars(layer)["_call"].fold_time  # into one dimension less
        moved = [None if cut is None else Cut(cut.dim - folded, cut.blocks) for cut in cuts]
        cast(Gathered, layer.forward).cuts = moved
        return None
    if is_known(layer):
        try:
            _refuse_other_channels(layer, next(iter(entries_of(inputs[0][0]).values())), cuts[0])
        except ValueError as error:
            raise MixedChannels(name, str(error), size) from error
        return None
    whole = _Run(name, one, inputs)
    first, *others = [_Run(name, layer, inputs, whole, rank, size) for rank in sorted({0, 1, size - 1})]
    if any(each.cuts != first.cuts for each in others):
        raise MixedChannels(name, "ranks have different parts", size)
    return first.cuts


def cuts_by_shape(name: str, layer: nn.Module, output: Bundle, one: Bundle, cuts: Cuts, size: int) -> Cuts:
    """How the output of a layer is cut that is MegaSNN's or whole, by its shapes for a rank and for one rank.

    Args:
        cuts: of its first input.
    """
    blocks = 1 if is_whole(layer) else _blocks_of(layer, cuts)
    pairs = zip(entries_of(output).values(), entries_of(one).values(), strict=True)
    try:
        return [_cut_by_shape(local, whole, size, blocks) for local, whole in pairs]
    except ValueError as error:
        raise MixedChannels(name, str(error), size) from error


# --- cuts of tensors


def part(x: Tensor, cut: Cut | None, rank: int, size: int) -> Tensor:
    """A rank's part of a whole tensor."""
    if cut is None:
        return x
    blocks = x.unflatten(cut.dim, (cut.blocks, size, -1)).select(cut.dim + 1, rank)
    return blocks.flatten(cut.dim, cut.dim + 1)


def find_cut(local: Tensor, whole: Tensor, rank: int, size: int) -> Cut | None:
    """The cut that makes a rank's tensor of the whole one. Raises ValueError where none does."""
    cut = _cut_by_shape(local, whole, size, 1)
    length = 0 if cut is None else local.shape[cut.dim]
    divisors = (blocks for blocks in range(1, length + 1) if length % blocks == 0)
    for each in [None] if cut is None else (Cut(cut.dim, blocks) for blocks in divisors):
        if _are_equal(local, part(whole, each, rank, size)):
            return each
    raise ValueError(f"{list(local.shape)} values are no part of the {list(whole.shape)} that one rank has")


def _cut_by_shape(local: Tensor, whole: Tensor, size: int, blocks: int) -> Cut | None:
    """The cut of a tensor that has one dimension smaller by the number of ranks. Raises ValueError for other shapes."""
    if local.shape == whole.shape:
        return None
    smaller = [dim for dim, (here, there) in enumerate(zip(local.shape, whole.shape, strict=False)) if here != there]
    if local.ndim != whole.ndim or len(smaller) != 1 or local.shape[smaller[0]] * size != whole.shape[smaller[0]]:
        raise ValueError(f"it has the shape {list(local.shape)}, and on one rank {list(whole.shape)}")
    return Cut(smaller[0], blocks)


def _are_equal(local: Tensor, whole: Tensor, least: float = 1e-12) -> bool:
    local, whole = local.detach().double(), whole.detach().double()
    largest = float(whole.nan_to_num(0, 0, 0).abs().max()) if whole.numel() else 0.0
    return torch.allclose(local, whole, rtol=0.0, atol=TOLERANCE * largest + least, equal_nan=True)


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def _on_meta(x: Tensor) -> Tensor:
    return x.detach().to("meta").requires_grad_(x.requires_grad)


# --- modules of ours


def _refuse_other_channels(module: nn.Module, x: Tensor, cut: Cut | None) -> None:
    """Raises ValueError for an input that is not cut as a module of ours takes it."""
    shards, dim = vars(module).get("_described_shards"), 2
    if isinstance(module, ParallelLinear) and not isinstance(module, MeanLinear):
        dim = x.ndim - 1
    elif isinstance(module, ConvertedDropout) and drawn_frames() not in ((), x.shape[:2]):
        dim = 1
    is_norm = shards and not isinstance(module, (ParallelConv, ParallelLinear))
    wrong = cut is not None and cut != Cut(dim, _blocks_of(module, ()) if is_norm else 1)
    if isinstance(module, NeuronLayer):  # anything but the time may be cut; time constants learn from a rank's share
        wrong = bool(shards) if cut is None else cut.dim == 0
    if wrong or cut is None and isinstance(module, ParallelDropout) and module.p:  # each rank draws for its channels
        found = "whole on every rank" if cut is None else f"cut in dimension {cut.dim}"
        raise ValueError(f"{type(module).__name__} takes channels in dimension {dim}, and is given them {found}")


def _blocks_of(module: nn.Module, cuts: Cuts) -> int:
    """Number of blocks that the output channels of a module of ours consist of: as its last part says, or else as in
    its inputs."""
    shards = [shard for each in module.modules() for shard in vars(each).get("_described_shards", {}).values()]
    said = [cut.blocks for shard in shards for axis, cut in shard.cuts if axis == "tp" and cut.dim == 0]
    return [1, *(cut.blocks for cut in cuts[:1] if cut is not None), *said][-1]


# --- the forward on random numbers


_TENSORS = ("_parameters", "_buffers")


class _Leaf(NamedTuple):
    tensor: Tensor
    cut: Cut | None
    path: str


class _Run:
    """Forward and backward of a layer on random numbers, with all channels or with a rank's.

    Args:
        one: the run with all channels, which a rank's is compared with.
    Attributes:
        output: of the layer. cuts: of its entries.
    Raises:
        MixedChannels: something differs.
    """

    def __init__(
        self,
        name: str,
        layer: nn.Module,
        inputs: Sequence[tuple[Bundle, Cuts]],
        one: _Run | None = None,
        rank: int = 0,
        size: int = 1,
    ) -> None:
        self._one, self._rank, self._size, self._draws = one, rank, size, 0
        self._paths: dict[object, str] = {each: path for path, each in layer.named_modules(prefix=name)}
        self._paths |= {each.forward: path for path, each in layer.named_modules(prefix=name) if is_whole(each)}
        self._called = [name]  # modules that are checked, the innermost last
        self._is_inside = False  # of a module that is not
        self._seen: list[list[Tensor]] = []  # at each call
        self._shown: list[Tensor] = []  # outputs of those that are not computed, on the meta device
        self._leaves: list[_Leaf] = []
        self._loss = torch.zeros((), dtype=torch.float64)
        cuts = iter([cut for _, of_input in inputs for cut in of_input])
        _forget(layer)
        try:
            with self._watching(layer), inferring_requires_grad():
                given = [map_entries(lambda x: self._leaf(x, next(cuts)), shown) for shown, _ in inputs]
                self.output = apply_layer(layer, given[0], range(DRY_SAMPLES), *given[1:])
                self.cuts = self._compare(self.output)
            self._gradients = self._backward()
        except Exception as error:
            if one is None:
                raise ValueError(f"{self._called[-1]}, on random numbers: {error}") from error
            raise MixedChannels(self._called[-1], str(error), size) from error
        finally:
            _forget(layer)

    @contextmanager
    def _watching(self, layer: nn.Module) -> Iterator[None]:
        """Replaces forwards of MegaSNN's classes, and sees calls of other modules, which get random parameters."""
        call = vars(layer).get("_call")
        kinds = {kind for each in layer.modules() for kind in type(each).__mro__ if "forward" in vars(kind)}
        places = [(kind, "forward") for kind in kinds if kind.__module__.startswith("megasnn.")]
        with ExitStack() as changes:
            if call is not None:  # in float64, and the channels of the last layer as they are
                vars(layer)["_call"] = replace(call, dtype=None, classes=0)
                changes.callback(vars(layer).update, _call=call)
            for kind, name in (*places, (Gathered, "__call__")):
                original = vars(kind)[name]
                changes.callback(setattr, kind, name, original)
                setattr(kind, name, self._replaced(original))
            for each in dict.fromkeys(_foreign(layer)):
                changes.callback(each.register_forward_pre_hook(self._before, with_kwargs=True).remove)
                changes.callback(each.register_forward_hook(self._behind).remove)
                changes.callback(each._parameters.update, dict(each._parameters))
                changes.callback(each._buffers.update, dict(each._buffers))
                self._fill(each)
            yield

    def _fill(self, module: nn.Module) -> None:
        for name, shard in vars(module).get("_described_shards", {}).items():
            cut = next((cut for axis, cut in shard.cuts if axis == "tp"), None)
            value = self._part(0.5 + self._random(shard.global_shape).abs(), cut).clone()
            if name not in module._parameters:
                module._buffers[name] = value
                continue
            module._parameters[name] = parameter = nn.Parameter(value)
            if not shard.partial_gradient:
                self._leaves.append(_Leaf(parameter, cut, self._paths[module]))

    def _before(self, module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        if not self._is_inside:
            self._compare((inputs, options))
            self._called.append(self._paths[module])

    def _behind(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if not self._is_inside:
            self._compare(output)
            self._called.pop()

    def _replaced(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(module: Any, *inputs: Any, **options: Any) -> Any:
            if self._is_inside or not isinstance(module, Gathered) and not _is_stubbed(module):
                return original(module, *inputs, **options)
            return self._stub(original, module, inputs, options)

        return forward

    def _stub(self, original: Callable[..., Any], module: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Random numbers in place of a module's output."""
        given, cuts = _tensors((inputs, options)), self._compare((inputs, options))
        computes, blocks = not isinstance(module, Gathered), 1
        if computes:
            blocks = _blocks_of(module, cuts)
            if self._one is not None and given:
                _refuse_other_channels(module, given[0], cuts[0])
        else:
            if module.cuts not in ((), cuts):  # of an earlier call, or another rank
                raise ValueError(f"{self._paths[module]} is called again with inputs that are cut otherwise")
            module.cuts, module.dim = cuts, next((cut.dim for cut in cuts if cut is not None), None)
        kept = vars(module).copy()
        vars(module).update({n: tree_map_only(Tensor, _on_meta, dict(kept[n])) for n in _TENSORS if n in kept})
        self._is_inside = True
        try:
            inputs, options = tree_map_only(Tensor, _on_meta, (inputs, options))
            shown = original(module, *inputs, **options)
        finally:
            self._is_inside = False
            vars(module).update({name: kept[name] for name in _TENSORS if name in kept})
        if computes and any(x.requires_grad for x in (*given, *module.parameters())):
            shown = tree_map_only(Tensor, lambda y: y.requires_grad_(), shown)
        return tree_map_only(Tensor, partial(self._drawn, blocks), shown)

    def _drawn(self, blocks: int, shown: Tensor) -> Tensor:
        number = len(self._shown)
        self._shown.append(shown)
        whole = shown if self._one is None else self._one._shown[number]
        return self._leaf(whole, _cut_by_shape(shown, whole, self._size, blocks))

    def _leaf(self, whole: Tensor, cut: Cut | None) -> Tensor:
        """A rank's part of a whole tensor, or of random numbers like it, larger for later channels."""
        if not whole.is_meta:
            return self._part(whole, cut)
        if not whole.is_floating_point():
            return self._part((self._random(whole.shape) > 0).to(whole.dtype), cut)
        values = self._random(whole.shape)
        if whole.ndim > 2:
            values = values * torch.arange(1.0, 1 + whole.shape[2]).view(-1, *[1] * (whole.ndim - 3))
        x = self._part(values, cut).clone()
        if not whole.requires_grad:
            return x
        self._leaves.append(_Leaf(x.requires_grad_(), cut, self._called[-1]))
        return x * 1  # which may be changed in place

    def _part(self, whole: Tensor, cut: Cut | None) -> Tensor:
        return part(whole, cut, self._rank, self._size)

    def _random(self, shape: Sequence[int]) -> Tensor:
        """Normal numbers, the same at this place of each run."""
        self._draws += 1
        numbers, count = _normal_numbers(), prod(shape)
        start = self._draws * 7919 % len(numbers)
        repeats = -(-(start + count) // len(numbers))
        return (numbers if repeats == 1 else numbers.repeat(repeats))[start : start + count].view(*shape)

    def _compare(self, values: Any) -> Cuts:
        """Cuts of tensors that come at this place of each run; the loss is a random sum of all of them. Raises
        ValueError for values that are no part of one rank's."""
        tensors, number = _tensors(values), len(self._seen)
        self._seen.append([x.detach().clone() for x in tensors] if self._one is None else [])
        wholes = self._seen[-1] if self._one is None else self._one._seen[number]
        pairs = zip(tensors, wholes, strict=True)
        cuts = [None if self._one is None else find_cut(x, whole, self._rank, self._size) for x, whole in pairs]
        for x, whole, cut in zip(tensors, wholes, cuts, strict=True):
            if x.requires_grad:
                self._loss = self._loss + (x * self._part(self._random(whole.shape), cut)).sum()
        return cuts

    def _backward(self) -> list[Tensor]:
        """Gradients of the leaves. Raises ValueError for those that are no part of one rank's."""
        leaves = [leaf.tensor for leaf in self._leaves]
        if not leaves or not self._loss.requires_grad:
            return []
        found = torch.autograd.grad(self._loss, leaves, allow_unused=True, materialize_grads=True)
        if self._one is not None:
            least = TOLERANCE * 1e-3 * max(float(each.abs().max()) for each in self._one._gradients)
            for leaf, gradient, whole in zip(self._leaves, found, self._one._gradients, strict=True):
                if not _are_equal(gradient, self._part(whole, leaf.cut), least):
                    self._called.append(leaf.path)
                    raise ValueError("gradients are no part of those that one rank has")
        return list(found)


@cache
def _normal_numbers() -> Tensor:
    """Drawn once, since that takes most of the time; a prime number of them, so that no two channels are equal."""
    return torch.randn(1_000_003, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def _foreign(module: nn.Module) -> Iterator[nn.Module]:
    """Modules that are checked."""
    if not is_known(module):
        yield module
        for child in module.children():
            yield from _foreign(child)


def _forget(layer: nn.Module) -> None:
    """Leaves nothing of a run in a layer, whose tensors may be of another rank."""
    forget_state(layer)
    for module in layer.modules():
        vars(module).pop("_calls", None)
        if isinstance(module, (NeuronLayer, ParallelDropout)):
            module.forget()


def _is_stubbed(module: nn.Module) -> bool:
    """Tells of a module whose forward of ours is called whether that is not computed: of a known one, or of one that
    is derived from ours and calls the forward of its base."""
    is_open = isinstance(module, (SpikingNeuron, Computed))
    return is_known(module) or not is_open and all(map(is_known, module.children()))
