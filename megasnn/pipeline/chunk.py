"""A contiguous run of layers that one pipeline rank owns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megasnn.common.bundle import Bundle, EntryKey, bundle_of, entries_of, map_entries, plain_bundle
from megasnn.common.checks import Words, explained
from megasnn.kernels.layout import to_channels_last
from megasnn.layers.apply import apply_layer
from megasnn.layers.blocks import ConvNormNeuron
from megasnn.layers.context import BuildContext
from megasnn.layers.dropout import DropPath, ParallelDropout, drawing_for
from megasnn.layers.facts import facts
from megasnn.layers.neuron import NeuronLayer
from megasnn.layers.row_context import own_pixel_rows
from megasnn.layers.tensors import described_tensors, materialise, sharded_tensors
from megasnn.layers.token_context import own_tokens
from megasnn.models.description import Built, Carried, ModelDescription
from megasnn.parallel.sharding import ShardedTensor
from megasnn.pipeline.graph_capture import Capture
from megasnn.pipeline.graphs import ChunkGraphs, why_not
from megasnn.telemetry.timers import is_traced, named


@dataclass(frozen=True, slots=True)
class _LayerCall:
    """A layer's call in a chunk.

    Attributes:
        words: put its name before an error message.
        is_ours: MegaSNN's own; `apply_layer` calls any other module.
        inputs: numbers of the layers whose outputs it takes.
        entries: of its output in the dry run.
    """

    number: int
    name: str
    words: Words
    layer: nn.Module
    is_ours: bool
    inputs: tuple[int, ...]
    last_uses: frozenset[int]
    entries: Mapping[EntryKey, Any]


_Caller = Callable[[_LayerCall, list[Bundle], range | None, bool], Bundle]
"""(call, inputs, positions of the samples, whether a window goes on) -> the layer's output."""


