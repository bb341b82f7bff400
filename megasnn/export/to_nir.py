"""Writes models as NIR graphs (arXiv 2311.14641) for simulators and neuromorphic chips.

The constants are those of SpikingJelly's `nir_exchange`, which can read the graphs: tau of a LIF in seconds, at `dt`
per time step, and r = 1, or r = tau in time steps without `decay_input`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf, prod
from typing import Any, NamedTuple, NoReturn

import nir
import numpy as np
import torch
import torch.nn.functional as F
from torch import fx, nn

from megasnn.common.files import CheckpointError
from megasnn.export.trained_model import TrainedModel
from megasnn.layers import (
    DropPath,
    MeanLinear,
    MeanOverSpace,
    NeuronLayer,
    ParallelBatchNorm,
    ParallelConv,
    ParallelDropout,
    ParallelLinear,
    ParallelNeuron,
    WholeImages,
)
from megasnn.layers.layer import FunctionLayer

DT = 1e-4  # seconds; SpikingJelly's default


class Value(NamedTuple):
    """Tensor between nodes, for one sample at one time step: the sum of the outputs of `nodes`.

    Attributes:
        folds_time: the module receives it as `[T * N, ...]`.
        is_product: output of a convolution or linear layer, into which a norm can be folded.
    """

    nodes: tuple[str, ...]
    shape: tuple[int, ...]
    folds_time: bool = False
    is_product: bool = False


def require_time_step(dt: float) -> None:
    """Raises CheckpointError unless `dt` is positive and finite."""
    if not 0 < dt < inf:
        raise CheckpointError(f"dt is {dt}, and must be a positive number of seconds")


def to_nir(model: TrainedModel, dt: float = DT) -> nir.NIRGraph:
    """Writes a model as a graph. Norms are folded into the products before them; a sum is several edges into a node.

    Args:
        dt: length of a time step in seconds.
    Raises:
        CheckpointError: names a layer without a NIR node, such as a soft reset, max pooling or attention; or `dt` is
            not positive and finite.
    """
    require_time_step(dt)
    graph, shape = _Graph(dt), model.config.input_shape[-3:]
    if "inputs" in model.config.own_task():
        raise CheckpointError(f"{model.config.name} has its own inputs, and a graph is for images")
    graph.nodes["input"] = nir.Input(np.array(shape))
    outputs = {-1: Value(("input",), shape)}
    layers = zip(model.description.layers, model.chunk.layers, strict=True)
    for number, (described, module) in enumerate(layers):
        outputs[number] = graph.follow(described.name, module, [outputs[source] for source in described.inputs])
    last = graph.joined(outputs[number])
    graph.add("output", nir.Output(np.array(last.shape)), last, last.shape)
    return nir.NIRGraph(graph.nodes, graph.edges)


class _Tracer(fx.Tracer):
    """Follows blocks, and modules of one's own, down to layers."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        place = type(m).__module__
        is_layer = place.startswith("megasnn.layers.") and place != "megasnn.layers.blocks"
        return is_layer or isinstance(m, NeuronLayer) or super().is_leaf_module(m, module_qualified_name)


