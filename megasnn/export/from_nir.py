"""Layers from a NIR graph (arXiv 2311.14641). Numbers follow SpikingJelly's `nir_exchange`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from graphlib import CycleError, TopologicalSorter
from math import isclose
from typing import Any, NamedTuple

import nir
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megasnn.common.files import CheckpointError
from megasnn.export.to_nir import DT, require_time_step
from megasnn.kernels import NeuronSpec
from megasnn.layers import ParallelConv, ParallelLinear
from megasnn.layers.layer import Layer, layer
from megasnn.layers.neuron import make_neuron

Make = Callable[[], Any]
"""Makes the module, or returns the function, of a layer."""


@dataclass(frozen=True)
class Network:
    """A graph's layers, for `yield from network.layers()` in a user's model.

    Attributes:
        input_shape: one sample at one time step.
        values: weights by global name, for `Engine.load_state_dict`.
        made: each layer's name, maker and inputs; None for the layer before it.
    """

    input_shape: tuple[int, ...]
    values: dict[str, Tensor] = field(default_factory=dict)
    made: list[tuple[str, Make, tuple[str, ...] | None]] = field(default_factory=list)

    def layers(self) -> Iterator[Layer]:
        """Makes the layers anew. Tensor-parallel ranks cut neurons and layers with weights."""
        for name, make, takes in self.made:
            yield layer(name, make(), takes=takes)

    def append(self, name: str, make: Make, takes: list[str | None]) -> str:
        """Appends a layer, and returns its name. None in `takes` is the model's input."""
        before = self.made[-1][0] if self.made else None
        inputs = None if takes == [before] else tuple(map(str, takes))
        self.made.append((name, make, inputs))
        return name


def from_nir(
    graph: nir.NIRGraph, dt: float = DT, neuron: NeuronSpec | None = None, soft_reset: bool = False
) -> Network:
    """Reads a graph without cycles, with one input and one output.

    Args:
        dt: seconds per time step.
        neuron: surrogate and `detach_reset` for all neurons.
        soft_reset: True to subtract the threshold after a spike. A graph does not say so: snnTorch 1.0.0 writes equal
            graphs for every kind of reset.
    Raises:
        CheckpointError: names a node without a layer here, without an output, or with neurons that differ from each
            other. Or `dt` is no positive number.
    """
    require_time_step(dt)
    options = _Options(dt, neuron or NeuronSpec(), soft_reset)
    sources: dict[str, list[str]] = {name: [] for name in graph.nodes}
    for source, target in graph.edges:
        sources[target].append(source)
    order = _sorted(sources)
    entry, shape = _input_of(graph)
    network = Network(shape)
    # Layer of each node; None for the model's input.
    names: dict[str, str | None] = {entry: None}
    if sum(source == entry for source, _ in graph.edges) > 1:
        names[entry] = network.append(entry, nn.Identity, [None])
    for name in order:
        node = graph.nodes[name]
        takes = [names[source] for source in sources[name]]
        # Edges into one node are a sum.
        while len(takes) > 1:
            takes[:2] = [network.append(f"{name}.sum{len(takes) - 1}", lambda: torch.add, takes[:2])]
        if isinstance(node, nir.Input | nir.Output):
            continue
        if not takes:
            raise CheckpointError(f"{name}: no node gives it an input")
        if type(node) not in _READERS:
            raise CheckpointError(f"{name}: nir.{type(node).__name__} has no layer here")
        try:
            make = _READERS[type(node)](node, options)
        except ValueError as error:
            raise CheckpointError(f"{name}: {error}") from None
        names[name] = network.append(name, make, takes)
        for tensor in ("weight", "bias"):
            value = getattr(node, tensor, None)
            if value is not None:
                network.values[f"{name}.{tensor}"] = torch.tensor(value)
    return network


def _sorted(sources: dict[str, list[str]]) -> list[str]:
    """Nodes, each after its sources. Raises CheckpointError for a cycle."""
    try:
        return [*TopologicalSorter(sources).static_order()]
    except CycleError as error:
        raise CheckpointError(f"{' -> '.join(error.args[1])}: a recurrent graph has no layers here") from None


def _input_of(graph: nir.NIRGraph) -> tuple[str, tuple[int, ...]]:
    """The only input's name and shape."""
    if len(graph.inputs) != 1 or len(graph.outputs) != 1:
        raise CheckpointError(f"{len(graph.inputs)} inputs and {len(graph.outputs)} outputs, where one of each is read")
    ends = graph.nodes.keys() - graph.outputs.keys() - {source for source, _ in graph.edges}
    if ends:
        # nir finds them, unless type_check=False. One of them could be the last layer, whose output is the model's.
        raise CheckpointError(f"{min(ends)}: no node takes its output")
    ((entry, node),) = graph.inputs.items()
    return entry, tuple(map(int, node.output_type["output"]))