class PipelineChunk(nn.Module):
    """Consecutive layers of a model.

    Receives earlier outputs that this or a later chunk uses; passes on outputs for later chunks. Without layers
    (explicit layout) it passes its input on.

    Args:
        index: position among all chunks, from input to loss.
    Attributes:
        receives, hands_on: tensors at the boundaries before and after the chunk.
        graphs: CUDA graphs for training, or None.
        explained: puts its layers' names before errors of a recomputation.
        without_spikes: surrounds a recomputation; the last neurons' spikes, which have left the chunk, stay zeros.
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
        self._input_names = description.task.input_names
        self._input_specs = description.task.inputs
        self._target = description.task.target_number
        self._target_spec = description.task.target_spec
        self.takes_targets = any(self._target in description.layers[number].inputs for number in span)
        if self.takes_targets and not self.is_last:
            raise ValueError(
                f"{self.names[-1]} takes the targets, and a chunk without layers follows it: give the last chunk of "
                "--pipeline-model-parallel-layout a layer"
            )
        self._stateful: list[NeuronLayer | ParallelDropout] = []
        self._drawing: Callable[[range | None], AbstractContextManager[object]] = nullcontext
        for module in self.layers.modules():
            if isinstance(module, (NeuronLayer, ParallelDropout)) and module.stateful:
                self._stateful.append(module)
            if isinstance(module, (ParallelDropout, DropPath)):
                self._drawing = drawing_for
        self._calls: list[_LayerCall] = []
        for number, layer in zip(span, layers, strict=True):
            described = description.layers[number]
            last_uses = frozenset(described.inputs).difference(description.needed_from(number + 1))
            call = _LayerCall(
                number=number,
                name=described.name,
                words=partial("{}: {}".format, described.name),
                layer=layer,
                is_ours=facts(layer).call is None,
                inputs=described.inputs,
                last_uses=last_uses,
                entries=described.entries,
            )
            self._calls.append(call)
        self._explained_layer = explained(str)
        self.explained = explained(partial("{}: {}".format, ", ".join(self.names)))
        self.without_spikes: Callable[[], AbstractContextManager[None]] = nullcontext
        last = layers[-1] if layers else None
        # A derived class may use the spikes in a forward of its own.
        if isinstance(last, ConvNormNeuron) and type(last).forward is ConvNormNeuron.forward and not self.is_last:
            self.without_spikes = last.without_spikes
        self._context = context
        self._rows = context.row_group
        self._tokens = context.token_group

    def capture_graphs(self, capture: Capture) -> None:
        """Runs training steps as CUDA graphs from now on. Raises ValueError for an unsupported layer."""
        for name, layer in self.named_layers():
            reason = why_not(layer)
            if reason:
                raise ValueError(f"{name} cannot have CUDA graphs: {reason}; use --cuda-graphs off")
        if len(self.layers):
            self.graphs = ChunkGraphs(self.layers, self.forward, self.weight_gradients, capture)

    def part(self, bounds: Sequence[range], index: int) -> PipelineChunk:
        """Chunk from a finer division, inside this chunk. Shares its layers."""
        first = self._span.start
        layers = [self.layers[number - first] for number in bounds[index]]
        return PipelineChunk(self._description, bounds, index, layers, self._context)

    def forward(
        self,
        x: Tensor | Mapping[str, Tensor] | list[Tensor],
        samples: range | None = None,
        goes_on: bool = False,
        micro_batch: int | None = None,
        targets: Tensor | None = None,
    ) -> Any:
        """Computes the layers for one micro-batch.

        Args:
            x: list with tensors for `receives`, emptied to free each tensor after its last use. First chunk: inputs by
                name, or a single input.
            samples: positions in the whole training, for dropout.
            goes_on: a later window with the last forward's samples (--bptt-steps).
            micro_batch: number in the step; None runs without CUDA graphs.
            targets: for a chunk that takes them (`takes_targets`); None in a prediction.
        Returns:
            Tensors for `hands_on`; the last chunk returns the model's output.
        """
        if not goes_on and self._stateful:
            self.forget()
        received = x if isinstance(x, list) else self._frames_of(x)
        if self.takes_targets and targets is not None:
            # CUDA graphs copy it in, like all that a chunk receives.
            received.append(self._target_spec.frames(targets))
        if self.graphs is not None and micro_batch is not None and torch.is_grad_enabled():
            if self.graphs.take_slot(micro_batch):
                y = self.graphs.apply(received, samples, micro_batch)
                received.clear()
                return y
        call = self._trace_call if is_traced() else self._call_layer
        with self._explained_layer, self._drawing(samples):
            # Most models are chains, which need no table of outputs: the host has fewer calls to make.
            if self._is_chain:
                output: Bundle = received.pop()
                for each in self._calls:
                    output = call(each, [output], samples, goes_on)
                return output if self.is_last else [output]
            outputs = self._outputs_by_layer(call, received, samples, goes_on)
        if self.is_last:
            (output,) = outputs.values()
            return output
        return [entries_of(outputs[each.layer])[each.key] for each in self.hands_on]

    def _outputs_by_layer(
        self, call: _Caller, received: list[Tensor], samples: range | None, goes_on: bool
    ) -> dict[int, Bundle]:
        """Computes layers with any inputs. Returns the outputs for `hands_on`, by layer number."""
        target_frames = received.pop() if len(received) > len(self.receives) else None
        outputs = _unpack(self.receives, received)
        if target_frames is not None:
            outputs[self._target] = target_frames
        received.clear()
        for each in self._calls:
            # A prediction has no targets.
            inputs = [outputs[source] for source in each.inputs if source in outputs]
            # `inputs` holds the last reference: a tensor is freed after its last use.
            for source in each.last_uses:
                outputs.pop(source, None)
            outputs[each.number] = _with_own_edges(call(each, inputs, samples, goes_on), inputs)
        return outputs

    def _frames_of(self, inputs: Tensor | Mapping[str, Tensor]) -> list[Tensor]:
        """The model's inputs as layers take them; on ranks that divide rows or tokens, this rank's."""
        named_inputs = {self._input_names[-1]: inputs} if isinstance(inputs, Tensor) else inputs
        found = []
        for carried in self.receives:
            name = self._input_names[carried.layer]
            frames = self._input_specs[name].frames(named_inputs[name])
            if self._rows is not None:
                frames = own_pixel_rows(frames, self._rows)
            elif self._tokens is not None:
                frames = own_tokens(frames, self._tokens)
            found.append(frames)
        return found

    def _call_layer(self, each: _LayerCall, inputs: list[Bundle], samples: range | None, goes_on: bool) -> Bundle:
        """A layer's output in the order of its dry run, with channels last in memory."""
        self._explained_layer.words = each.words
        if each.is_ours:
            y: Bundle = each.layer(*inputs)
        else:
            y = apply_layer(each.layer, inputs[0], samples, *inputs[1:], goes_on=goes_on)
        if isinstance(y, Tensor) and None in each.entries:
            return to_channels_last(y)
        keys = entries_of(y).keys()
        if keys != each.entries.keys():
            raise ValueError(f"its output has the entries {[*keys]}, in the dry run {[*each.entries]}")
        return map_entries(to_channels_last, plain_bundle(y))

    def _trace_call(self, each: _LayerCall, inputs: list[Bundle], samples: range | None, goes_on: bool) -> Bundle:
        with named(each.name):
            return self._call_layer(each, inputs, samples, goes_on)

    def forget(self) -> None:
        """Resets stateful neurons and dropout's time steps."""
        for layer in self._stateful:
            layer.forget()

    def __len__(self) -> int:
        return len(self.layers)

    def __bool__(self) -> bool:
        # A chunk without layers is a chunk too; `__len__` alone would make it false.
        return True

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.layers)

    def __getitem__(self, layer: int | str) -> nn.Module:
        """A layer by its number in this chunk, or by its global name. Raises IndexError or KeyError."""
        if isinstance(layer, int):
            return self.layers[layer]
        if layer not in self.names:
            raise KeyError(f"chunk {self.index} has no layer {layer!r}; it has {', '.join(self.names) or 'none'}")
        return self.layers[self.names.index(layer)]

    def named_layers(self) -> Iterator[tuple[str, nn.Module]]:
        return zip(self.names, self.layers, strict=True)

    def sharded_tensors(self) -> list[ShardedTensor]:
        return list(sharded_tensors(self.named_layers()))

    def described_tensors(self) -> list[ShardedTensor]:
        """Own tensors, then copies: tied tensors with an owner in another layer."""
        return sorted(described_tensors(self.named_layers()), key=lambda entry: entry.is_copy)