class _Graph:
    """Nodes and edges, which grow by layers. path: what is followed, for errors."""

    def __init__(self, dt: float) -> None:
        self.dt, self.path = dt, ""
        self.nodes: dict[str, Any] = {}
        self.edges: list[tuple[str, str]] = []
        self._used, self._normed = set[str](), set[str]()

    def refuse(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {what} has no NIR node")

    def follow(self, name: str, module: nn.Module, inputs: list[Value]) -> Value:
        """Adds a layer of the model, which torch's tracer divides into modules and functions."""
        call, tracer, self.path = vars(module).get("_layer_call"), _Tracer(), name
        sources = [each._replace(folds_time=call is not None and call.fold_time) for each in inputs]
        if isinstance(module, FunctionLayer):
            output = self.call(name, module.function, *sources)
        elif tracer.is_leaf_module(module, ""):
            output = self.convert(name, module, *sources)
        else:
            try:
                traced = fx.GraphModule(module, tracer.trace(module))
            except Exception as error:  # of a forward that decides by values
                raise CheckpointError(f"{name}: it cannot be followed: {error}") from error
            output = _Walk(traced, self, name).run(*sources)
        if not isinstance(output, Value):
            self.refuse("a bundle of tensors")
        return output._replace(folds_time=False)

    def convert(self, name: str, module: nn.Module, *inputs: Any) -> Value:
        """Adds the nodes of one module."""
        for kind, convert in _MODULES.items():
            if isinstance(module, kind) and type(module).forward is kind.forward and len(inputs) == 1:
                return convert(self, name, module, inputs[0])
        self.refuse(type(module).__name__)

    def add(self, name: str, node: Any, x: Value, shape: Any, is_product: bool = False) -> Value:
        if x.is_product and x.nodes[0] in self._normed:
            self.refuse("what a convolution gives beside its norm")
        unique = name
        while unique in self.nodes:  # a module that is called again
            unique += "_again"
        self.nodes[unique] = node
        self.edges += [(source, unique) for source in x.nodes]
        self._used.update(x.nodes)
        return Value((unique,), tuple(map(int, shape)), x.folds_time, is_product)

    def sum(self, a: Any, b: Any) -> Value:
        if not (isinstance(a, Value) and isinstance(b, Value)) or {*a.nodes} & {*b.nodes} or a.shape != b.shape:
            self.refuse("a sum of anything but two tensors of one shape")
        self._used.update(a.nodes + b.nodes)
        return Value(a.nodes + b.nodes, a.shape, a.folds_time)

    def joined(self, x: Value) -> Value:
        """The same tensor as the output of one node.

        Readers take two edges into an output for two outputs (SpikingJelly 2.0.0, snnTorch 1.0.0). Flattening the first
        dimension alone changes nothing, and has a node for every shape.
        """
        if len(x.nodes) == 1:
            return x
        return self.add("sum", nir.Flatten(np.array(x.shape), 0, 0), x, x.shape)

    def call(self, path: str, target: Any, x: Any, *args: Any, **options: Any) -> Any:
        """Adds the node of a function, or of a method by its name."""
        name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
        self.path, place = path, f"{path}.{name}"
        if x is None or name == "size" or (target is getattr and args == ("shape",)):
            return None  # sizes, of which only those of time and samples are used
        if not isinstance(x, Value):
            self.refuse(f"{name} of a number or a parameter")
        if target in (operator.add, torch.add, "add") and len(args) == 1 and not options:
            return self.sum(x, *args)
        if target is F.avg_pool2d and len(args) < 3 and not options:
            return self.average_pool(place, x, *args)
        if name == "flatten":
            names = "start_dim", "end_dim"
            dims = {"start_dim": 0, "end_dim": -1} | dict(zip(names, args, strict=False)) | options
            return self.flatten(place, x, dims["start_dim"], dims["end_dim"])
        if name == "unflatten" and args[:1] == (0,) and x.folds_time:
            return x._replace(folds_time=False)
        self.refuse(name)

    # --- modules

    def conv(self, name: str, module: Any, x: Value) -> Value:
        if len(x.shape) != 3:
            self.refuse("a convolution of signals")
        if isinstance(module, ParallelConv):
            options = module.options.products.geometry
            x = self.average_pool(f"{name}.pool", x, module.options.pool) if module.options.pool > 1 else x
        elif module.padding_mode == "zeros" and not isinstance(module.padding, str):
            options = module
        else:
            self.refuse(f"the padding {module.padding_mode} {module.padding}")
        weight = module.weight[(..., *[None] * (4 - module.weight.ndim))].numpy()
        if options.groups > 1:  # findings/nir_grouped_convolution.sh
            self.refuse(
                f"a convolution of {options.groups} groups (nir 1.0 takes it for one of {weight.shape[1]} inputs)"
            )
        if weight.shape[2] != weight.shape[3]:
            self.refuse("a kernel that is not square (nir 1.0 takes it for one)")
        bias = np.zeros(len(weight), weight.dtype) if module.bias is None else module.bias.numpy()
        sizes = options.stride, options.padding, options.dilation, options.groups
        node = nir.Conv2d(x.shape[1:], weight, *sizes, bias)
        return self.add(name, node, x, node.output_type["output"], is_product=True)

    def linear(self, name: str, module: Any, x: Value) -> Value:
        if len(x.shape) != 1:
            self.refuse("a linear layer on images")
        weight = module.weight.numpy()
        node = nir.Linear(weight) if module.bias is None else nir.Affine(weight, module.bias.numpy())
        return self.add(name, node, x, weight.shape[:1], is_product=True)

    def norm(self, name: str, module: Any, x: Value) -> Value:
        """Folds a batch norm into the product before it: w g / sqrt(var + eps)."""
        node = x.nodes[0]
        if not x.is_product or node in self._used | self._normed or module.running_mean is None:
            self.refuse("a batch norm that follows no convolution of its own")
        product, dtype = self.nodes[node], self.nodes[node].weight.dtype
        scale = 1 / np.sqrt(module.running_var.double().numpy() + module.eps)
        scale *= 1.0 if module.weight is None else module.weight.double().numpy()
        shift = 0.0 if module.bias is None else module.bias.double().numpy()
        bias = (getattr(product, "bias", 0.0) - module.running_mean.double().numpy()) * scale + shift
        weight = product.weight * scale.reshape(-1, *[1] * (product.weight.ndim - 1))
        folded = {"weight": weight.astype(dtype), "bias": bias.astype(dtype)}
        self.nodes[node] = nir.Affine(**folded) if weight.ndim == 2 else replace(product, **folded)
        self._normed.add(node)
        return x._replace(is_product=False)

    def neuron(self, name: str, module: ParallelNeuron, x: Value) -> Value:
        spec, full = module.spec, partial(np.full, x.shape)
        if spec.v_reset is None:
            self.refuse("a neuron with a soft reset")
        ends = {"v_threshold": full(spec.v_threshold), "v_reset": full(spec.v_reset)}
        if spec.kind == "if":
            return self.add(name, nir.IF(r=full(1 / self.dt), **ends), x, x.shape)
        tau = spec.tau if module.w is None else 1 / module.w.sigmoid().item()
        r = 1.0 if spec.decay_input else tau
        node = nir.LIF(tau=full(tau * self.dt), r=full(r), v_leak=full(spec.v_reset), **ends)
        return self.add(name, node, x, x.shape)

    def average_pool(self, name: str, x: Value, size: Any, stride: Any = None, pool: Any = nir.AvgPool2d) -> Value:
        kernel, step = (np.array(np.broadcast_to(each, 2)) for each in (size, stride or size))
        sides = (np.array(x.shape[1:]) - kernel) // step + 1
        return self.add(name, pool(kernel, step, np.zeros(2, int)), x, (x.shape[0], *sides))

    def pool(self, name: str, module: nn.AvgPool2d, x: Value) -> Value:
        if module.ceil_mode or module.divisor_override not in (None, 1) or np.any(module.padding):
            self.refuse("average pooling with ceil_mode, a divisor_override above 1 or padding")
        pool = nir.AvgPool2d if module.divisor_override is None else nir.SumPool2d
        return self.average_pool(name, x, module.kernel_size, module.stride, pool)

    def mean(self, name: str, module: nn.Module, x: Value) -> Value:
        return self.flatten(f"{name}.flatten", self.average_pool(f"{name}.mean", x, x.shape[1:]), 2 - x.folds_time, -1)

    def mean_linear(self, name: str, module: MeanLinear, x: Value) -> Value:
        return self.linear(name, module, self.mean(name, module, x))

    def flatten(self, name: str, x: Value, start: int, end: int) -> Value:
        """Flattens dimensions; time and samples stay, or become one."""
        if (start, end, x.folds_time) == (0, 1, False):
            return x._replace(folds_time=True)
        before = 1 if x.folds_time else 2
        first, last = (dim - before if dim >= 0 else len(x.shape) + dim for dim in (start, end))
        if first < 0:
            self.refuse("flattening of samples")
        shape = (*x.shape[:first], prod(x.shape[first : last + 1]), *x.shape[last + 1 :])
        return x if first == last else self.add(name, nir.Flatten(np.array(x.shape), first, last), x, shape)

    def flatten_module(self, name: str, module: nn.Flatten, x: Value) -> Value:
        return self.flatten(name, x, module.start_dim, module.end_dim)

    def unchanged(self, name: str, module: nn.Module, x: Value) -> Value:
        return x


_MODULES: dict[Any, Callable[..., Value]] = {
    **dict.fromkeys((ParallelConv, nn.Conv2d), _Graph.conv),
    **dict.fromkeys((ParallelLinear, nn.Linear), _Graph.linear),
    **dict.fromkeys((ParallelDropout, DropPath, nn.Dropout, nn.Identity, WholeImages), _Graph.unchanged),
    MeanLinear: _Graph.mean_linear,
    MeanOverSpace: _Graph.mean,
    ParallelBatchNorm: _Graph.norm,
    ParallelNeuron: _Graph.neuron,
    nn.AvgPool2d: _Graph.pool,
    nn.Flatten: _Graph.flatten_module,
}


class _Walk(fx.Interpreter):
    """Runs a layer on values, in place of tensors: modules and functions add their nodes to the graph."""

    def __init__(self, traced: fx.GraphModule, graph: _Graph, name: str) -> None:
        super().__init__(traced)
        self.extra_traceback = False  # an error is a refusal, and torch.fx would write its own lines behind it
        self._graph, self._name = graph, name

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        self._graph.path = name = f"{self._name}.{target}"
        return self._graph.convert(name, self.fetch_attr(target), *args, *kwargs.values())

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._graph.call(self._name, target, *args, **kwargs)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._graph.call(self._name, target, *args, **kwargs)
