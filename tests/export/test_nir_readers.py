"""NIR between programs: graphs as other programs write them, and the table of what they read."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import nir
import numpy as np
import pytest
import torch
from spikingjelly.activation_based.nir_exchange import import_from_nir
from torch import Tensor, nn

from megasnn import CheckpointError, Engine, NeuronSpec, layer, load_model
from megasnn.export.from_nir import from_nir
from megasnn.export.to_nir import to_nir
from megasnn.layers import ParallelConv, ParallelLinear, ParallelNeuron
from megasnn.layers.layer import Layer
from megasnn.models.model import Model
from tests.export import nir_readers
from tests.export.nir_readers import NEURONS, READERS, TABLE, Neuron, chain, chain_of_neuron
from tests.export.test_trained_model import SIZES
from tests.models.networks import between

DOCS = Path(__file__).parents[2] / "docs"


@dataclass(frozen=True, kw_only=True)
class OneNeuron(Model):
    """Three pixels, a neuron on each, and a linear layer."""

    tau: float = 0.0
    decays_input: bool = False
    v_threshold: float = 1.0
    v_reset: float = 0.0
    image_size: int = 1
    time_steps: int = 2
    num_classes: int = 2

    def layers(self) -> Iterable[Layer]:
        kind, tau = ("lif", self.tau) if self.tau else ("if", 2.0)
        ends = {"v_threshold": self.v_threshold, "v_reset": self.v_reset, "decay_input": self.decays_input}
        yield layer("flat", nn.Flatten())
        yield layer("neuron", ParallelNeuron(NeuronSpec(kind, tau=tau, **ends)))
        yield layer("head", ParallelLinear(3, 2))


def run(graph: nir.NIRGraph, inputs: Tensor, **options: object) -> Tensor:
    """Output of a graph's layers, which are called one after the other, on `[T, N, ...]`."""
    network = from_nir(graph, **options)  # type: ignore[arg-type]
    y = inputs
    for each in network.layers():
        assert each.takes == ()
        folds = type(each.module).__module__.startswith("torch.nn.")
        y = each.module(y.flatten(0, 1)).unflatten(0, y.shape[:2]) if folds else each.module(y)
    return y


@pytest.mark.parametrize("dt", [1e-4, 1.0])
@pytest.mark.parametrize("name", NEURONS)
def test_the_table_is_of_the_nodes_that_we_write(name: str, dt: float, tmp_path: Path) -> None:
    """And the spikes that it expects are those of our neurons."""
    neuron, currents = NEURONS[name]
    values = {"decays_input": neuron.decays_input, "v_threshold": neuron.v_threshold, "v_reset": neuron.v_reset}
    with Engine(OneNeuron(tau=neuron.tau or 0.0, **values), **SIZES) as engine:
        engine.save(tmp_path)
    ours = to_nir(load_model(tmp_path, OneNeuron), dt).nodes["neuron"]
    expected = neuron.node(dt)
    assert type(ours) is type(expected)
    for entry in ("tau", "r", "v_leak", "v_threshold", "v_reset"):
        if hasattr(expected, entry):
            np.testing.assert_allclose(getattr(ours, entry), getattr(expected, entry), rtol=1e-6)
    inputs = np.array(currents)
    spikes = run(chain_of_neuron(neuron, dt), torch.tensor(inputs)[:, None], dt=dt)
    assert np.array_equal(spikes[:, 0].numpy(), neuron.run(inputs)) and 0.1 < spikes.mean() < 0.8


@pytest.mark.parametrize("name", READERS)
def test_readers_do_what_the_table_says(name: str) -> None:
    found = json.loads(TABLE.read_text())[name]
    versions = nir_readers.installed(READERS[name])
    if versions != found["versions"]:
        pytest.skip(f"the table is of {found['versions']}, and here is {versions}: python -m tests.export.nir_readers")
    logging.disable()
    try:
        assert nir_readers.outcomes(READERS[name]) == found["outcomes"]
    finally:
        logging.disable(logging.NOTSET)


def test_the_page_has_the_table() -> None:
    rows = nir_readers.page_rows(json.loads(TABLE.read_text()))
    assert "\n".join(rows) in (DOCS / "nir.md").read_text()


# --- what others write


def test_a_soft_reset_is_asked_for() -> None:
    """snnTorch 1.0.0 writes this graph for Leaky(beta=0.5, threshold=1.1) with any reset_mechanism. The spikes are its
    own, of reset_mechanism="subtract" and "zero" with reset_delay=False."""
    inputs = torch.tensor(nir_readers.CURRENTS, dtype=torch.float64)[:, None]
    graph = chain_of_neuron(Neuron(2.0, v_threshold=1.1), 1e-4)
    subtracts = ["0101000101", "0000010101", "1001010100"]
    resets = ["0101000011", "0000010101", "1001000100"]
    for soft, texts in ((True, subtracts), (False, resets)):
        spikes = run(graph, inputs, soft_reset=soft)[:, 0].T.int().tolist()
        assert ["".join(map(str, each)) for each in spikes] == texts
    with pytest.raises(CheckpointError, match="node: v_reset is -0.5, and must be 0 for .*soft_reset=True"):
        from_nir(chain_of_neuron(Neuron(2.0, v_reset=-0.5), 1e-4), soft_reset=True)


