"""Graphs of NIR beside SpikingJelly's exchange, in both directions, in float64: outputs to 1e-9, spikes equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import nir
import numpy as np
import pytest
import torch
from spikingjelly.activation_based import functional, neuron
from spikingjelly.activation_based import layer as sj
from spikingjelly.activation_based.nir_exchange import export_to_nir, import_from_nir
from torch import Tensor, nn

from megasnn import CheckpointError, ConvNormNeuron, Engine, MeanLinear, NeuronConvNorm, NeuronSpec, layer, load_model
from megasnn.commands.convert_checkpoint import main
from megasnn.export.from_nir import from_nir
from megasnn.export.to_nir import to_nir
from megasnn.export.trained_model import TrainedModel
from megasnn.layers import NeuronLayer, ParallelConv, ParallelNeuron, Residual, ResidualMLP
from megasnn.layers.layer import Layer
from megasnn.models.model import Model
from tests.engine.test_engine import MODEL
from tests.export.test_trained_model import SIZES, VGG, Rising, firing, images, spikes_of
from tests.models.networks import between


class Block(nn.Module):
    """A plain module, which is given `[T, N, C, H, W]`."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.conv, self.norm = nn.AvgPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.pool(x.flatten(0, 1))
        return (self.norm(self.conv(y)) + y).unflatten(0, x.shape[:2])


@dataclass(frozen=True, kw_only=True)
class Sums(Model):
    """Shortcuts of spikes and of potentials, neurons of each kind, a layer that takes two others."""

    image_size: int = 8
    time_steps: int = 3
    num_classes: int = 4

    def layers(self) -> Iterable[Layer]:
        yield layer("stem", ConvNormNeuron(3, 8, 3, neuron=NeuronSpec("plif", tau=1.7, decay_input=False)))
        yield layer("again", Residual(ConvNormNeuron(8, 8, 3)))
        yield layer("mlp", ResidualMLP(8, 16))
        yield layer("block", Block())
        yield layer("potential", Residual(NeuronConvNorm(8, 8, 3, bias=True)))
        yield layer("if", ParallelNeuron(NeuronSpec("if", v_threshold=0.8, v_reset=-0.1)))
        yield layer("half", ConvNormNeuron(8, 8, 1), takes="if")
        yield layer("sum", torch.add, takes=("if", "half"))
        yield layer("head", MeanLinear(8, 4))


def trained(model: Model, folder: Path, kind: type[Model] | None = None) -> TrainedModel:
    with Engine(model, **SIZES, precision="fp64") as engine:
        engine.save(folder)
        engine.load_state_dict(firing(load_model(folder, kind)))
        engine.save(folder)
    return load_model(folder, kind)


def through_a_file(graph: nir.NIRGraph, folder: Path) -> nir.NIRGraph:
    nir.write(folder / "net.nir", graph)
    return nir.read(folder / "net.nir")


def neurons_of(model: nn.Module) -> list[nn.Module]:
    return [each for each in model.modules() if isinstance(each, NeuronLayer)]


