"""Readers of NIR beside each other: the same small graphs, step by step, in every program that is installed.

The outcomes are kept in nir_readers.json. `python -m tests.export.nir_readers --write` measures the installed readers
anew. It needs `nir`, torch and a reader, each at best in an environment of its own: sinabs 3.1.3 needs nir 1.0.4.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import nir
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]
TABLE = Path(__file__).with_suffix(".json")

IF_OF_ONE = "IF, `r` = 1 (dt = 1 s)"

CURRENTS = [
    *([0.75, 0.5, 1.5], [0.75, 0.25, -0.5], [0.125, 0.5, 0.75], [1.25, 0.25, 2.5], [0.0, 0.5, 0.125]),
    *([0.875, 0.75, 0.625], [0.5, 1.0, 0.75], [0.625, 0.75, 1.25], [0.625, 0.5, 0.25], [1.75, 1.0, 0.625]),
]
TO_THE_THRESHOLD = [[0.5, 0.25, 1.0], [0.5, 0.75, 0.0], [0.25, 0.0, 0.5], [0.25, 1.0, 0.5]]
"""Inputs `[T, 3]`. No potential comes near the threshold with the first; with the second an IF neuron's equal it."""


class Neuron(NamedTuple):
    """A layer of three neurons. tau is in time steps; None for a neuron without a leak."""

    tau: float | None
    decays_input: bool = False
    v_threshold: float = 1.0
    v_reset: float = 0.0

    def node(self, dt: float) -> nir.NIRNode:
        """The node that MegaSNN and SpikingJelly write, for a step of `dt` seconds."""
        ends = {"v_threshold": _full(self.v_threshold), "v_reset": _full(self.v_reset)}
        if self.tau is None:
            return nir.IF(r=_full(1 / dt), **ends)
        r = 1.0 if self.decays_input else self.tau
        return nir.LIF(tau=_full(self.tau * dt), r=_full(r), v_leak=_full(self.v_reset), **ends)

    def run(self, inputs: Array) -> Array:
        """Spikes by the equations: charge, fire at the threshold, reset to a value."""
        v = np.full(inputs.shape[1:], self.v_reset)
        spikes = []
        for x in inputs:
            if self.tau is None:
                v = v + x
            else:
                v = v + (x if not self.decays_input else x / self.tau) - (v - self.v_reset) / self.tau
            fired = v >= self.v_threshold
            v = np.where(fired, self.v_reset, v)
            spikes.append(fired.astype(float))
        return np.stack(spikes)


def _full(value: float) -> Array:
    return np.full(3, value, np.float32)


NEURONS: dict[str, tuple[Neuron, list[list[float]]]] = {
    "LIF, `r` = 1": (Neuron(2.0, decays_input=True, v_threshold=0.6), CURRENTS),
    "LIF, `r` = tau / dt": (Neuron(2.0, v_threshold=1.1), CURRENTS),
    "LIF, `v_reset` = -0.5": (Neuron(2.0, decays_input=True, v_threshold=0.1, v_reset=-0.5), CURRENTS),
    "LIF, potential = threshold": (Neuron(2.0, decays_input=True, v_threshold=0.5), TO_THE_THRESHOLD),
    "IF": (Neuron(None, v_threshold=1.1), CURRENTS),
    "IF, `v_reset` = -0.5": (Neuron(None, v_threshold=1.1, v_reset=-0.5), CURRENTS),
    "IF, potential = threshold": (Neuron(None), TO_THE_THRESHOLD),
    IF_OF_ONE: (Neuron(None, v_threshold=1.1), CURRENTS),
}


def chain(node: nir.NIRNode, shape: tuple[int, ...], given: tuple[int, ...]) -> nir.NIRGraph:
    """A graph of one node. shape: of its output. given: of its input."""
    nodes = {"input": nir.Input(np.array(given)), "node": node, "output": nir.Output(np.array(shape))}
    return nir.NIRGraph(nodes, [("input", "node"), ("node", "output")])


def _weights(*shape: int) -> Array:
    return (np.arange(np.prod(shape)).reshape(shape) % 7 - 3).astype(np.float32) / 4


