"""Models as NIR graphs (arXiv 2311.14641), which simulators and chips exchange.

SpikingJelly's `nir_exchange` reads these graphs: a LIF's tau is in seconds, `dt` for each time step; r is 1, or tau in
time steps if the input does not decay.
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
from megasnn.layers.facts import facts
from megasnn.layers.layer import FunctionLayer

# Seconds; SpikingJelly's default.
DT = 1e-4


class Value(NamedTuple):
    """Tensor between nodes, for one sample at one time step: the sum of the outputs of `nodes`.

    Attributes:
        folds_time: True inside a module that has the tensor as `[T * N, ...]`.
        is_product: True behind a convolution or linear layer, into which a norm can be folded.
    """

    nodes: tuple[str, ...]
    shape: tuple[int, ...]
    folds_time: bool = False
    is_product: bool = False


def require_time_step(dt: float) -> None:
    """Raises CheckpointError unless `dt` is a positive number of seconds."""
    if not 0 < dt < inf:
        raise CheckpointError(f"dt is {dt}, and must be a positive number of seconds")


def to_nir(model: TrainedModel, dt: float = DT) -> nir.NIRGraph:
    """Writes a model as a graph. Norms fold into products before them; sums are edges into one node.

    Args:
        dt: seconds per time step.
    Raises:
        CheckpointError: names a module or function without a NIR node, such as a soft reset, max pooling or attention.
            Or `dt` is no positive number, or the model has its own inputs.
    """
    require_time_step(dt)
    if "inputs" in model.config.own_task():
        raise CheckpointError(f"{model.config.name} has its own inputs, and a graph is for images")
    graph = _Graph(dt)
    shape = model.config.input_shape[-3:]
    graph.nodes["input"] = nir.Input(np.array(shape))
    outputs = {-1: Value(("input",), shape)}
    layers = zip(model.description.layers, model.chunk.layers, strict=True)
    for number, (described, module) in enumerate(layers):
        inputs = [outputs[source] for source in described.inputs]
        outputs[number] = graph.follow(described.name, module, inputs)
    last = graph.joined(outputs[number])
    graph.add("output", nir.Output(np.array(last.shape)), last, last.shape)
    return nir.NIRGraph(graph.nodes, graph.edges)


class _Tracer(fx.Tracer):
    """Divides blocks, and the user's modules, into layers."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        file = type(m).__module__
        is_layer = file.startswith("megasnn.layers.") and file != "megasnn.layers.blocks"
        return is_layer or isinstance(m, NeuronLayer) or super().is_leaf_module(m, module_qualified_name)


