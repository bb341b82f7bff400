"""A contiguous run of layers that one pipeline rank owns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megasnn.bundle import Bundle, Key, bundle_of, entries_of, map_entries
from megasnn.device_checks import explained
from megasnn.layers.blocks import recompute_mode
from megasnn.layers.context import BuildContext
from megasnn.layers.dropout import ParallelDropout
from megasnn.layers.neuron import NeuronLayer
from megasnn.layers.replicated import apply_layer
from megasnn.layers.row_context import own_rows_of
from megasnn.layers.shape_inference import to_channels_last
from megasnn.layers.weight_grad import WeightGradients
from megasnn.models.description import INPUT, Carried, LayerDescription, ModelDescription, frames_of
from megasnn.parallel.sharding import ShardedTensor, copied_tensors, materialise, sharded_tensors
from megasnn.pipeline.graphs import ChunkGraphs, GraphOptions
from megasnn.telemetry.ranges import named


@dataclass(frozen=True)
class _Step:
    """One layer of a chunk.

    Attributes:
        number: place in the model.
        takes: numbers of the layers whose outputs it is given.
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
        bounds: layers of each chunk.
        index: place among all chunks of the pipeline, from input to loss.
        layers: its own. weight_gradients: takes the second part of their backward.
        context: of their building.
    Attributes:
        is_first, is_last: True if it takes the images, and if it gives the logits.
        receives, hands_on: tensors at its beginning and at its end, in their order.
        graphs: CUDA graphs of its layers in training; None without.
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
        self._model, self._span, self._is_chain = model, bounds[index], model.is_chain
        span = self._span
        self.index = index
        self.is_first, self.is_last = index == 0, index == len(bounds) - 1
        self.names = [model.layers[i].name for i in span]
        self.weight_gradients = weight_gradients
        self.layers = nn.ModuleList(layers)
        self.receives, self.hands_on = model.carried(span.start), model.carried(span.stop)
        self._carrying = carrying_layers(self.layers)
        self._steps = [_step(model, number) for number in span]
        self._context = context
        self.graphs: ChunkGraphs | None = None
        taken = Counter(source for takes in model.inputs for source in takes if source != INPUT)
        self._sharing = {each.description.name for each in self._steps if any(taken[n] > 1 for n in each.takes)}

    def capture_graphs(self, options: GraphOptions) -> None:
        """Runs layers as graphs in training from now on. Raises ValueError for one that cannot, and must."""
        self.graphs = ChunkGraphs(dict(self.named_layers()), self._sharing, self.weight_gradients, options)

    def part(self, bounds: Sequence[range], index: int) -> PipelineChunk:
        """A chunk of a finer cut, which is within this one and has its layers."""
        first = self._span.start
        layers = [self.layers[number - first] for number in bounds[index]]
        return PipelineChunk(self._model, bounds, index, layers, self.weight_gradients, self._context)

    def forward(
        self, x: Tensor | list[Tensor], samples: range | None = None, goes_on: bool = False, micro_batch: int = 0
    ) -> Any:
        """
        Args:
            x: tensors of `receives`, in a list that is emptied, so that they are freed when they are used up; for the
                first chunk, images or frames as they are loaded.
            samples: see KeyedLayer.
            goes_on: True for a later window of the samples that the last forward was on (--bptt-steps).
            micro_batch: its number in the step.
        Returns:
            tensors of `hands_on`; of the last chunk, the output of the model.
        """
        if not goes_on:
            self.forget()
        outputs: dict[int, Bundle] = {}
        if isinstance(x, Tensor):
            outputs[INPUT] = own_rows_of(frames_of(x, self._model.input_shape), self._context)
        else:
            outputs = _unpacked(self.receives, x)
            x.clear()
        graphs = self.graphs if torch.is_grad_enabled() else None
        for step, layer in zip(self._steps, self.layers, strict=True):
            inputs = [outputs[number] for number in step.takes]
            for number in step.last:
                del outputs[number]
            name = step.description.name
            with explained(partial("{}: {}".format, name)), named(name):
                if graphs is not None and graphs.has(name, micro_batch):
                    y = graphs.apply(name, inputs, samples, micro_batch)
                else:
                    y = apply_layer(layer, inputs[0], samples, *inputs[1:], goes_on=goes_on)
            _require_described(step.description, y)
            y = map_entries(to_channels_last, y)
            outputs[step.number] = y if self._is_chain else _with_edges_of_their_own(y, inputs)
        if self.is_last:
            (output,) = outputs.values()
            return output
        return [entries_of(outputs[each.layer])[each.key] for each in self.hands_on]

    def finished(self, micro_batch: int) -> None:
        """Ends a micro-batch, after all of its backward."""
        if self.graphs is not None:
            self.graphs.done(micro_batch)

    def forget(self) -> None:
        """Lets neurons forget the state that the last forward left, and dropout its time steps."""
        for layer in self._carrying:
            layer.forget()

    @contextmanager
    def only_graph(self) -> Iterator[None]:
        """Surrounds a forward that is computed again. Raises ValueError for one that has changed what is kept."""
        with explained(partial("{}: {}".format, ", ".join(self.names))), recompute_mode([*self.layers], self.is_last):
            yield

    def named_layers(self) -> Iterator[tuple[str, nn.Module]]:
        return zip(self.names, self.layers, strict=True)

    def sharded_tensors(self) -> list[ShardedTensor]:
        return list(sharded_tensors(self.named_layers()))

    def copied_tensors(self) -> list[ShardedTensor]:
        """Tensors that another one owns; see `megasnn.parallel.sharding.tie`."""
        return list(copied_tensors(self.named_layers()))

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: int) -> nn.Module:
        return self.layers[index]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.layers)