def _conv(x: Array) -> Array:
    weight, bias = torch.tensor(_weights(4, 2, 3, 3)), torch.tensor(_weights(4))
    return torch.conv2d(torch.tensor(x).float(), weight, bias, stride=2, padding=1).numpy()


def _pool(x: Array) -> Array:
    return x.reshape(len(x), 2, 2, 2, 2, 2).mean((3, 5))


def layers() -> dict[str, tuple[nir.NIRGraph, Array, Array]]:
    """Graphs of other nodes, by name, with an input and the right output."""
    x, image = _weights(5, 3), _weights(5, 2, 4, 4)
    affine = nir.Affine(_weights(4, 3), _weights(4))
    linear = nir.Linear(_weights(4, 3))
    conv = nir.Conv2d((4, 4), _weights(4, 2, 3, 3), 2, 1, 1, 1, _weights(4))
    two, none = np.array([2, 2]), np.array([0, 0])
    average, sums = nir.AvgPool2d(two, two, none), nir.SumPool2d(two, two, none)
    flatten = nir.Flatten(np.array([2, 4, 4]), 0, -1)
    of_linear = x @ _weights(4, 3).T
    of_affine = of_linear + _weights(4)
    return {
        "Affine": (chain(affine, (4,), (3,)), x, of_affine),
        "Linear": (chain(linear, (4,), (3,)), x, of_linear),
        "Conv2d": (chain(conv, (4, 2, 2), (2, 4, 4)), image, _conv(image)),
        "AvgPool2d": (chain(average, (2, 2, 2), (2, 4, 4)), image, _pool(image)),
        "SumPool2d": (chain(sums, (2, 2, 2), (2, 4, 4)), image, 4 * _pool(image)),
        "Flatten": (chain(flatten, (32,), (2, 4, 4)), image, image.reshape(5, -1)),
        "two edges into one node": (_sum(last=True), x, (of_affine + of_linear) @ _weights(2, 4).T + _weights(2)),
        "two edges into Output": (_sum(last=False), x, of_affine + of_linear),
    }


def _sum(last: bool) -> nir.NIRGraph:
    """A graph whose two branches meet in a node, or, without the last node, in the output."""
    nodes = {
        "input": nir.Input(np.array([3])),
        "a": nir.Affine(_weights(4, 3), _weights(4)),
        "b": nir.Linear(_weights(4, 3)),
    }
    edges = [("input", "a"), ("input", "b")]
    if not last:
        nodes["output"] = nir.Output(np.array([4]))
        return nir.NIRGraph(nodes, [*edges, ("a", "output"), ("b", "output")])
    nodes["c"] = nir.Affine(_weights(2, 4), _weights(2))
    nodes["output"] = nir.Output(np.array([2]))
    return nir.NIRGraph(nodes, [*edges, ("a", "c"), ("b", "c"), ("c", "output")])


# --- readers: (graph, inputs `[T, ...]`, dt) -> what comes out, `[T, ...]`


def _spikingjelly(graph: nir.NIRGraph, inputs: Tensor, dt: float) -> list[Any]:
    return _step_by_step(import_module("spikingjelly.activation_based.nir_exchange").import_from_nir(graph, dt), inputs)


def _snntorch(graph: nir.NIRGraph, inputs: Tensor, dt: float) -> list[Any]:
    return _step_by_step(import_module("snntorch.import_nir").import_from_nir(graph), inputs)


def _norse(graph: nir.NIRGraph, inputs: Tensor, dt: float) -> list[Any]:
    return _step_by_step(import_module("norse.torch").from_nir(graph, dt=dt), inputs)


def _sinabs(graph: nir.NIRGraph, inputs: Tensor, dt: float) -> list[Any]:
    net = import_module("sinabs.nir").from_nir(graph, batch_size=1)
    output = net(inputs)
    return [*(output[0] if isinstance(output, tuple) else output)]


def _rockpool(graph: nir.NIRGraph, inputs: Tensor, dt: float) -> list[Any]:
    net = import_module("rockpool.nn.modules.torch.nir").from_nir(graph)
    output, _ = net(inputs[None])
    return [*output[0]]