class _Graph:
    """Nodes and edges, added layer by layer.

    Attributes:
        path: module or layer being followed, for errors.
    """

    def __init__(self, dt: float) -> None:
        self.dt = dt
        self.path = ""
        self.nodes: dict[str, Any] = {}
        self.edges: list[tuple[str, str]] = []
        self._used: set[str] = set()
        self._normed: set[str] = set()

    def refuse(self, subject: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {subject} has no NIR node")

    def follow(self, name: str, module: nn.Module, inputs: list[Value]) -> Value:
        """Adds a model's layer, which torch's tracer divides into modules and functions."""
        self.path = name
        call = facts(module).call
        folds_time = call is not None and call.fold_time
        sources = [each._replace(folds_time=folds_time) for each in inputs]
        tracer = _Tracer()
        if isinstance(module, FunctionLayer):
            output = self.call(name, module.function, *sources)
        elif tracer.is_leaf_module(module, ""):
            output = self.convert(name, module, *sources)
        else:
            try:
                traced = fx.GraphModule(module, tracer.trace(module))
            except Exception as error:
                # torch.fx raises many kinds for a forward that branches on values.
                raise CheckpointError(f"{name}: it cannot be followed: {error}") from error
            output = _Walk(traced, self, name).run(*sources)
        if not isinstance(output, Value):
            self.refuse("a bundle of tensors")
        return output._replace(folds_time=False)

    def convert(self, name: str, module: nn.Module, *inputs: Any) -> Value:
        """Adds one module's nodes."""
        for kind, convert in _MODULES.items():
            # A subclass with its own forward computes something else.
            if isinstance(module, kind) and type(module).forward is kind.forward and len(inputs) == 1:
                return convert(self, name, module, inputs[0])
        self.refuse(type(module).__name__)

    def add(self, name: str, node: Any, x: Value, shape: Any, is_product: bool = False) -> Value:
        """Adds a node with edges from a value's nodes. Returns its output."""
        # The folded norm has changed the convolution's weights for all its readers.
        if x.is_product and x.nodes[0] in self._normed:
            self.refuse("a second output of a convolution beside its norm")
        unique = name
        # The module was called before.
        while unique in self.nodes:
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
        """The same tensor as one node's output."""
        if len(x.nodes) == 1:
            return x
        # Readers take two edges into an output for two outputs (SpikingJelly 2.0.0, snnTorch 1.0.0). A Flatten of the
        # first dimension alone changes nothing, and fits every shape.
        return self.add("sum", nir.Flatten(np.array(x.shape), 0, 0), x, x.shape)

    def call(self, path: str, target: Any, x: Any, *args: Any, **options: Any) -> Any:
        """Adds the node for a function, or for a method by its name. Returns None for sizes."""
        name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
        node_name = f"{path}.{name}"
        self.path = path
        if x is None or name == "size" or (target is getattr and args == ("shape",)):
            # Only the sizes of time and samples are used, and a graph has neither.
            return None
        if not isinstance(x, Value):
            self.refuse(f"{name} of a number or a parameter")
        if target in (operator.add, torch.add, "add") and len(args) == 1 and not options:
            return self.sum(x, *args)
        if target is F.avg_pool2d and len(args) < 3 and not options:
            return self.average_pool(node_name, x, *args)
        if name == "flatten":
            by_position = zip(("start_dim", "end_dim"), args, strict=False)
            dims = {"start_dim": 0, "end_dim": -1, **dict(by_position), **options}
            return self.flatten(node_name, x, dims["start_dim"], dims["end_dim"])
        if name == "unflatten" and args[:1] == (0,) and x.folds_time:
            return x._replace(folds_time=False)
        self.refuse(name)

    def conv(self, name: str, module: Any, x: Value) -> Value:
        if len(x.shape) != 3:
            self.refuse("a convolution of signals")
        geometry = module
        if isinstance(module, ParallelConv):
            if module.edges is not None:
                self.refuse(f"padding_mode {module.padding_mode!r}, or padding that differs on two sides,")
            geometry = module.options.products.geometry
            if module.options.pool > 1:
                x = self.average_pool(f"{name}.pool", x, module.options.pool)
        elif module.padding_mode != "zeros" or isinstance(module.padding, str):
            self.refuse(f"the padding {module.padding_mode} {module.padding}")
        weight = module.weight[(..., *[None] * (4 - module.weight.ndim))].numpy()
        if geometry.groups > 1:  # findings/nir_grouped_convolution.sh
            self.refuse(
                f"a convolution of {geometry.groups} groups (nir 1.0 takes it for one of {weight.shape[1]} inputs)"
            )
        if weight.shape[2] != weight.shape[3]:
            self.refuse("a kernel that is not square (nir 1.0 takes it for one)")
        node = nir.Conv2d(
            x.shape[1:],
            weight,
            geometry.stride,
            geometry.padding,
            geometry.dilation,
            geometry.groups,
            _bias(module, weight),
        )
        return self.add(name, node, x, node.output_type["output"], is_product=True)

    def linear(self, name: str, module: Any, x: Value) -> Value:
        if len(x.shape) != 1:
            self.refuse("a linear layer on images")
        weight = module.weight.numpy()
        if module.bias is None:
            node = nir.Linear(weight)
        else:
            node = nir.Affine(weight, module.bias.numpy())
        return self.add(name, node, x, weight.shape[:1], is_product=True)

    def norm(self, name: str, module: Any, x: Value) -> Value:
        """Folds a batch norm into the product before it: w g / sqrt(var + eps)."""
        node = x.nodes[0]
        if not x.is_product or node in self._used | self._normed or module.running_mean is None:
            self.refuse("a batch norm that follows no convolution of its own")
        product = self.nodes[node]
        # In float64, and rounded once to the weights' type.
        scale = 1 / np.sqrt(module.running_var.double().numpy() + module.eps)
        if module.weight is not None:
            scale *= module.weight.double().numpy()
        bias = (getattr(product, "bias", 0.0) - module.running_mean.double().numpy()) * scale
        if module.bias is not None:
            bias += module.bias.double().numpy()
        weight = product.weight * scale.reshape(-1, *[1] * (product.weight.ndim - 1))
        dtype = product.weight.dtype
        folded = {"weight": weight.astype(dtype), "bias": bias.astype(dtype)}
        if weight.ndim == 2:
            # The product may be a Linear, which has no bias.
            self.nodes[node] = nir.Affine(**folded)
        else:
            self.nodes[node] = replace(product, **folded)
        self._normed.add(node)
        return x._replace(is_product=False)

    def neuron(self, name: str, module: ParallelNeuron, x: Value) -> Value:
        spec = module.spec
        full = partial(np.full, x.shape)
        if spec.v_reset is None:
            self.refuse("a neuron with a soft reset")
        ends = {"v_threshold": full(spec.v_threshold), "v_reset": full(spec.v_reset)}
        # NIR's equations are in seconds: dv/dt = r i for IF, tau dv/dt = v_leak - v + r i for LIF. With these values a
        # step of dt seconds adds the input once, and the membrane leaks to the reset potential, as SpikingJelly's does.
        if spec.kind == "if":
            return self.add(name, nir.IF(r=full(1 / self.dt), **ends), x, x.shape)
        tau = spec.tau
        # A learned time constant is stored as w, with 1 / tau = sigmoid(w).
        if module.w is not None:
            tau = 1 / module.w.sigmoid().item()
        # Without decay_input the membrane takes the whole input, which NIR divides by tau.
        r = 1.0 if spec.decay_input else tau
        node = nir.LIF(tau=full(tau * self.dt), r=full(r), v_leak=full(spec.v_reset), **ends)
        return self.add(name, node, x, x.shape)

    def average_pool(self, name: str, x: Value, size: Any, stride: Any = None, pool: Any = nir.AvgPool2d) -> Value:
        kernel = np.array(np.broadcast_to(size, 2))
        step = np.array(np.broadcast_to(stride or size, 2))
        sides = (np.array(x.shape[1:]) - kernel) // step + 1
        return self.add(name, pool(kernel, step, np.zeros(2, int)), x, (x.shape[0], *sides))

    def pool(self, name: str, module: nn.AvgPool2d, x: Value) -> Value:
        if module.ceil_mode or module.divisor_override not in (None, 1) or np.any(module.padding):
            self.refuse("average pooling with ceil_mode, a divisor_override above 1 or padding")
        pool = nir.AvgPool2d if module.divisor_override is None else nir.SumPool2d
        return self.average_pool(name, x, module.kernel_size, module.stride, pool)

    def mean(self, name: str, module: nn.Module, x: Value) -> Value:
        # NIR has no mean: one window takes the whole image.
        averaged = self.average_pool(f"{name}.mean", x, x.shape[1:])
        return self.flatten(f"{name}.flatten", averaged, 2 - x.folds_time, -1)

    def mean_linear(self, name: str, module: MeanLinear, x: Value) -> Value:
        return self.linear(name, module, self.mean(name, module, x))

    def flatten(self, name: str, x: Value, start: int, end: int) -> Value:
        """Flattens a sample's dimensions, or time and samples into one."""
        if (start, end, x.folds_time) == (0, 1, False):
            return x._replace(folds_time=True)
        # Dimensions of time and samples, which a graph lacks.
        before = 1 if x.folds_time else 2
        first = _dimension_of_sample(start, before, len(x.shape))
        last = _dimension_of_sample(end, before, len(x.shape))
        if first < 0:
            self.refuse("flattening of samples")
        if first == last:
            return x
        shape = (*x.shape[:first], prod(x.shape[first : last + 1]), *x.shape[last + 1 :])
        return self.add(name, nir.Flatten(np.array(x.shape), first, last), x, shape)

    def flatten_module(self, name: str, module: nn.Flatten, x: Value) -> Value:
        return self.flatten(name, x, module.start_dim, module.end_dim)

    def unchanged(self, name: str, module: nn.Module, x: Value) -> Value:
        return x


def _dimension_of_sample(dim: int, before: int, dims: int) -> int:
    if dim < 0:
        return dims + dim
    return dim - before


def _bias(module: Any, weight: np.ndarray) -> np.ndarray:
    if module.bias is None:
        # NIR's node has a bias in any case.
        return np.zeros(len(weight), weight.dtype)
    bias: np.ndarray = module.bias.numpy()
    return bias


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
    """Runs a traced layer on values in place of tensors. Modules and functions add their nodes."""

    def __init__(self, traced: fx.GraphModule, graph: _Graph, name: str) -> None:
        super().__init__(traced)
        # torch.fx would append its own lines to a refusal.
        self.extra_traceback = False
        self._graph = graph
        self._name = name

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        name = f"{self._name}.{target}"
        self._graph.path = name
        return self._graph.convert(name, self.fetch_attr(target), *args, *kwargs.values())

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._graph.call(self._name, target, *args, **kwargs)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._graph.call(self._name, target, *args, **kwargs)
