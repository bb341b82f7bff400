"""A contiguous run of layers that one pipeline rank owns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from megasnn.layers.replicated import apply_layer, gather_channels
from megasnn.layers.row_context import own_pixel_rows
from megasnn.layers.shape_inference import to_channels_last
from megasnn.models.description import Built, Carried, LayerDescription, ModelDescription
from megasnn.parallel.sharding import ShardedTensor, described_tensors, materialise, sharded_tensors
from megasnn.pipeline.graphs import Capture, ChunkGraphs, why_not
from megasnn.telemetry.ranges import named


class PipelineChunk(nn.Module):
    """Layers `start..end` of a model, in order.

    A chunk is given what layers before it have given and it or a chunk behind it needs, and hands on what chunks behind
    it need, of its own layers' outputs and of what it was given. One without layers (legal in an explicit layout) hands
    its input on.

    Args:
        bounds: layers of each chunk.
        index: place among all chunks of the pipeline, from input to loss.
        layers: its own. context: of their building.
    Attributes:
        is_first, is_last: True if it takes the images, and if it gives the logits.
        receives, hands_on: tensors at its beginning and at its end, in their order.
        weight_gradients: takes the second part of its layers' backward.
        graphs: CUDA graphs of it in training; None without.
    """

    def __init__(
        self,
        description: ModelDescription,
        bounds: Sequence[range],
        index: int,
        layers: Sequence[nn.Module],
        context: BuildContext,
    ) -> None:
        super().__init__()
        self._description, self._span = description, bounds[index]
        span = self._span
        self.index = index
        self.is_first, self.is_last = index == 0, index == len(bounds) - 1
        self.names = [description.layers[i].name for i in span]
        self.weight_gradients = context.weight_gradients
        self.layers = nn.ModuleList(layers)
        self.receives, self.hands_on = description.carried(span.start), description.carried(span.stop)
        stateful = [each for each in self.layers.modules() if isinstance(each, (NeuronLayer, ParallelDropout))]
        self._carrying = [each for each in stateful if each.carries]
        self._last = [{*description.inputs[number]} - {*description.needed_from(number + 1)} for number in span]
        self._gives_one = [description.layers[number].entries.keys() == {None} for number in span]
        self._is_chain = description.is_chain
        self._context = context
        self.graphs: ChunkGraphs | None = None

    def capture_graphs(self, capture: Capture) -> None:
        """Runs as graphs in training from now on. Raises ValueError for a layer that cannot."""
        for name, layer in self.named_layers():
            if why := why_not(layer):
                raise ValueError(f"{name} cannot have CUDA graphs: {why}; use --cuda-graphs off")
        if len(self.layers):
            self.graphs = ChunkGraphs(self.layers, self._run, self.weight_gradients, capture)

    def part(self, bounds: Sequence[range], index: int) -> PipelineChunk:
        """A chunk of a finer cut, which is within this one and has its layers."""
        first = self._span.start
        layers = [self.layers[number - first] for number in bounds[index]]
        return PipelineChunk(self._description, bounds, index, layers, self._context)

    def forward(
        self,
        x: Tensor | Mapping[str, Tensor] | list[Tensor],
        samples: range | None = None,
        goes_on: bool = False,
        micro_batch: int = 0,
    ) -> Any:
        """
        Args:
            x: tensors of `receives`, in a list that is emptied, so that they are freed when they are used up; for the
                first chunk, inputs by name as they are loaded, or the tensor of the only one.
            samples: positions of the micro-batch's samples in the training, for dropout.
            goes_on: True for a later window of the samples that the last forward was on (--bptt-steps).
            micro_batch: its number in the step.
        Returns:
            tensors of `hands_on`; of the last chunk, the output of the model.
        """
        if not goes_on and self._carrying:
            self.forget()
        given = x if isinstance(x, list) else self._frames(x)
        if self.graphs is not None and torch.is_grad_enabled() and self.graphs.has(micro_batch):
            y = self.graphs.apply(given, samples, micro_batch)
            given.clear()
            return y
        return self._run(given, samples, goes_on)

    def _frames(self, x: Tensor | Mapping[str, Tensor]) -> list[Tensor]:
        """Tensors of `receives` from the samples of a micro-batch."""
        inputs = [*self._description.task.inputs.items()]
        named_inputs = {inputs[0][0]: x} if isinstance(x, Tensor) else x
        taken = [inputs[-1 - each.layer] for each in self.receives]
        return [own_pixel_rows(spec.frames(named_inputs[name]), self._context) for name, spec in taken]

    def _run(self, given: list[Tensor], samples: range | None, goes_on: bool = False) -> Any:
        outputs: dict[int, Bundle] = {self.receives[0].layer: given[0]}
        if not self._is_chain:
            outputs = _unpacked(self.receives, given)
        given.clear()
        for number, last, layer, gives_one in zip(self._span, self._last, self.layers, self._gives_one, strict=True):
            layer_description = self._description.layers[number]
            inputs, name = [outputs[source] for source in self._description.inputs[number]], layer_description.name
            for source in last:  # nothing behind this layer needs them
                del outputs[source]
            with explained(partial("{}: {}".format, name)), named(name):
                y = apply_layer(layer, inputs[0], samples, *inputs[1:], goes_on=goes_on)
            if not (gives_one and isinstance(y, Tensor)):
                _require_described(layer_description, y)
            y = map_entries(to_channels_last, y)
            outputs[number] = y if self._is_chain else _with_edges_of_their_own(y, inputs)
        if self.is_last:
            (output,) = outputs.values()
            cuts = vars(self.layers[-1]).get("_output_cuts") if len(self.layers) else None
            return output if cuts is None else gather_channels(output, cuts, self._context.tp)
        return [entries_of(outputs[each.layer])[each.key] for each in self.hands_on]

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
        """Tensors that another one owns."""
        return [entry for entry in described_tensors(self.named_layers()) if entry.is_copy]


def _require_described(description: LayerDescription, y: Bundle) -> None:
    """Raises ValueError for an output that is not built as that of the dry run was."""
    try:
        found, expected = entries_of(y).keys(), description.entries.keys()
    except ValueError as error:
        raise ValueError(f"{description.name}: {error}") from None
    if found != expected:
        raise ValueError(f"{description.name} gives {[*found]}, and gave {[*expected]} in the dry run")


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


Keep = Callable[[int, Sequence[nn.Module]], None]
"""Called with the number of a part and its layers when they have their values, before others get theirs."""


def build_chunks(
    description: ModelDescription,
    bounds: Sequence[range],
    indices: Collection[int],
    context: BuildContext,
    device: torch.device,
    seed: int,
    keep: tuple[Sequence[range], Keep] | None = None,
    built: Sequence[Built] | None = None,
) -> dict[int, PipelineChunk]:
    """Builds a rank's chunks: of all layers, only their own get memory, and keyed initial values.

    Args:
        indices: of these chunks.
        keep: layers that get their values at once, each part within one chunk, and what is called with each; None: the
            chunks.
        built: all layers for this rank; None to build them.
    """
    layers = [each.module for each in built or description.build(context)]
    parts, kept = keep or (bounds, lambda part, layers: None)
    chunks = {
        index: PipelineChunk(description, bounds, index, [layers[number] for number in bounds[index]], context)
        for index in indices
    }
    for index, chunk in chunks.items():
        span = bounds[index]
        for number, part in enumerate(parts):
            if part and part.start in span:
                within = [named for at, named in zip(span, chunk.named_layers(), strict=True) if at in part]
                materialise(within, device, seed)
                kept(number, [layer for _, layer in within])
    return chunks