class _Options(NamedTuple):
    """`from_nir`'s arguments: facts that a graph lacks."""

    dt: float
    neuron: NeuronSpec
    soft_reset: bool


def _conv(node: nir.Conv2d, options: _Options) -> Make:
    outputs, inputs, *kernel = node.weight.shape
    groups = int(node.groups)
    dilation = _pair(node.dilation)
    padding = node.padding
    # A graph from a file has bytes for text.
    if isinstance(padding, str | bytes):
        is_same = padding in ("same", b"same")  # otherwise "valid"
        if is_same and not all(side % 2 for side in kernel):
            raise ValueError(f"padding 'same' of a kernel of {kernel}: give numbers")
        padding = [is_same * far * (side // 2) for far, side in zip(dilation, kernel, strict=True)]
    return partial(
        ParallelConv,
        inputs * groups,
        outputs,
        kernel,
        stride=_pair(node.stride),
        padding=_pair(padding),
        dilation=dilation,
        groups=groups,
        bias=True,
    )


def _linear(node: nir.Affine | nir.Linear, options: _Options) -> Make:
    outputs, inputs = node.weight.shape
    return partial(ParallelLinear, inputs, outputs, bias=isinstance(node, nir.Affine))


def _pool(node: nir.AvgPool2d | nir.SumPool2d, options: _Options) -> Make:
    # A sum is the average times the window's size.
    divisor = 1 if isinstance(node, nir.SumPool2d) else None
    return partial(
        nn.AvgPool2d, _pair(node.kernel_size), _pair(node.stride), _pair(node.padding), divisor_override=divisor
    )


def _flatten(node: nir.Flatten, options: _Options) -> Make:
    start = int(node.start_dim)
    end = int(node.end_dim)
    # A graph has no dimension of samples, which is the first one of torch's modules.
    return partial(nn.Flatten, start + (start >= 0), end + (end >= 0))


def _if(node: nir.IF, options: _Options) -> Make:
    r = _only(node, "r")
    dt = options.dt
    if not isclose(r, 1 / dt, rel_tol=1e-6):
        raise ValueError(f"r is {r}, and must be 1 / dt, {1 / dt}: give from_nir(..., dt=...) the step of the graph")
    return _neuron(node, replace(options.neuron, kind="if"), options)


def _lif(node: nir.LIF, options: _Options) -> Make:
    seconds = _only(node, "tau")
    r = _only(node, "r")
    # 1.333 * dt / dt is 1.3330000000000002.
    tau = round(seconds / options.dt, 12)
    if tau <= 1:
        raise ValueError(
            f"tau is {seconds:.6g} s, {tau:.6g} time steps of dt = {options.dt} s, and must be more than one: give "
            "from_nir(..., dt=...) the step of the graph (of one that norse 1.1.0 wrote, the square of its step)"
        )
    decays = isclose(r, 1, rel_tol=1e-6)
    if not decays and not isclose(r, tau, rel_tol=1e-6):
        raise ValueError(
            f"r is {r}, and must be 1 or tau / dt, {tau}: give from_nir(..., dt=...) the step of the graph"
        )
    v_leak = _only(node, "v_leak")
    v_reset = _only(node, "v_reset")
    if not isclose(v_leak, v_reset, rel_tol=1e-6, abs_tol=1e-12):
        raise ValueError(f"v_leak is {v_leak}, and must be v_reset, {v_reset}")
    return _neuron(node, replace(options.neuron, kind="lif", tau=tau, decay_input=decays), options)


def _neuron(node: nir.IF | nir.LIF, spec: NeuronSpec, options: _Options) -> Make:
    v_threshold = _only(node, "v_threshold")
    v_reset = _only(node, "v_reset")
    if options.soft_reset and v_reset != 0:
        raise ValueError(f"v_reset is {v_reset}, and must be 0 for from_nir(..., soft_reset=True)")
    reset = None if options.soft_reset else v_reset
    return partial(make_neuron, replace(spec, v_threshold=v_threshold, v_reset=reset))


def _only(node: Any, name: str) -> float:
    """The value that all neurons share. Raises ValueError if they differ."""
    values: NDArray[Any] = np.unique(getattr(node, name))
    if values.size != 1:
        raise ValueError(f"{name} differs from neuron to neuron")
    if np.isnan(values[0]):
        raise ValueError(f"{name} is nan")
    return float(values[0])


def _pair(value: Any) -> tuple[int, int]:
    first, second = np.broadcast_to(np.asarray(value), 2)
    return int(first), int(second)


_READERS: dict[type, Callable[[Any, _Options], Make]] = {
    nir.Conv2d: _conv,
    nir.Affine: _linear,
    nir.Linear: _linear,
    nir.AvgPool2d: _pool,
    nir.SumPool2d: _pool,
    nir.Flatten: _flatten,
    nir.IF: _if,
    nir.LIF: _lif,
}