def _step_by_step(net: Any, inputs: Tensor) -> list[Any]:
    outputs, state = [], None
    with torch.no_grad():
        for x in inputs:
            y = net(x[None], state)
            y, state = y if isinstance(y, tuple) and len(y) == 2 else (y, None)
            outputs.append(y[0] if isinstance(y, Tensor) else y)
    return outputs


class Reader(NamedTuple):
    """A program that reads NIR. dt: seconds of a time step that it takes; 1 where it counts in time steps."""

    distribution: str
    run: Callable[[nir.NIRGraph, Tensor, float], list[Any]]
    dt: float = 1e-4


READERS = {
    "SpikingJelly": Reader("spikingjelly", _spikingjelly),
    "snnTorch": Reader("snntorch", _snntorch),
    "norse": Reader("norse", _norse),
    "sinabs": Reader("sinabs", _sinabs, 1.0),
    "rockpool": Reader("rockpool", _rockpool),
}

# --- outcomes


def outcomes(reader: Reader) -> dict[str, str]:
    """What the reader makes of each graph: same, scaled, other or refused, with a word on it."""
    found = {}
    for name, (neuron, currents) in NEURONS.items():
        dt = 1.0 if name == IF_OF_ONE else reader.dt
        inputs = np.array(currents)
        graph = partial(chain_of_neuron, neuron, dt)
        found[name] = outcome(reader, graph, inputs, neuron.run(inputs), dt)
        r = neuron.node(dt).r[0]
        if found[name].startswith("other") and outcome(reader, graph, r * inputs, neuron.run(inputs), dt) == "same":
            found[name] = "scaled: its input is divided by r"
    for name, (_, inputs, expected) in layers().items():
        found[name] = outcome(reader, lambda name=name: layers()[name][0], inputs, expected, reader.dt)
    return found


def chain_of_neuron(neuron: Neuron, dt: float) -> nir.NIRGraph:
    return chain(neuron.node(dt), (3,), (3,))


def outcome(reader: Reader, graph: Callable[[], nir.NIRGraph], inputs: Array, expected: Array, dt: float) -> str:
    """Compares what a reader's network gives with the right output."""
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            steps = reader.run(graph(), torch.tensor(inputs).float(), dt)
    except Exception as error:
        return f"refused: {type(error).__name__}: {str(error).splitlines()[0]}"
    if not all(isinstance(each, Tensor) for each in steps):
        return f"other: {type(steps[0]).__name__} in place of a tensor"
    found = torch.stack([each.detach() for each in steps]).numpy()
    if found.shape != expected.shape:
        return f"other: {[*found.shape[1:]]} in place of {[*expected.shape[1:]]}"
    if np.allclose(found, expected, rtol=0, atol=1e-5):
        return "same"
    spikes_alone = not np.any((expected != 0) & (expected != 1))
    return "other: several spikes in a step" if spikes_alone and found.max() > 1 else "other"


def installed(reader: Reader) -> dict[str, str] | None:
    """Versions of a reader and of what it reads with; None where it is not installed."""
    try:
        return {name: version(name) for name in (reader.distribution, "nir", "nirtorch")}
    except PackageNotFoundError:
        return None


def page_rows(table: dict[str, Any]) -> list[str]:
    """The table of docs/nir.md, a line for each graph."""
    names = [*table]
    kinds = {"same": "same", "scaled": "scaled", "other": "**other**", "refused": "refused"}
    head = [f"| | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    rows = []
    for case in table[names[0]]["outcomes"]:
        cells = [kinds[table[name]["outcomes"][case].partition(":")[0]] for name in names]
        rows.append(f"| {case} | {' | '.join(cells)} |")
    return head + rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep the outcomes of the installed readers")
    parser.add_argument("--page", action="store_true", help="print the table for docs/nir.md alone")
    options = parser.parse_args()
    logging.disable()
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    for name, reader in READERS.items():
        versions = None if options.page else installed(reader)
        if versions is None:
            continue
        found = outcomes(reader)
        print(name, versions)
        for case, text in found.items():
            print(f"  {case}: {text}")
        table[name] = {"versions": versions, "outcomes": found}
    if options.write:
        kept = {name: table[name] for name in READERS if name in table}
        TABLE.write_text(json.dumps(kept, indent=1) + "\n")
    if options.page:
        print("\n".join(page_rows(table)))


if __name__ == "__main__":
    main()
