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
from megasnn.layers.tensors import described_tensors, materialise, sharded_tensors
from megasnn.models.description import Built, Carried, ModelDescription
from megasnn.parallel.sharding import ShardedTensor
from megasnn.pipeline.graphs import Capture, ChunkGraphs, why_not
from megasnn.telemetry.timers import named


class PipelineChunk(nn.Module):
    """Layers `start..end` of a model, in order.

    Receives the earlier outputs that this or a later chunk uses; passes on those that later chunks use. A chunk without
    layers, as an explicit layout may have it, passes its input on.

    Args:
        bounds: layers of each chunk.
        index: position among all chunks of the pipeline, from input to loss.
        layers: of this chunk. context: of their building.
    Attributes:
        is_first, is_last: True if it takes the images, and if it gives the logits.
        receives, hands_on: tensors at its beginning and at its end, in order.
        weight_gradients: the second part of its layers' backward.
        graphs: its CUDA graphs in training; None without.
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
        span = bounds[index]
        self.index = index
        self.is_first = index == 0
        self.is_last = index == len(bounds) - 1
        self.names = [description.layers[number].name for number in span]
        self.weight_gradients = context.weight_gradients
        self.layers = nn.ModuleList(layers)
        self.receives = description.carried(span.start)
        self.hands_on = description.carried(span.stop)
        self.graphs: ChunkGraphs | None = None
        self._description = description
        self._span = span
        self._is_chain = description.is_chain
        stateful = [module for module in self.layers.modules() if isinstance(module, (NeuronLayer, ParallelDropout))]
        self._carrying = [module for module in stateful if module.carries]
        # Inputs of each layer that no later layer takes.
        self._last: list[set[int]] = []
        for number in span:
            needed_later = description.needed_from(number + 1)
            self._last.append({*description.layers[number].inputs} - {*needed_later})
        self._context = context
        self._rows = row_group(context)

    def capture_graphs(self, capture: Capture) -> None:
        """Runs as graphs in training from now on. Raises ValueError for a layer that cannot."""
        for name, layer in self.named_layers():
            why = why_not(layer)
            if why:
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
            x: tensors of `receives`, in a list that is emptied, so that each is freed with its last use; for the first
                chunk, loaded inputs by name, or the tensor of the only one.
            samples: positions of the micro-batch's samples in the training, for dropout.
            goes_on: True for a later window of the samples of the last forward (--bptt-steps).
            micro_batch: its number in the step.
        Returns:
            tensors of `hands_on`; of the last chunk, the output of the model.
        """
        if not goes_on and self._carrying:
            self.forget()
        if not isinstance(x, list):  # samples of a micro-batch
            inputs = [*self._description.task.inputs.items()]
            named_inputs = {inputs[0][0]: x} if isinstance(x, Tensor) else x
            specs = [inputs[-1 - carried.layer] for carried in self.receives]
            x = [spec.frames(named_inputs[name]) for name, spec in specs]
            if self._rows is not None:
                x = [own_pixel_rows(frames, self._rows) for frames in x]
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
            name = described.name
            inputs = [outputs[source] for source in described.inputs]
            for source in last:  # `inputs` has the last reference
                del outputs[source]
            with explained(partial("{}: {}".format, name)), named(name):
                y = apply_layer(layer, inputs[0], samples, *inputs[1:], goes_on=goes_on)
                if self._is_chain and isinstance(y, Tensor):
                    outputs[number] = to_channels_last(y)
                    continue
                keys = entries_of(y).keys()
                if keys != described.entries.keys():
                    raise ValueError(f"it gives {[*keys]}, and gave {[*described.entries]} in the dry run")
            outputs[number] = _with_edges_of_their_own(map_entries(to_channels_last, y), inputs)
        if self.is_last:
            (output,) = outputs.values()
            return output
        return [entries_of(outputs[each.layer])[each.key] for each in self.hands_on]

    def forget(self) -> None:
        """Resets the state that the last forward left in neurons, and the time steps of dropout."""
        for layer in self._carrying:
            layer.forget()

    @contextmanager
    def only_graph(self) -> Iterator[None]:
        """Surrounds a forward that is computed again for its graph alone.

        The last neurons need not fire: their spikes have left the chunk. Raises ValueError for a layer that has changed
        what the first forward kept.
        """
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
        """Tensors of this chunk that another layer owns (ties)."""
        return [entry for entry in described_tensors(self.named_layers()) if entry.is_copy]


def _unpacked(carried: Sequence[Carried], tensors: Sequence[Tensor]) -> dict[int, Bundle]:
    """Outputs that a boundary carried, by number of their layer."""
    entries: dict[int, dict[EntryKey, Tensor]] = {}
    for each, tensor in zip(carried, tensors, strict=True):
        entries.setdefault(each.layer, {})[each.key] = tensor
    return {number: bundle_of(of_layer) for number, of_layer in entries.items()}


def _with_edges_of_their_own(y: Bundle, inputs: Sequence[Bundle]) -> Bundle:
    """An output with an edge of its own in the graph where it is one of the inputs.

    Its gradients are summed apart from the input's, as with a boundary between them: the order of a sum does not depend
    on the cut into chunks.
    """
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
    """Builds a rank's chunks. Only their layers get memory, and keyed initial values.

    Args:
        indices: of these chunks.
        built: all layers for this rank; None to build them.
        shard: layers of each segment, and a function that is called with a segment's number and layers as soon as they
            have their values: with gathered weights, one segment at a time is whole.
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
