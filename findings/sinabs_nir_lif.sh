#!/usr/bin/env bash
# sinabs 3.1.3 writes one and the same NIR graph for LIF layers that differ: the default one, which scales its input,
# one without that, one that is reset to zero, and one with a synaptic current. It reads the graph as the second of
# them. The default layer, which is silent here, fires in each step after it was written and read. Nothing is said.
# sinabs needs nir 1.0.4 or older.

source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
packages torch==2.13.0 sinabs==3.1.3 nir==1.0.4 nirtorch==2.0.2 numpy==2.4.6
program <<'PY'
import nir
import sinabs.layers
import sinabs.nir
import torch
from sinabs.activation import MembraneReset

inputs = torch.full((8, 1), 1.6)


def spikes(network):
    result = network(inputs)
    return (result[0] if isinstance(result, tuple) else result).flatten().int().tolist()


for name, options in (
    ("default", {}),
    ("norm_input=False", {"norm_input": False}),
    ("norm_input=False, reset to zero", {"norm_input": False, "reset_fn": MembraneReset()}),
    ("norm_input=False, tau_syn 10", {"norm_input": False, "tau_syn": 10.0}),
):
    linear = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(linear.weight)
    one = torch.ones(1)
    layer = sinabs.layers.LIFSqueeze(tau_mem=20 * one, spike_threshold=one, batch_size=1, **options)
    network = torch.nn.Sequential(linear, layer)
    before = spikes(network)
    graph = sinabs.nir.to_nir(network, torch.zeros(1, 1))
    (lif,) = (node for node in graph.nodes.values() if isinstance(node, nir.LIF))
    values = ", ".join(f"{name} {getattr(lif, name).item():.0f}" for name in ("tau", "r", "v_leak", "v_threshold"))
    print(f"LIF, {name}: nir.LIF with {values}")
    print("  spikes before", *before)
    print("  spikes after ", *spikes(sinabs.nir.from_nir(graph, batch_size=1)))
PY
expected <<'OUT'
LIF, default: nir.LIF with tau 20, r 1, v_leak 0, v_threshold 1
  spikes before 0 0 0 0 0 0 0 0
  spikes after  1 2 1 2 1 2 2 1
LIF, norm_input=False: nir.LIF with tau 20, r 1, v_leak 0, v_threshold 1
  spikes before 1 2 1 2 1 2 2 1
  spikes after  1 2 1 2 1 2 2 1
LIF, norm_input=False, reset to zero: nir.LIF with tau 20, r 1, v_leak 0, v_threshold 1
  spikes before 1 1 1 1 1 1 1 1
  spikes after  1 2 1 2 1 2 2 1
LIF, norm_input=False, tau_syn 10: nir.LIF with tau 20, r 1, v_leak 0, v_threshold 1
  spikes before 1 3 4 5 6 6 8 8
  spikes after  1 2 1 2 1 2 2 1
OUT
