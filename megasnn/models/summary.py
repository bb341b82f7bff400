"""A summary of a model before it exists: what each layer gives, its parameters, its operations, and where it lives.

It comes from a dry run on the meta device: nothing has memory, and no data are needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from megasnn.bundle import Key, entries_of
from megasnn.config import ModelConfig
from megasnn.kernels import NeuronSpec
from megasnn.kernels.spike_codec import Content, encoded_like
from megasnn.layers import BuildContext, ParallelConv, ParallelLinear
from megasnn.models.build import built, dry_run
from megasnn.models.description import DRY_SAMPLES, LayerDescription, ModelDescription
from megasnn.models.layer import Layer
from megasnn.parallel.sharding import parameter_count, sharded_tensors

_HOLDS = {Content.SPIKES: "bits", Content.COUNTS: "counts", Content.DENSE: "dense"}


@dataclass(frozen=True)
class LayerSummary:
    """
    Attributes:
        name, unit: as in `Layer`.
        outputs: of each tensor that it gives for a micro-batch its shape, with all channels, and what it holds.
        output_bytes: of them, packed as they travel and are kept.
        parameters: number of their elements.
        operations: multiply-adds in a sample's forward: of convolutions, linear layers and products of matrices, each
            as often as it is computed here (of an image that all time steps see, once).
        is_cut: whether tensor parallel ranks share its tensors; otherwise each of them holds all.
    """

    name: str
    unit: str
    outputs: tuple[tuple[tuple[int, ...], Content], ...]
    output_bytes: int
    parameters: int
    operations: int
    is_cut: bool


def summarise(
    model: ModelConfig,
    neuron: NeuronSpec,
    described: ModelDescription,
    micro_batch_size: int,
    compute_dtype: torch.dtype = torch.float32,
) -> list[LayerSummary]:
    """Summaries of all layers, from input to logits.

    Args:
        described: what `describe` gives for this model and neuron.
    """
    layers = built(model, BuildContext(compute_dtype=compute_dtype), neuron)
    operations = _Operations()
    outputs = dry_run(operations.watching(layers), described.inputs, model.input_shape, compute_dtype)
    return [
        _summary(each, told, entries_of(output), count // DRY_SAMPLES, micro_batch_size)
        for each, told, output, count in zip(layers, described.layers, outputs, operations.counts, strict=True)
    ]


def _summary(
    each: Layer, told: LayerDescription, entries: Mapping[Key, Tensor], operations: int, micro_batch_size: int
) -> LayerSummary:
    outputs, packed = [], 0
    for key, entry in entries.items():
        shape, content = (entry.shape[0], micro_batch_size, *entry.shape[2:]), told.entries[key].content
        outputs.append((shape, content))
        packed += encoded_like(torch.Size(shape).numel(), content, entry.dtype, torch.device("meta")).nbytes
    tensors = list(sharded_tensors([(each.name, each.module)]))
    is_cut = any(axis == "tp" for entry in tensors for axis, _ in entry.shard.cuts)
    return LayerSummary(each.name, each.unit, tuple(outputs), packed, parameter_count(tensors), operations, is_cut)


class _Operations:
    """Counts multiply-adds of layers in the dry run of them all, in which layers of ours give shapes alone.

    Attributes:
        counts: of each layer that has run.
    """

    def __init__(self) -> None:
        self.counts: list[int] = []
        self._of_ours = 0

    def watching(self, layers: Sequence[Layer]) -> Iterator[tuple[str, nn.Module]]:
        """Layers with their names; each is counted until the next one is asked for."""
        with FlopCounterMode(display=False) as products:
            done = 0
            for each in layers:
                for module in each.module.modules():
                    if isinstance(module, (ParallelConv, ParallelLinear)):
                        module.register_forward_hook(self._add)
                yield each.name, each.module
                total = self._of_ours + products.get_total_flops() // 2
                self.counts.append(total - done)
                done = total

    def _add(self, module: ParallelConv | ParallelLinear, inputs: object, output: Tensor) -> None:
        self._of_ours += output.numel() * module.weight[0].numel()


def as_table(layers: Sequence[LayerSummary], bounds: Sequence[range], placement: Sequence[int], tensor: int) -> str:
    """A table of Markdown, aligned for people.

    Args:
        bounds: the layers of each chunk. placement: the pipeline rank of each chunk.
        tensor: number of tensor parallel ranks.
    """
    home = {index: (chunk, rank) for chunk, rank in enumerate(placement) for index in bounds[chunk]}
    samples = layers[0].outputs[0][0][1]
    output = f"output of {samples} sample{'s' * (samples != 1)}"
    rows = [["layer", "unit", output, "holds", "kB", "parameters", "multiply-adds of a sample", "lives on"]]
    for index, each in enumerate(layers):
        chunk, rank = home[index]
        share = f", cut in {tensor}" if each.is_cut and tensor > 1 else ", whole" if tensor > 1 else ""
        place = f"pipeline rank {rank}, chunk {chunk}" if len(placement) > 1 else "every rank"
        shapes = ", ".join(" x ".join(map(str, shape)) for shape, _ in each.outputs)
        holds = ", ".join(_HOLDS[content] for _, content in each.outputs)
        sizes = (f"{each.output_bytes / 1e3:,.1f}", f"{each.parameters:,}", f"{each.operations:,}")
        rows.append([each.name, each.unit, shapes, holds, *sizes, place + share])
    sums = f"{sum(each.parameters for each in layers):,}", f"{sum(each.operations for each in layers):,}"
    rows.append(["all", "", "", "", "", *sums, ""])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [_line(row, widths) for row in rows]
    rule = [f"{'-' * (width - 1)}{':' if column in _NUMBERS else '-'}" for column, width in enumerate(widths)]
    return "\n".join([lines[0], _line(rule, widths), *lines[1:]])


_NUMBERS = (4, 5, 6)  # columns


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    sides = (
        cell.rjust(width) if column in _NUMBERS else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return f"| {' | '.join(sides)} |"


def multiply_adds(layers: Sequence[LayerSummary]) -> str:
    """Multiply-adds of some layers together, in short."""
    return f"{_short(sum(each.operations for each in layers))} multiply-adds a sample"


def _short(number: float) -> str:
    for unit in ("", " k", " M"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:,.3g} G" if number < 1000 else f"{number:,.0f} G"