def carrying_layers(module: nn.Module) -> list[NeuronLayer | ParallelDropout]:
    """Layers in a module that keep something from one forward to the next."""
    found = (each for each in module.modules() if isinstance(each, (NeuronLayer, ParallelDropout)))
    return [each for each in found if each.carries]


def _step(model: ModelDescription, number: int) -> _Step:
    takes, still_needed = model.inputs[number], model.needed_from(number + 1)
    last = tuple(source for source in dict.fromkeys(takes) if source not in still_needed)
    return _Step(number, model.layers[number], takes, last)


def _require_described(description: LayerDescription, y: Bundle) -> None:
    """Raises ValueError for an output that is not built as that of the dry run was."""
    try:
        found, expected = entries_of(y).keys(), description.entries.keys()
    except ValueError as error:
        raise ValueError(f"{description.name}: {error}") from None
    if found != expected:
        raise ValueError(f"{description.name} gives {_keys(found)}, and gave {_keys(expected)} in the dry run")


def _unpacked(carried: Sequence[Carried], tensors: Sequence[Tensor]) -> dict[int, Bundle]:
    """Outputs that a boundary carried, by the number of their layer."""
    entries: dict[int, dict[Key, Tensor]] = {}
    for each, tensor in zip(carried, tensors, strict=True):
        entries.setdefault(each.layer, {})[each.key] = tensor
    return {number: bundle_of(of_layer) for number, of_layer in entries.items()}


def _with_edges_of_their_own(y: Bundle, inputs: Sequence[Bundle]) -> Bundle:
    """Separates an output that is one of the inputs: its gradients are summed apart from the input's, as they would be
    with a boundary between them, so that the order of the sum does not depend on the cut."""
    seen = {id(entry) for x in inputs for entry in entries_of(x).values()}

    def apart(entry: Tensor) -> Tensor:
        made = entry.view_as(entry) if id(entry) in seen and entry.requires_grad else entry
        seen.add(id(entry))
        return made

    return map_entries(apart, y)


def _keys(entries: Collection[Key]) -> str:
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
        parts: layers that get their values at once, each part within one chunk; by default the chunks.
        keep: called with the number of a part and its layers when they have their values, before others get theirs.
    """
    weight_gradients = WeightGradients()
    layers = model.build(replace(context, weight_gradients=weight_gradients))
    span = bounds[index]
    mine = [layers[number] for number in span]
    chunk = PipelineChunk(model, bounds, index, mine, weight_gradients, context)
    for number, part in enumerate(parts or bounds):
        if part and part.start in span:
            within = [named for at, named in zip(span, chunk.named_layers(), strict=True) if at in part]
            materialise(within, device, seed)
            keep(number, [layer for _, layer in within])
    return chunk


def describe_tensors(model: ModelDescription, context: BuildContext) -> list[ShardedTensor]:
    """Describes every tensor of the whole model, on the meta device: nothing is allocated."""
    if context.place != BuildContext().place:
        return list(sharded_tensors(model.named_layers(context)))

    def typed(like: Tensor) -> Tensor:
        dtype = context.dtype if like.is_floating_point() else like.dtype
        return torch.empty_like(like, dtype=dtype).requires_grad_(like.requires_grad)

    return [replace(entry, tensor=typed(entry.tensor)) for entry in model.tensors]
