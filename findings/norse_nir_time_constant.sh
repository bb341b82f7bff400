#!/usr/bin/env bash
# norse 1.1.0 multiplies a time constant by the length of a step when it writes a NIR graph, and does not divide when
# it reads one. A time constant of 10 ms is written as 10 us with the default dt of 1 ms. The neuron that is read with
# the same dt keeps nothing of its potential and fires in each step. to_nir(..., dt=1) writes 10 ms.

source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
packages torch==2.13.0 norse==1.1.0 nir==1.0.8 nirtorch==2.6 numpy==2.4.6
program <<'PY'
import nir
import norse.torch
import torch


def spikes(module):
    state = None
    fired = []
    for _ in range(14):
        spike, state = module(torch.full((1, 1), 2.0), state)
        fired.append(int(spike.item()))
    return fired


linear = torch.nn.Linear(1, 1)
torch.nn.init.ones_(linear.weight)
torch.nn.init.zeros_(linear.bias)
network = norse.torch.SequentialState(linear, norse.torch.LIFBoxCell(norse.torch.LIFBoxParameters(), dt=0.001))
print("LIFBoxCell of 10 ms, dt 1 ms, input 2: spikes", spikes(network))
for options in ({}, {"dt": 1.0}):
    graph = norse.torch.to_nir(network, torch.ones(1, 1), **options)
    (tau,) = (node.tau.item() for node in graph.nodes.values() if isinstance(node, nir.LIF))
    print(f"to_nir with {options or 'the default dt'}: tau {tau * 1e3:.2f} ms")
    print("  from_nir with dt 1 ms: spikes", spikes(norse.torch.from_nir(graph, dt=0.001)))
PY
expected <<'OUT'
LIFBoxCell of 10 ms, dt 1 ms, input 2: spikes [0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1]
to_nir with the default dt: tau 0.01 ms
  from_nir with dt 1 ms: spikes [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
to_nir with {'dt': 1.0}: tau 10.00 ms
  from_nir with dt 1 ms: spikes [0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1]
OUT
