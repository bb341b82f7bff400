#!/usr/bin/env bash
# nirtorch 2.6: two functions make a torch module of a graph, and one of them loses sums. NIR adds what comes in over
# several edges into a node. nirtorch.load hands on one of the inputs and drops the others; nir_to_torch adds them.
# The order of the edges does not matter. norse 1.1.0 and sinabs 3.1.3 read graphs by nirtorch.load. No error is
# raised.

source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
packages torch==2.13.0 nir==1.0.8 nirtorch==2.6 numpy==2.4.6
program <<'PY'
import nir
import nirtorch
import numpy as np
import torch


def linear(factor):
    return nir.Affine(np.full((1, 1), factor, np.float32), np.zeros(1, np.float32))


def module(node):
    if not isinstance(node, nir.Affine):
        return None
    layer = torch.nn.Linear(1, 1)
    layer.weight.data = torch.tensor(node.weight)
    layer.bias.data = torch.tensor(node.bias)
    return layer


nodes = {
    "input": nir.Input({"input": np.array([1])}),
    "once": linear(1),
    "tenfold": linear(10),
    "sum": linear(1),
    "output": nir.Output({"output": np.array([1])}),
}
for first, second in (("once", "tenfold"), ("tenfold", "once")):
    edges = [("input", "once"), ("input", "tenfold"), (first, "sum"), (second, "sum"), ("sum", "output")]
    graph = nir.NIRGraph(nodes, edges)
    for name, network in (
        ("nirtorch.load", nirtorch.load(graph, module)),
        ("nir_to_torch ", nirtorch.nir_to_torch(graph, {nir.Affine: module})),
    ):
        result = network(torch.ones(1, 1))
        result = result[0] if isinstance(result, tuple) else result
        print(f"{name}: 1 x {first} + 1 x {second} of input 1 is {result.item():.0f}")
PY
expected <<'OUT'
nirtorch.load: 1 x once + 1 x tenfold of input 1 is 10
nir_to_torch : 1 x once + 1 x tenfold of input 1 is 11
nirtorch.load: 1 x tenfold + 1 x once of input 1 is 10
nir_to_torch : 1 x tenfold + 1 x once of input 1 is 11
OUT