def test_norse_counts_in_steps_of_its_own() -> None:
    """norse 1.1.0 writes a LIFBoxCell of its defaults (tau 10 ms, 1 ms a step) with tau = 1e-5 and r = 1."""
    ones, zeros = np.ones(3, np.float32), np.zeros(3, np.float32)
    graph = chain(nir.LIF(tau=1e-5 * ones, r=ones, v_leak=zeros, v_threshold=ones), (3,), (3,))
    with pytest.raises(CheckpointError, match=r"node: tau is 1e-05 s, 0.1 time steps .*from_nir\(\.\.\., dt=\.\.\.\)"):
        from_nir(graph)
    inputs = torch.full((9, 1, 3), 2.0, dtype=torch.float64)  # v = 2 (1 - 0.9^t) passes 1 at t = 7
    assert run(graph, inputs, dt=1e-6)[:, 0, 0].int().tolist() == [0, 0, 0, 0, 0, 0, 1, 0, 0]


def test_sums_of_pixels_are_read_and_written(tmp_path: Path) -> None:
    """sinabs 3.1.3 writes nir.SumPool2d, its only pooling."""
    two, none = np.array([2, 2]), np.array([0, 0])
    graph = chain(nir.SumPool2d(two, two, none), (2, 2, 2), (2, 4, 4))
    x = torch.rand(3, 1, 2, 4, 4, generator=torch.Generator().manual_seed(0)).double()
    expected = x.unflatten(-1, (2, 2)).unflatten(-3, (2, 2)).sum((-3, -1))
    torch.testing.assert_close(run(graph, x), expected, rtol=1e-12, atol=0)
    made = [each.module for each in from_nir(graph).layers()]
    model = between(lambda: [layer("sums", nn.AvgPool2d(2, divisor_override=1))])
    with Engine(model, **SIZES) as engine:
        engine.save(tmp_path)
    assert isinstance(to_nir(load_model(tmp_path, type(model))).nodes["sums"], nir.SumPool2d) and len(made) == 1


# --- what we write


@dataclass(frozen=True, kw_only=True)
class EndsInSum(Model):
    """Two heads, whose sum are the logits."""

    image_size: int = 4
    time_steps: int = 2
    num_classes: int = 3

    def layers(self) -> Iterable[Layer]:
        yield layer("flat", nn.Flatten())
        yield layer("left", ParallelLinear(48, 3))
        yield layer("right", ParallelLinear(48, 3), takes="flat")
        yield layer("sum", torch.add, takes=("left", "right"))


def test_a_model_may_end_in_a_sum(tmp_path: Path) -> None:
    """SpikingJelly 2.0.0 takes each edge into the output for an output of its own."""
    with Engine(EndsInSum(), **SIZES, precision="fp64") as engine:
        engine.save(tmp_path)
    model = load_model(tmp_path, EndsInSum)
    graph = to_nir(model)
    assert len([edge for edge in graph.edges if edge[1] == "output"]) == 1
    x = torch.rand(5, 3, 4, 4, generator=torch.Generator().manual_seed(0)).double()
    theirs = import_from_nir(graph, dtype=torch.float64, step_mode="m")
    logits, _ = theirs(x.expand(2, *x.shape))
    torch.testing.assert_close(logits.detach(), model.steps(x), rtol=1e-12, atol=1e-12)
    assert len([*from_nir(graph).layers()]) == 5


class Twice(nn.Module):
    """A block that torch.fx follows down to what has no node."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x)


def test_refusals_are_one_sentence(tmp_path: Path) -> None:
    cases = {
        "group: a convolution of 2 groups .* has no NIR node": lambda: [
            layer("group", ParallelConv(4, 4, 3, groups=2))
        ],
        "depth: a convolution of 4 groups .* has no NIR node": lambda: [layer("depth", nn.Conv2d(4, 4, 3, groups=4))],
        "block.relu: relu has no NIR node|block: relu has no NIR node": lambda: [layer("block", Twice())],
    }
    for number, (text, layers) in enumerate(cases.items()):
        model = between(layers)
        with Engine(model, **SIZES) as engine:
            engine.save(tmp_path / str(number))
        with pytest.raises(CheckpointError, match=f"^({text})$"):
            to_nir(load_model(tmp_path / str(number), type(model)))
