"""What the boundaries between stages carry, found by every rank before a step: it follows from the model.

A dry run of the whole model on as many samples as a micro-batch has shows the shape and type of every tensor on this
rank, and a boundary is between ranks that have the same part of it. Layers made of MegaSNN's layers give it with its
channels last (megasnn/layers/shape_inference.py), and get its gradient so. Only plain modules (`nn.Module`s of one's
own, networks given to `megasnn.shard`) may give any memory order, which another stage has to be told; and so is
whether a tensor needs a gradient, where a layer may have cut it off from what is trained before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from megasnn.bundle import Key, entries_of
from megasnn.kernels.spike_codec import Content
from megasnn.layers.context import BuildContext
from megasnn.layers.init import tensors_of
from megasnn.layers.row_context import WholeImages
from megasnn.layers.shape_inference import channels_last, gives_channels_last
from megasnn.models.description import INPUT, Carried, ModelDescription
from megasnn.parallel.sharding import own_rows
from megasnn.pipeline.p2p import TensorDescriptor

Place = tuple[int, Key]
"""The number of a layer, and which entry of its output."""


class Boundaries:
    """
    Args:
        context: what this rank's layers were built with.
    """

    def __init__(self, model: ModelDescription, context: BuildContext) -> None:
        self._model, self._context = model, context
        self._known: dict[int, dict[Place, TensorDescriptor]] = {}

    def find(self, sizes: Iterable[int]) -> None:
        """Before a step with micro-batches of these sizes. Raises ValueError for layers that cannot take them in
        training."""
        trains = torch.is_grad_enabled()
        for samples in set(sizes) - self._known.keys():
            with torch.inference_mode(False):  # of the caller: what is found serves training too
                self._known[samples] = self._of(samples, trains)

    def planned(self, carried: Carried, samples: int) -> TensorDescriptor | None:
        """A tensor of a micro-batch of so many samples, as dense values; None where its sender has to tell."""
        found = self._known[samples].get((carried.layer, carried.key))
        return None if found is None else replace(found, learns=found.learns and torch.is_grad_enabled())

    def _of(self, samples: int, trains: bool) -> dict[Place, TensorDescriptor]:
        if self._model.dry_run is None:
            return {}
        try:
            ran = self._model.dry_run(self._context, samples)
        except ValueError as error:
            # Layers are tried as in training. Evaluation may do without what they miss there, as norms without a second
            # value; and in training these have something else to say in a step.
            if not trains or "value per channel" in str(error):
                return {}
            raise
        found: dict[Place, TensorDescriptor] = {}
        may_learn, is_by_rows = {INPUT: False}, {INPUT: True}
        for number, (layer, output) in enumerate(ran):
            takes = self._model.inputs[number]
            may_learn[number] = any(each.requires_grad for each in tensors_of(layer)) or any(
                may_learn[each] for each in takes
            )
            joins = any(isinstance(each, WholeImages) for each in layer.modules())
            is_by_rows[number] = not joins and all(is_by_rows[each] for each in takes)
            if gives_channels_last(layer):
                for key, entry in entries_of(output).items():
                    own, learns = self._own(entry, is_by_rows[number]), entry.requires_grad
                    is_clear = learns or not may_learn[number] or not entry.is_floating_point()
                    if own is not None and is_clear:
                        own = channels_last(own.detach()).requires_grad_(learns)
                        found[number, key] = TensorDescriptor.of(own, Content.DENSE)
        return found

    def _own(self, entry: Tensor, is_by_rows: bool) -> Tensor | None:
        """What this rank has of a tensor, where ranks share out the rows of images, which the dry run sees whole; None
        where that is not certain."""
        rows, frames = self._context.context, 2 + len(self._model.input_shape[-3:])
        if self._context.cut != "rows" or rows.size == 1 or entry.ndim < 4:
            return entry
        if not is_by_rows or entry.ndim != frames:
            return None
        height = len(own_rows(entry.shape[3], rows.size, rows.rank))
        return entry.new_empty((*entry.shape[:3], height, *entry.shape[4:]))
