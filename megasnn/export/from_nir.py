"""Reads NIR graphs (arXiv 2311.14641) as layers, with the constants of SpikingJelly's `nir_exchange`."""

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
"""Returns a new module, or a function, for a layer."""


@dataclass(frozen=True)
class Network:
    """Layers of a graph, for `yield from network.layers()` in a model of your own.

    Attributes:
        input_shape: shape of one sample at one time step.
        values: weights by global name, for `Engine.load_state_dict`.
        made: (name, factory, names of the input layers) for each layer.
    """

    input_shape: tuple[int, ...]
    values: dict[str, Tensor] = field(default_factory=dict)
    made: list[tuple[str, Make, tuple[str, ...] | None]] = field(default_factory=list)

    def layers(self) -> Iterator[Layer]:
        """Creates new layers. Neurons and layers with weights are sharded over tensor-parallel ranks."""
        for name, make, takes in self.made:
            yield layer(name, make(), takes=takes)

    def append(self, name: str, make: Make, takes: list[str | None]) -> str:
        before = self.made[-1][0] if self.made else None
        self.made.append((name, make, None if takes == [before] else tuple(map(str, takes))))
        return name


def from_nir(
    graph: nir.NIRGraph, dt: float = DT, neuron: NeuronSpec | None = None, soft_reset: bool = False
) -> Network:
    """Reads an acyclic graph with one input and one output.

    Args:
        dt: length of a time step in seconds.
        neuron: surrogate and `detach_reset` of the neurons, which a graph does not contain.
        soft_reset: subtract the threshold after a spike. A graph does not contain the reset: snnTorch 1.0.0 writes the
            same graph for every reset.
    Raises:
        CheckpointError: names a node without a layer here, without a path to the output, or with different neurons; or
            `dt` is not positive and finite.
    """
    require_time_step(dt)
    options = _Options(dt, neuron or NeuronSpec(), soft_reset)
    sources: dict[str, list[str]] = {name: [] for name in graph.nodes}
    for source, target in graph.edges:
        sources[target].append(source)
    try:
        order = [*TopologicalSorter(sources).static_order()]
    except CycleError as error:
        raise CheckpointError(f"{' -> '.join(error.args[1])}: a recurrent graph has no layers here") from None
    if len(graph.inputs) != 1 or len(graph.outputs) != 1:
        raise CheckpointError(f"{len(graph.inputs)} inputs and {len(graph.outputs)} outputs, where one of each is read")
    ((entry, node),) = graph.inputs.items()
    ends = graph.nodes.keys() - graph.outputs.keys() - {source for source, _ in graph.edges}
    if ends:
        # nir finds them unless type_check=False. The last layer, whose output is the model's, could be one of them.
        raise CheckpointError(f"{min(ends)}: no node takes its output")
    network = Network(tuple(map(int, node.output_type["output"])))
    names: dict[str, str | None] = {entry: None}  # of layers; None for the model's input
    if sum(source == entry for source, _ in graph.edges) > 1:
        names[entry] = network.append(entry, nn.Identity, [None])
    for name in order:
        node, takes = graph.nodes[name], [names[source] for source in sources[name]]
        while len(takes) > 1:  # edges into one node are a sum
            takes[:2] = [network.append(f"{name}.sum{len(takes) - 1}", lambda: torch.add, takes[:2])]
        if isinstance(node, nir.Input | nir.Output):
            continue
        if not takes:
            raise CheckpointError(f"{name}: no node gives it an input")
        if type(node) not in _READERS:
            raise CheckpointError(f"{name}: nir.{type(node).__name__} has no layer here")
        try:
            names[name] = network.append(name, _READERS[type(node)](node, options), takes)
        except ValueError as error:
            raise CheckpointError(f"{name}: {error}") from None
        tensors = {kind: getattr(node, kind, None) for kind in ("weight", "bias")}
        network.values.update({f"{name}.{kind}": torch.tensor(x) for kind, x in tensors.items() if x is not None})
    return network


# --- nodes


class _Options(NamedTuple):
    """Facts that a graph does not hold: the arguments of `from_nir`."""

    dt: float
    neuron: NeuronSpec
    soft_reset: bool


def _conv(node: nir.Conv2d, options: _Options) -> Make:
    outputs, inputs, *kernel = node.weight.shape
    stride, dilation, groups, padding = _pair(node.stride), _pair(node.dilation), int(node.groups), node.padding
    if isinstance(padding, str | bytes):
        is_same = padding in ("same", b"same")
        if is_same and not all(side % 2 for side in kernel):
            raise ValueError(f"padding 'same' of a kernel of {kernel}: give numbers")
        padding = [is_same * far * (side // 2) for far, side in zip(dilation, kernel, strict=True)]
    geometry: dict[str, Any] = {"stride": stride, "padding": _pair(padding), "dilation": dilation, "groups": groups}
    return partial(ParallelConv, inputs * groups, outputs, kernel, bias=True, **geometry)


def _linear(node: nir.Affine | nir.Linear, options: _Options) -> Make:
    outputs, inputs = node.weight.shape
    return partial(ParallelLinear, inputs, outputs, bias=isinstance(node, nir.Affine))


def _pool(node: nir.AvgPool2d | nir.SumPool2d, options: _Options) -> Make:
    divisor = 1 if isinstance(node, nir.SumPool2d) else None  # a sum is the average times the window's size
    sizes = _pair(node.kernel_size), _pair(node.stride), _pair(node.padding)
    return partial(nn.AvgPool2d, *sizes, divisor_override=divisor)


def _flatten(node: nir.Flatten, options: _Options) -> Make:
    start, end = int(node.start_dim), int(node.end_dim)  # without samples, which torch's modules have
    return partial(nn.Flatten, start + (start >= 0), end + (end >= 0))


def _if(node: nir.IF, options: _Options) -> Make:
    r, dt = _only(node, "r"), options.dt
    if not isclose(r, 1 / dt, rel_tol=1e-6):
        raise ValueError(f"r is {r}, and must be 1 / dt, {1 / dt}: give from_nir(..., dt=...) the step of the graph")
    return _neuron(node, replace(options.neuron, kind="if"), options)


def _lif(node: nir.LIF, options: _Options) -> Make:
    seconds, r = _only(node, "tau"), _only(node, "r")
    tau = round(seconds / options.dt, 12)  # 1.333 * dt / dt is 1.3330000000000002
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
    v_leak, v_reset = _only(node, "v_leak"), _only(node, "v_reset")
    if not isclose(v_leak, v_reset, rel_tol=1e-6, abs_tol=1e-12):
        raise ValueError(f"v_leak is {v_leak}, and must be v_reset, {v_reset}")
    return _neuron(node, replace(options.neuron, kind="lif", tau=tau, decay_input=decays), options)


def _neuron(node: nir.IF | nir.LIF, spec: NeuronSpec, options: _Options) -> Make:
    v_threshold, v_reset = _only(node, "v_threshold"), _only(node, "v_reset")
    if options.soft_reset and v_reset != 0:
        raise ValueError(f"v_reset is {v_reset}, and must be 0 for from_nir(..., soft_reset=True)")
    reset = None if options.soft_reset else v_reset
    return partial(make_neuron, replace(spec, v_threshold=v_threshold, v_reset=reset))


def _only(node: Any, name: str) -> float:
    """The one value of all neurons. Raises ValueError for others."""
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