def by_spikingjelly(net: nn.Module, call: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Output of a network of SpikingJelly's and the spikes of its neurons, as they are called."""
    found: list[Tensor] = []
    nodes = [each for each in net.modules() if type(each).__name__ == "_NIRStatefulModule"]  # gives its state, too
    for node in nodes or [each for each in net.modules() if isinstance(each, neuron.BaseNode)]:
        node.register_forward_hook(lambda _, given, out: found.append(out if isinstance(out, Tensor) else out[0]))
    with torch.no_grad():
        return call(), found


def require_equal(found: tuple[Tensor, list[Tensor]], expected: tuple[Tensor, list[Tensor]]) -> None:
    assert (found[0] - expected[0]).norm() <= 1e-9 * expected[0].norm()
    assert len(found[1]) == len(expected[1]) > 0 and all(map(torch.equal, found[1], expected[1]))
    assert 0.02 < torch.cat([each.flatten() for each in expected[1]]).mean() < 0.8


def predicted(graph: nir.NIRGraph, like: Model, x: Tensor, **flags: Any) -> tuple[Tensor, list[Tensor]]:
    """Predictions of a model with the layers of a graph, and the spikes of this rank."""
    network = from_nir(graph)

    @dataclass(frozen=True, kw_only=True)
    class Read(Model):
        time_steps: int = like.time_steps
        num_classes: int = like.num_classes

        @property
        def input_shape(self) -> tuple[int, ...]:
            return like.input_shape

        def layers(self) -> Iterable[Layer]:
            yield from network.layers()

    with Engine(Read(), **SIZES, precision="fp64", **flags) as engine:
        engine.load_state_dict(network.values)
        logits: list[Tensor] = []
        neurons = [each for _, each in engine.distributed.neurons()]
        spikes = spikes_of(neurons, lambda: logits.append(engine.predict(x)))
        return logits[0], spikes


def frames(model: Model, x: Tensor) -> Tensor:
    return x.transpose(0, 1) if len(model.input_shape) == 4 else x.expand(model.time_steps, *x.shape)


@pytest.mark.parametrize("model", [VGG, Sums()], ids=["vgg", "sums"])
def test_spikingjelly_reads_what_we_write(model: Model, tmp_path: Path) -> None:
    """And so do we. Norms are folded; the program writes the same graph."""
    ours = trained(model, tmp_path, Sums if isinstance(model, Sums) else None)
    x, graph, logits = images(model)[:3], through_a_file(to_nir(ours), tmp_path), list[Tensor]()
    spikes = spikes_of(neurons_of(ours), lambda: logits.append(ours.steps(x)))
    theirs = import_from_nir(graph, dtype=torch.float64, step_mode="m")
    require_equal(by_spikingjelly(theirs, lambda: theirs(frames(model, x))[0]), (logits[0], spikes))
    require_equal(predicted(graph, model, x), (logits[0].mean(0), spikes))
    if model is VGG:
        words = ["nir", "--load", str(tmp_path), "--output", str(tmp_path / "program.nir")]
        assert main(words) == 0 and main(words) == 2
        assert {*nir.read(tmp_path / "program.nir").nodes} == {*graph.nodes}


def spikingjellys() -> nn.Module:
    """A network of SpikingJelly's with each kind of layer that its exchange knows, and neurons that fire."""
    torch.manual_seed(0)
    net = nn.Sequential(
        sj.Conv2d(3, 8, 3, padding=1, stride=(1, 2)),
        neuron.LIFNode(tau=1.333, decay_input=False, v_threshold=0.3),
        sj.AvgPool2d(2),
        sj.Conv2d(8, 8, 3, padding=1, bias=False),
        neuron.ParametricLIFNode(init_tau=1.7, v_threshold=0.2, v_reset=-0.05),
        sj.Flatten(),
        sj.Linear(64, 16, bias=False),
        neuron.IFNode(v_threshold=0.25),
        sj.Linear(16, 4),
    ).double()
    functional.set_step_mode(net, "m")
    return net


def from_spikingjelly(folder: Path) -> tuple[nir.NIRGraph, Model, Tensor, tuple[Tensor, list[Tensor]]]:
    model, net = Sums(), spikingjellys()
    x = images(model)[:3]
    graph = through_a_file(export_to_nir(net, frames(model, x)), folder)
    functional.reset_net(net)
    logits, spikes = by_spikingjelly(net, lambda: net(frames(model, x)))
    return graph, model, x, (logits.mean(0), spikes)


def test_we_read_what_spikingjelly_writes(tmp_path: Path) -> None:
    graph, model, x, expected = from_spikingjelly(tmp_path)
    require_equal(predicted(graph, model, x), expected)
    assert from_nir(graph).input_shape == (3, 8, 8)


def predicted_here(graph: nir.NIRGraph, x: Tensor) -> Tensor:
    return predicted(graph, Sums(), x, tensor_model_parallel_size=2)[0]


def test_layers_of_a_graph_are_cut(ranks: Any, tmp_path: Path) -> None:
    graph, _, x, (logits, _) = from_spikingjelly(tmp_path)
    for found in ranks(2, predicted_here, graph, x):
        assert (found - logits).norm() <= 1e-9 * logits.norm()


def test_what_has_no_node_is_named(tmp_path: Path) -> None:
    soft = {"neuron": NeuronSpec(v_reset=None)}
    cases: dict[str, Callable[[], Iterable[Layer]]] = {
        "soft.neuron: a neuron with a soft reset": lambda: [layer("soft", ConvNormNeuron(4, 4, **soft))],  # type: ignore
        "unit.max_pool: MaxPool": lambda: [layer("unit", ConvNormNeuron(4, 4, max_pool=True))],
        "unit.neuron: Rising": lambda: [layer("unit", ConvNormNeuron(4, 4, neuron=Rising(4)))],
        "twice: a sum": lambda: [layer("twice", Residual(nn.Identity()))],
        "line: a kernel": lambda: [layer("line", ParallelConv(4, 4, (1, 3)))],
        "relu: ReLU": lambda: [layer("relu", nn.ReLU())],
        "times: mul": lambda: [layer("unit", ConvNormNeuron(4, 4)), layer("times", torch.mul, takes=("stem", "unit"))],
    }
    for number, (text, layers) in enumerate(cases.items()):
        model = between(layers)
        with Engine(model, **SIZES) as engine:
            engine.save(tmp_path / str(number))
        with pytest.raises(CheckpointError, match=text):
            to_nir(load_model(tmp_path / str(number), type(model)))
    with Engine(MODEL, **SIZES) as engine:
        engine.save(tmp_path / "spikformer")
    assert main(["nir", "--load", str(tmp_path / "spikformer"), "--output", str(tmp_path / "net.nir")]) == 2
    assert not (tmp_path / "net.nir").exists()


def test_what_has_no_layer_is_named(tmp_path: Path) -> None:
    graph = from_spikingjelly(tmp_path)[0]
    name, lif = next((name, node) for name, node in graph.nodes.items() if isinstance(node, nir.LIF))
    ramp = np.linspace(1.0, 2.0, lif.tau.size).reshape(lif.tau.shape)
    for change in ({"tau": lif.tau * ramp}, {"tau": lif.tau * 3}, {"v_leak": lif.v_leak + 0.1}):
        wrong = nir.NIRGraph(graph.nodes | {name: replace(lif, **change)}, graph.edges)
        with pytest.raises(CheckpointError, match=f"{name}: {[*change][0]}|{name}: r is"):
            from_nir(wrong)
    integrator = nir.LI(tau=lif.tau, r=lif.r, v_leak=lif.v_leak)
    with pytest.raises(CheckpointError, match=f"{name}: nir.LI has no layer here"):
        from_nir(nir.NIRGraph(graph.nodes | {name: integrator}, graph.edges))
    undefined = nir.NIRGraph(graph.nodes | {name: replace(lif, v_threshold=lif.v_threshold * np.nan)}, graph.edges)
    with pytest.raises(CheckpointError, match=f"{name}: v_threshold is nan"):
        from_nir(undefined)
    with pytest.raises(CheckpointError, match="recurrent"):
        from_nir(nir.NIRGraph(graph.nodes, [*graph.edges, (name, name)]))


def test_nodes_that_lead_nowhere_are_refused() -> None:
    """nir gives each of them an input or output of its own, if it checks a graph."""
    ends = {"input": nir.Input(np.array([4])), "output": nir.Output(np.array([4]))}
    nodes = ends | {"first": nir.Linear(np.eye(4)), "second": nir.Linear(2 * np.eye(4))}
    edges = [("input", "first"), ("first", "output")]
    with pytest.raises(CheckpointError, match="second: no node takes its output"):
        from_nir(nir.NIRGraph(nodes, [*edges, ("first", "second")], type_check=False))
    with pytest.raises(CheckpointError, match="second: no node gives it an input"):
        from_nir(nir.NIRGraph(nodes, [*edges, ("second", "output")], type_check=False))


@pytest.mark.parametrize("dt", [0.0, -1e-4, float("nan"), float("inf")])
def test_a_time_step_that_is_none_is_refused(dt: float, tmp_path: Path) -> None:
    graph = nir.NIRGraph.from_list(nir.Linear(np.eye(4)))
    with pytest.raises(CheckpointError, match="must be a positive number of seconds"):
        from_nir(graph, dt=dt)
    model = between(lambda: [])
    with Engine(model, **SIZES) as engine:
        engine.save(tmp_path)
    with pytest.raises(CheckpointError, match="must be a positive number of seconds"):
        to_nir(load_model(tmp_path, type(model)), dt)
