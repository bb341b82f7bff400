"""Summary of a model before it exists, from its description: shapes, parameters, operations, and where layers live."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from megasnn.kernels.spike_codec import Content
from megasnn.layers import ParallelConv, ParallelLinear
from megasnn.models.description import DRY_SAMPLES, LayerDescription

_HOLDS = {Content.SPIKES: "bits", Content.COUNTS: "counts", Content.DENSE: "dense"}


class OperationCounter(FlopCounterMode):
    """Counts multiply-adds in the dry run of a layer, around it; layers of ours give shapes alone there."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(display=False)
        self._layer, self._of_ours = layer, 0

    def __enter__(self) -> OperationCounter:
        ours = [each for each in self._layer.modules() if isinstance(each, (ParallelConv, ParallelLinear))]
        self._hooks = [each.register_forward_hook(self._add) for each in ours]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def _add(self, module: ParallelConv | ParallelLinear, inputs: object, output: Tensor) -> None:
        self._of_ours += output.numel() * module.weight[0].numel()

    @property
    def of_a_sample(self) -> int:
        return (self._of_ours + self.get_total_flops() // 2) // DRY_SAMPLES


def as_table(
    layers: Sequence[LayerDescription],
    bounds: Sequence[range],
    placement: Sequence[int],
    samples: int,
    compute_dtype: torch.dtype,
) -> str:
    """A table of Markdown.

    Args:
        bounds: the layers of each chunk. placement: the pipeline rank of each chunk.
        samples: of a micro-batch.
    """
    output = f"output of {samples} sample{'s' * (samples != 1)}"
    rows = [["layer", "unit", output, "holds", "kB", "parameters", "multiply-adds of a sample", "lives on"]]
    rows.append(["-"] * 4 + ["-:"] * 3 + ["-"])
    for chunk, (span, rank) in enumerate(zip(bounds, placement, strict=True)):
        place = f"pipeline rank {rank}, chunk {chunk}" if len(placement) > 1 else "every rank"
        for each in layers[span.start : span.stop]:
            shapes = ", ".join(" x ".join(map(str, shape)) for shape in each.output_shapes(samples))
            holds = ", ".join(_HOLDS[entry.content] for entry in each.entries.values())
            size = f"{each.output_bytes(samples, compute_dtype) / 1e3:,.1f}"
            rows.append(
                [each.name, each.unit, shapes, holds, size, f"{each.parameters:,}", f"{each.operations:,}", place]
            )
    sums = f"{sum(each.parameters for each in layers):,}", f"{sum(each.operations for each in layers):,}"
    rows.append(["all", "", "", "", "", *sums, ""])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def multiply_adds(layers: Sequence[LayerDescription]) -> str:
    """Multiply-adds of some layers together, in short."""
    return f"{1e-9 * sum(each.operations for each in layers):,.3g} G multiply-adds a sample"
