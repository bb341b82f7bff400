#!/usr/bin/env bash
# sinabs 3.1.3 reads NIR's integrate-and-fire neuron as one whose potential cannot fall below minus its threshold.
# NIR's IF has no such floor, and neither has the IAF of sinabs by default. An input of -5 counts as -1, and the
# neuron fires four steps too early. A network of sinabs that is written and read again becomes another one, too.
# Nothing is said.

source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
packages torch==2.13.0 sinabs==3.1.3 nir==1.0.4 nirtorch==2.0.2 numpy==2.4.6
program <<'PY'
import nir
import numpy as np
import sinabs.layers
import sinabs.nir
import torch

inputs = torch.tensor([-5.0] + [1.0] * 8)[:, None]


def tell(name, network):
    result = network(inputs)
    spikes = result[0] if isinstance(result, tuple) else result
    print(f"{name}:", *spikes.flatten().int().tolist())


one = np.ones(1, np.float32)
nodes = {
    "input": nir.Input({"input": np.array([1])}),
    "weight": nir.Affine(np.ones((1, 1), np.float32), np.zeros(1, np.float32)),
    "neuron": nir.IF(r=one, v_threshold=one),
    "output": nir.Output({"output": np.array([1])}),
}
graph = nir.NIRGraph(nodes, [("input", "weight"), ("weight", "neuron"), ("neuron", "output")])
potential = 0.0
spikes = []
for x in inputs.flatten().tolist():
    potential += x
    spikes.append(int(potential >= 1))
    potential -= spikes[-1]
print("input -5, then 1; threshold 1; no floor:", *spikes)
tell("the graph, read by sinabs", sinabs.nir.from_nir(graph, batch_size=1))

linear = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.ones_(linear.weight)
network = torch.nn.Sequential(linear, sinabs.layers.IAFSqueeze(batch_size=1))
tell("IAF of sinabs", network)
written = sinabs.nir.to_nir(network, torch.zeros(1, 1))
tell("IAF of sinabs, written and read", sinabs.nir.from_nir(written, batch_size=1))
PY
expected <<'OUT'
input -5, then 1; threshold 1; no floor: 0 0 0 0 0 0 1 1 1
the graph, read by sinabs: 0 0 1 1 1 1 1 1 1
IAF of sinabs: 0 0 0 0 0 0 1 1 1
IAF of sinabs, written and read: 0 0 1 1 1 1 1 1 1
OUT
