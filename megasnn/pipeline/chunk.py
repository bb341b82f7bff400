"""A contiguous run of layers that one pipeline rank owns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megasnn.common.bundle import Bundle, EntryKey, bundle_of, entries_of, map_entries
from megasnn.common.checks import explained
from megasnn.layers.blocks import ConvNormNeuron
from megasnn.layers.context import BuildContext
from megasnn.layers.dropout import ParallelDropout
from megasnn.layers.neuron import NeuronLayer
from megasnn.layers.plain.replicated import apply_layer
from megasnn.layers.row_context import own_pixel_rows, row_group
from megasnn.layers.shape_inference import to_channels_last
from megasnn.models.description import Built, Carried, ModelDescription
from megasnn.parallel.sharding import ShardedTensor, described_tensors, materialise, sharded_tensors
from megasnn.pipeline.graphs import Capture, ChunkGraphs, why_not
from megasnn.telemetry.timers import named


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
        self._is_chain = description.is_chain
        stateful = [each for each in self.layers.modules() if isinstance(each, (NeuronLayer, ParallelDropout))]
        self._carrying = [each for each in stateful if each.carries]
        self._last = [{*description.layers[number].inputs} - {*description.needed_from(number + 1)} for number in span]
        self._context, self._rows = context, row_group(context)
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
        if not isinstance(x, list):  # samples of a micro-batch
            inputs = [*self._description.task.inputs.items()]
            named_inputs = {inputs[0][0]: x} if isinstance(x, Tensor) else x
            specs = [inputs[-1 - each.layer] for each in self.receives]
            x = [spec.frames(named_inputs[name]) for name, spec in specs]
            x = x if self._rows is None else [own_pixel_rows(each, self._rows) for each in x]
        if self.graphs is not None and torch.is_grad_enabled() and self.graphs.has(micro_batch):
            y = self.graphs.apply(x, samples, micro_batch)
            x.clear()
            return y
        return self._run(x, samples, goes_on)

    def _run(self, received: list[Tensor], samples: range | None, goes_on: bool = False) -> Any:
        outputs: dict[int, Bundle] = {self.receives[0].layer: received[0]}
        if not self._is_chain:
            outputs = _unpacked(self.receives, received)
        received.clear()
        for number, last, layer in zip(self._span, self._last, self.layers, strict=True):
            described = self._description.layers[number]
            inputs, name = [outputs[source] for source in described.inputs], described.name
            for source in last:  # nothing behind this layer needs them
                del outputs[source]
            with explained(partial("{}: {}".format, name)), named(name):
                y = apply_layer(layer, inputs[0], samples, *inputs[1:], goes_on=goes_on)
                if self._is_chain and isinstance(y, Tensor):
                    outputs[number] = to_channels_last(y)
                    continue
                if (keys := entries_of(y).keys()) != described.entries.keys():
                    raise ValueError(f"it gives {[*keys]}, and gave {[*described.entries]} in the dry run")
            outputs[number] = _with_edges_of_their_own(map_entries(to_channels_last, y), inputs)
        if self.is_last:
            (output,) = outputs.values()
            return output
        return [entries_of(outputs[each.layer])[each.key] for each in self.hands_on]

    def forget(self) -> None:
        """Lets neurons forget the state that the last forward left, and dropout its time steps."""
        for layer in self._carrying:
            layer.forget()

    @contextmanager
    def only_graph(self) -> Iterator[None]:
        """Surrounds a forward that is computed again for its graph: the last neurons, whose spikes only leave the
        chunk, need not fire. Raises ValueError for one that has changed what is kept."""
        last: Any = self.layers[-1] if len(self.layers) else None
        skips = not self.is_last and isinstance(last, ConvNormNeuron) and type(last).forward is ConvNormNeuron.forward
        try:
            if skips:
                last.fires = False
            with explained(partial("{}: {}".format, ", ".join(self.names))):
                yield
        finally:
            if skips:
                last.fires = True

    def named_layers(self) -> Iterator[tuple[str, nn.Module]]:
        return zip(self.names, self.layers, strict=True)

    def sharded_tensors(self) -> list[ShardedTensor]:
        return list(sharded_tensors(self.named_layers()))

    def copied_tensors(self) -> list[ShardedTensor]:
        """Tensors that another one owns."""
        return [entry for entry in described_tensors(self.named_layers()) if entry.is_copy]


def _unpacked(carried: Sequence[Carried], tensors: Sequence[Tensor]) -> dict[int, Bundle]:
    """Outputs that a boundary carried, by the number of their layer."""
    entries: dict[int, dict[EntryKey, Tensor]] = {}
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


def build_chunks(
    description: ModelDescription,
    bounds: Sequence[range],
    indices: Collection[int],
    context: BuildContext,
    device: torch.device,
    seed: int,
    built: Sequence[Built] | None = None,
    shard: tuple[Sequence[range], Callable[[int, Sequence[nn.Module]], None]] | None = None,
) -> dict[int, PipelineChunk]:
    """Builds a rank's chunks: of all layers, only their own get memory, and keyed initial values.

    Args:
        indices: of these chunks.
        built: all layers for this rank; None to build them.
        shard: layers of each segment, and what is called with a segment's number and its layers when these have their
            values, before others get theirs.
    """
    layers = [each.module for each in built or description.build(context)]
    segments, keep = shard or (bounds, None)
    for number, segment in enumerate(segments):
        if segment and any(segment.start in bounds[index] for index in indices):
            materialise([(description.layers[at].name, layers[at]) for at in segment], device, seed)
            if keep is not None:
                keep(number, [layers[at] for at in segment])
    return {
        index: PipelineChunk(description, bounds, index, [layers[number] for number in bounds[index]], context)
        for index in indices
    }
