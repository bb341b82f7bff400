"""An evaluation's synaptic operations, counted in all ranks' convolutions, linear and output layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megasnn.engine.model import DistributedModel
from megasnn.kernels.spike_codec import Content
from megasnn.layers.vocabulary import NextTokenLoss
from megasnn.layers.weighted import WeightedLayer
from megasnn.parallel.agreement import gather
from megasnn.telemetry.operations import LayerOperations, OperationCounter, add_ranks, times_used
from megasnn.telemetry.spikes import position_in_model

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


class Operations:
    """Counts the synaptic operations of this rank's layers, inside `counting`."""

    def __init__(self, distributed: DistributedModel) -> None:
        self._state = distributed.state
        self._order = distributed.description.layer_names
        self._counter = OperationCounter()
        self._modules: dict[nn.Module, str] = {}
        for chunk in distributed.chunks.values():
            for layer_name, layer in chunk.named_layers():
                for name, module in layer.named_modules(prefix=layer_name):
                    # Layers may share a module: the first name stays.
                    self._modules.setdefault(module, name)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Observes the layers inside the block."""
        hooks = []
        for module, name in self._modules.items():
            if isinstance(module, WeightedLayer):
                module.observer = partial(self._observe_weighted, name, module)
            elif isinstance(module, NextTokenLoss):
                hooks.append(module.register_forward_pre_hook(partial(self._observe_loss, name)))
            # A torch module is whole on every tensor parallel rank: the first one counts.
            elif isinstance(module, nn.Linear | Convolution) and self._state.tp.rank == 0:
                hooks.append(module.register_forward_pre_hook(partial(self._observe_torch, name)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for module in self._modules:
                if isinstance(module, WeightedLayer):
                    module.observer = None

    def mean_per_sample(self, samples: int) -> list[LayerOperations]:
        """Mean operations per sample, by layer in model order; ends the count. Collective."""
        of_ranks = gather(self._state.world.handle, self._counter.take())
        found = add_ranks(of_ranks, samples)
        return sorted(found, key=lambda each: position_in_model(each.name, self._order))

    def _observe_weighted(self, name: str, layer: WeightedLayer, images: Tensor, steps: int) -> None:
        are_spikes = layer.options.content is Content.SPIKES and layer.options.pool == 1
        self._counter.observe(name, images, layer.times_used, steps, are_spikes)

    def _observe_loss(self, name: str, layer: Any, inputs: tuple[Tensor, ...]) -> None:
        # Its product takes the mean over time. Each rank has its own channels and tokens, for the whole vocabulary.
        mean = inputs[0].detach().mean(0)
        self._counter.observe(name, mean, partial(torch.full, fill_value=float(layer.vocab_size)))

    def _observe_torch(self, name: str, module: Any, inputs: tuple[Tensor, ...]) -> None:
        """For torch modules, or SpikingJelly's with an input for all time steps."""
        x = inputs[0].detach()
        if isinstance(module, nn.Linear):
            rows = x.reshape(-1, x.shape[-1], 1)
            self._counter.observe(name, rows, partial(torch.full, fill_value=float(module.out_features)))
            return
        images = x.flatten(0, x.ndim - len(module.kernel_size) - 2)
        self._counter.observe(name, images, partial(_times_used, module))


def _times_used(module: Convolution, space: Sequence[int]) -> Tensor:
    """Number of outputs that each input pixel contributes to, in a torch convolution; shape `space`."""
    kinds: dict[int, Callable[..., Convolution]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
    one_channel = kinds[len(space)](
        1,
        1,
        module.kernel_size,
        module.stride,
        module.padding,
        module.dilation,
        bias=False,
        padding_mode=module.padding_mode,
        dtype=torch.float64,
        device="cpu",
    )
    nn.init.ones_(one_channel.weight)
    return times_used(one_channel, space) * (module.out_channels // module.groups)