def _unpack(carried: Sequence[Carried], tensors: Sequence[Tensor]) -> dict[int, Bundle]:
    entries: dict[int, dict[EntryKey, Tensor]] = {}
    for each, tensor in zip(carried, tensors, strict=True):
        entries.setdefault(each.layer, {})[each.key] = tensor
    return {number: bundle_of(of_layer) for number, of_layer in entries.items()}


def _with_own_edges(y: Bundle, inputs: Sequence[Bundle]) -> Bundle:
    """The output, with new autograd edges for inputs that the layer returns unchanged."""
    seen = set()
    for x in inputs:
        seen |= {id(entry) for entry in entries_of(x).values()}

    def apart(entry: Tensor) -> Tensor:
        # Autograd then sums its gradients separately from the input's, as at a chunk boundary. So the order of sums
        # does not depend on the division into chunks.
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
    """Builds a rank's chunks; only their layers get memory and keyed initial values.

    Args:
        built: all layers for this rank; None to build them.
        shard: layers in each segment, and a function called with a segment's number and layers after their
            initialisation. It shards weights, so one segment at a time is whole.
    """
    layers = [each.module for each in built or description.build(context)]
    segments, shard_segment = shard or (bounds, None)
    for number, segment in enumerate(segments):
        if segment and any(segment.start in bounds[index] for index in indices):
            named_layers = [(description.layers[at].name, layers[at]) for at in segment]
            materialise(named_layers, device, seed)
            if shard_segment is not None:
                shard_segment(number, [layer for _, layer in named_layers])
    chunks = {}
    for index in indices:
        own_layers = [layers[number] for number in bounds[index]]
        chunks[index] = PipelineChunk(description, bounds, index, own_layers, context)
    return chunks
