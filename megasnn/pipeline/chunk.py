"""A contiguous run of layers that one pipeline rank owns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megasnn.bundle import Bundle, Key, bundle_of, entries_of, map_entries
from megasnn.device_checks import explained
from megasnn.kernels.spike_codec import Content
from megasnn.layers.blocks import recompute_mode
from megasnn.layers.context import BuildContext
from megasnn.layers.dropout import ParallelDropout
from megasnn.layers.neuron import NeuronLayer
from megasnn.layers.replicated import apply_layer
from megasnn.layers.row_context import own_rows_of
from megasnn.layers.shape_inference import gives_channels_last, to_channels_last
from megasnn.layers.weight_grad import WeightGradients
from megasnn.models.description import DRY_SAMPLES, INPUT, Carried, LayerDescription, ModelDescription, frames_of
from megasnn.parallel.sharding import ShardedTensor, copied_tensors, materialise, own_rows, sharded_tensors
from megasnn.parallel_state import alone
from megasnn.pipeline.capture import GraphOptions
from megasnn.pipeline.graphs import ChunkGraphs
from megasnn.telemetry.ranges import is_traced, named


@dataclass(frozen=True)
class _Step:
    """One layer of a chunk.

    Attributes:
        number: its place in the model.
        takes: the numbers of the layers whose outputs it is given.
        last: those of them that nothing behind it needs.
    """

    number: int
    description: LayerDescription
    takes: tuple[int, ...]
    last: tuple[int, ...]


class PipelineChunk(nn.Module):
    """Layers `start..end` of a model, in order. `len`, indexing and iteration go over the layers.

    A chunk is given what layers before it have given and it or a chunk behind it needs, and hands on what chunks behind
    it need, of its own layers' outputs and of what it was given. One without layers (legal in an explicit layout) hands
    its input on.

    Args:
        bounds: the layers of each chunk.
        index: place among all chunks of the pipeline, from input to loss.
        layers: its own. weight_gradients: where they leave the second part of their backward.
        context: what they were built with.
    Attributes:
        index: place among all chunks of the pipeline, from input to loss.
        is_first, is_last: whether it takes the images, and whether it gives the logits.
        receives, hands_on: the tensors at its beginning and at its end, in their order.
        graphs: as which layers run in training; None without.
    """

    def __init__(
        self,
        model: ModelDescription,
        bounds: Sequence[range],
        index: int,
        layers: Sequence[nn.Module],
        weight_gradients: WeightGradients,
        context: BuildContext,
    ) -> None:
        super().__init__()
        self._model, self._span = model, bounds[index]
        span = self._span
        self.index = index
        self.is_first, self.is_last = index == 0, index == len(bounds) - 1
        self.names = [model.layers[i].name for i in span]
        self.weight_gradients = weight_gradients
        self.layers = nn.ModuleList(layers)
        self.receives, self.hands_on = model.carried(span.start), model.carried(span.stop)
        self._carrying = carrying_layers(self.layers)
        self._steps = [_step(model, number) for number in span]
        self._is_chain = model.is_chain
        self._input_shape, self._context = model.input_shape, context
        self.graphs: ChunkGraphs | None = None
        taken = Counter(source for takes in model.inputs for source in takes if source != INPUT)
        self._sharing = {each.description.name for each in self._steps if any(taken[n] > 1 for n in each.takes)}

    def record_graphs(self, options: GraphOptions) -> None:
        """From now on layers run as graphs in training. Raises ValueError for one that cannot, and must."""
        self.graphs = ChunkGraphs(self.named_layers(), self._sharing, self.weight_gradients, options)

    def part(self, bounds: Sequence[range], index: int) -> PipelineChunk:
        """A chunk of a finer cut, which is within this one and has its layers."""
        first = self._span.start
        layers = [self.layers[number - first] for number in bounds[index]]
        return PipelineChunk(self._model, bounds, index, layers, self.weight_gradients, self._context)

    def forward(self, x: Tensor | list[Tensor], samples: range | None = None, goes_on: bool = False) -> Any:
        """
        Args:
            x: the tensors of `receives`, in a list that is emptied, so that they are freed when they are used up; for
                the first chunk, images or frames as they are loaded.
            samples: see KeyedLayer.
            goes_on: whether this is a later window of the samples that the last forward was on (--bptt-steps).
        Returns:
            the tensors of `hands_on`; of the last chunk, the output of the model.
        """
        if not goes_on:
            self.forget()
        outputs: dict[int, Bundle] = {}
        if isinstance(x, Tensor):
            outputs[INPUT] = own_rows_of(frames_of(x, self._input_shape), self._context)
        else:
            outputs = _unpacked(self.receives, x)
            x.clear()
        for step, layer in zip(self._steps, self.layers, strict=True):
            inputs = [outputs[number] for number in step.takes]
            for number in step.last:
                del outputs[number]
            name = step.description.name
            with explained(partial("{}: {}".format, name)), named(name):
                if self.graphs is not None and torch.is_grad_enabled():
                    y = self.graphs.apply(name, inputs, samples)
                else:
                    y = apply_layer(layer, inputs[0], samples, *inputs[1:], goes_on=goes_on)
            self._require_described(step.description, y, samples)
            y = map_entries(to_channels_last, y) if gives_channels_last(layer) else y
            if is_traced():
                self._name_backward(name, inputs, y)
            outputs[step.number] = y if self._is_chain else _with_edges_of_their_own(y, inputs)
        if self.is_last:
            (output,) = outputs.values()
            return output
        return [entries_of(outputs[each.layer])[each.key] for each in self.hands_on]

    def _name_backward(self, name: str, inputs: Sequence[Bundle], y: Bundle) -> None:
        given = [entry for x in inputs for entry in entries_of(x).values()]
        self.weight_gradients.ranges.watch(name, given, list(entries_of(y).values()))

    def _require_described(self, description: LayerDescription, y: Bundle, samples: range | None) -> None:
        """Raises ValueError for an output that is not built as that of the dry run was, or has another shape."""
        if isinstance(description.output, Content):
            if not isinstance(y, Tensor):
                raise ValueError(f"{description.name} gives a {type(y).__name__}, and gave a tensor in the dry run")
            return
        try:
            entries = entries_of(y)
        except ValueError as error:
            raise ValueError(f"{description.name}: {error}") from None
        if entries.keys() != description.entries.keys():
            raise ValueError(
                f"{description.name} gives {_keys(entries)}, and gave {_keys(description.entries)} in the dry run"
            )
        for key, expected in description.entries.items():
            shape = expected.shape
            if samples is not None and shape is not None and not self._fits(entries[key], shape, len(samples)):
                wanted = [len(samples) if dim == 1 and side == DRY_SAMPLES else side for dim, side in enumerate(shape)]
                raise ValueError(
                    f"entry {key!r} of the output of {description.name} is {list(entries[key].shape)}, and by the dry "
                    f"run it is {wanted} for {len(samples)} sample(s) of one rank: let the layer give shapes that "
                    "follow from those of its inputs alone, not from values or steps"
                )

    def _fits(self, entry: Tensor, shape: tuple[int, ...], samples: int) -> bool:
        """Whether each side is that of the dry run, or in proportion to the samples; channels may be cut, and a single
        time step may have become all of them."""
        if entry.ndim != len(shape):
            return False
        allowed = {DRY_SAMPLES, samples}
        rows = self._context.context if self._context.cut == "rows" else alone("context")
        for dim, (found, side) in enumerate(zip(entry.shape, shape, strict=True)):
            if dim == 0 and side == 1:
                continue
            if dim == 3 and side >= rows.size and found == len(own_rows(side, rows.size, rows.rank)):
                continue
            parts = {1, self._context.tensor.size} if dim == 2 else {1}
            if not any(DRY_SAMPLES * part * found == times * side for part in parts for times in allowed):
                return False
        return True

    def forget(self) -> None:
        """Lets neurons forget the state that the last forward left, and dropout its time steps."""
        for layer in self._carrying:
            layer.forget()

    @contextmanager
    def only_graph(self) -> Iterator[None]:
        """Inside is a forward that is computed again. Raises ValueError for one that has changed what is kept."""
        with explained(partial("{}: {}".format, ", ".join(self.names))), recompute_mode([*self.layers], self.is_last):
            yield

    def named_layers(self) -> Iterator[tuple[str, nn.Module]]:
        return zip(self.names, self.layers, strict=True)

    def sharded_tensors(self) -> list[ShardedTensor]:
        return list(sharded_tensors(self.named_layers()))

    def copied_tensors(self) -> list[ShardedTensor]:
        """Of its tensors those that another one owns; see `megasnn.parallel.sharding.tie`."""
        return list(copied_tensors(self.named_layers()))

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: int) -> nn.Module:
        return self.layers[index]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.layers)


def carrying_layers(module: nn.Module) -> list[NeuronLayer | ParallelDropout]:
    """Those in a module that keep something from one forward to the next."""
    found = (each for each in module.modules() if isinstance(each, (NeuronLayer, ParallelDropout)))
    return [each for each in found if each.carries]


def _step(model: ModelDescription, number: int) -> _Step:
    takes, still_needed = model.inputs[number], model.needed_from(number + 1)
    last = tuple(source for source in dict.fromkeys(takes) if source not in still_needed)
    return _Step(number, model.layers[number], takes, last)


def _unpacked(carried: Sequence[Carried], tensors: Sequence[Tensor]) -> dict[int, Bundle]:
    """The outputs that a boundary carried, by the number of their layer."""
    entries: dict[int, dict[Key, Tensor]] = {}
    for each, tensor in zip(carried, tensors, strict=True):
        entries.setdefault(each.layer, {})[each.key] = tensor
    return {number: bundle_of(of_layer) for number, of_layer in entries.items()}


def _with_edges_of_their_own(y: Bundle, inputs: Sequence[Bundle]) -> Bundle:
    """A layer may hand on an input as it is. Its gradients are summed apart from the input's, as they would be with a
    boundary between them, so that the order of the sum does not depend on the cut."""
    seen = {id(entry) for x in inputs for entry in entries_of(x).values()}

    def apart(entry: Tensor) -> Tensor:
        made = entry.view_as(entry) if id(entry) in seen and entry.requires_grad else entry
        seen.add(id(entry))
        return made

    return map_entries(apart, y)


def _keys(entries: Mapping[Key, Any]) -> str:
    return "a tensor" if None in entries else f"the entries {list(entries)}"


Keep = Callable[[int, Sequence[nn.Module]], None]


def build_chunk(
    model: ModelDescription,
    bounds: Sequence[range],
    index: int,
    context: BuildContext,
    device: torch.device,
    seed: int,
    parts: Sequence[range] = (),
    keep: Keep = lambda part, layers: None,
) -> PipelineChunk:
    """Builds chunk `index`: of all layers, only its own get memory, and keyed initial values.

    Args:
        parts: of the layers of all chunks, each within one chunk: those of one get their values at once. By default
            they are the chunks.
        keep: called with the number of a part and its layers when they have their values, before others get theirs.
    """
    weight_gradients = WeightGradients()
    layers = model.build(replace(context, weight_gradients=weight_gradients))
    mine = [layers[number] for number in bounds[index]]
    chunk = PipelineChunk(model, bounds, index, mine, weight_gradients, context)
    span = bounds[index]
    for number, part in enumerate(parts or bounds):
        if part and part.start in span:
            within = [
                name_and_layer for at, name_and_layer in zip(span, chunk.named_layers(), strict=True) if at in part
            ]
            materialise(within, device, seed)
            keep(number, [layer for _, layer in within])
    return chunk


def describe_tensors(model: ModelDescription, context: BuildContext) -> list[ShardedTensor]:
    """The description of every tensor of the whole model, on the meta device: nothing is allocated."""
    if model.tensors is None or context.place != BuildContext().place:
        return list(sharded_tensors(model.named_layers(context)))
    return [replace(entry, tensor=_typed(entry.tensor, context.dtype)) for entry in model.tensors]


def _typed(like: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of this shape, with parameters of the type if it holds fractions."""
    made = torch.empty_like(like, dtype=dtype if like.is_floating_point() else like.dtype)
    return made.requires_grad_(like.requires_grad)
