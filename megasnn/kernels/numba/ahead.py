"""Compiles the neurons' kernels before the first step, shared among the ranks of a host."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import NamedTuple

import torch

from megasnn.kernels.neuron_spec import NEURONS, NeuronSpec
from megasnn.kernels.norm_neuron_kernels import NeuronInput, NeuronUse, NormNeuron, NormNeuronInput
from megasnn.kernels.numba.bispike import NumbaBiSpike
from megasnn.kernels.numba.jit import progress
from megasnn.kernels.numba.neuron import NumbaNeuron
from megasnn.kernels.numba.norm_neuron import NumbaNormNeuron
from megasnn.kernels.torch_backend import computed_in

_SHAPE = 1, 1, 8, 2, 2  # T, N, C, H, W of the trial input
_SECONDS = {  # processor seconds of compiling on an AMD EPYC (Zen 4), which order the work
    "backward with pooling": 4.0,
    "forward with pooling": 2.0,
    "statistics": 1.8,
    "backward": 1.7,
    "backward without norm": 1.3,
    "ternary forward": 1.3,
    "ternary backward": 0.9,
    "forward": 1.2,
    "forward without norm": 1.1,
    "input gradient": 0.5,
}


class Trial(NamedTuple):
    """A call on a few values, which compiles a kernel for the call's types."""

    name: str
    spec: NeuronSpec | None
    call: Callable[[], object]


def compile_ahead(uses: Collection[NeuronUse], dtype: torch.dtype, trains: bool, rank: int = 0, ranks: int = 1) -> None:
    """Compiles or loads all kernels of a run. The ranks of a host begin with different ones.

    Args:
        rank, ranks: this process, and the processes on its host that call this.
    """
    trials: dict[tuple[str, NeuronSpec | None], Trial] = {}
    for use in sorted(uses, key=repr):
        for trial in trials_of(use, dtype, trains):
            trials.setdefault((trial.name, trial.spec), trial)
    ordered = sorted(trials.values(), key=lambda each: -_SECONDS[each.name])
    # A rank compiles its share first. By the time it comes to the others, they are in the cache on disk.
    mine = ordered[rank % ranks :: ranks]
    progress.total = len(ordered)
    for progress.position, trial in enumerate([*mine, *(each for each in ordered if each not in mine)], start=1):
        trial.call()
    progress.total = 0


def trials_of(use: NeuronUse, dtype: torch.dtype, trains: bool) -> Iterator[Trial]:
    spec = use.spec
    x = torch.zeros(_SHAPE, dtype=dtype)
    if NEURONS[spec.kind].ternary:
        yield from _trials_of_ternary(spec, dtype, trains)
        return
    w = torch.zeros((), dtype=dtype) if NEURONS[spec.kind].learns else None
    if not use.has_norm:
        neuron = NumbaNeuron(x.shape, dtype, spec)
        alone = NeuronInput(x, None, w)
        yield Trial("forward without norm", spec, partial(neuron.fire, alone, packed=True))
        if trains:
            yield Trial("backward without norm", spec, partial(neuron.backward, alone, x, None, learn=False))
        return
    channels = x.shape[2]
    norm_neuron = NormNeuron(spec, 1e-5, use.pools, time_steps=1)
    kernels = NumbaNormNeuron(x.shape, dtype, norm_neuron)
    inputs = NormNeuronInput(x, torch.zeros(channels).double(), torch.ones(channels).double(), None, None, w)
    g_spikes = torch.zeros(norm_neuron.shape_of_spikes(x), dtype=dtype)
    pooled = " with pooling" if use.pools else ""
    yield Trial(f"forward{pooled}", spec, partial(kernels.fire, inputs, packed=True))
    if trains:
        yield Trial("statistics", None, partial(kernels.statistics, x))
        yield Trial(f"backward{pooled}", spec, partial(kernels.backward_sums, inputs, g_spikes, learn=False))
        gradient = torch.zeros(x.movedim(2, -1).shape, dtype=computed_in(x)).numpy()
        yield Trial("input gradient", None, partial(kernels.input_gradient, inputs, g_spikes, None, 1, gradient))


def _trials_of_ternary(spec: NeuronSpec, dtype: torch.dtype, trains: bool) -> Iterator[Trial]:
    rows = torch.zeros((1, 8), dtype=dtype)
    kernels = NumbaBiSpike(rows.shape, dtype, spec)
    amplitude = torch.ones(1, dtype=computed_in(rows))
    # Another amplitude takes the same kernels.
    yield Trial("ternary forward", None, partial(kernels.fire, rows, None, amplitude, packed=True))
    if trains:
        places = torch.zeros(2, 1, 1, dtype=torch.uint8)
        yield Trial("ternary backward", None, partial(kernels.backward, places, places[0, 0], amplitude, rows, None))
