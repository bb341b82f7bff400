#!/usr/bin/env bash
# snnTorch 1.0.0 writes one and the same NIR graph for neurons that are reset by subtraction, to zero, or not at all,
# and reads it as a reset to zero. Two of three networks come back as another one. Nothing is said.

source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
packages torch==2.13.0 snntorch==1.0.0 nir==1.0.8 nirtorch==2.6 numpy==2.4.6
program <<'PY'
import contextlib
import io

import nir
import snntorch
import torch
from snntorch.export_nir import export_to_nir
from snntorch.import_nir import import_from_nir


def spikes(network, inputs):
    fired = []
    state = None
    for x in inputs:
        result = network(x, state) if state is not None else network(x)
        spike, state = result if isinstance(result, tuple) else (result, None)
        spike = spike[0] if isinstance(spike, tuple) else spike  # of a graph: with the potential
        fired.append(int(spike.item()))
    return fired


inputs = [torch.full((1, 1), 0.8)] * 12
for reset in ("subtract", "zero", "none"):
    linear = torch.nn.Linear(1, 1)
    torch.nn.init.ones_(linear.weight)
    torch.nn.init.zeros_(linear.bias)
    one = torch.ones(1)
    neuron = snntorch.Leaky(beta=0.9 * one, threshold=one, reset_mechanism=reset, init_hidden=True)
    network = torch.nn.Sequential(linear, neuron)
    with contextlib.redirect_stdout(io.StringIO()):
        graph = export_to_nir(network, torch.ones(1))
        again = import_from_nir(graph)
    (lif,) = (node for node in graph.nodes.values() if isinstance(node, nir.LIF))
    (read,) = (module for module in again.modules() if isinstance(module, snntorch.Leaky))
    values = ", ".join(f"{name} {getattr(lif, name).item():.4g}" for name in ("tau", "r", "v_threshold", "v_reset"))
    print(f"reset {reset}: nir.LIF with {values}; read as reset {read.reset_mechanism}")
    print("  spikes before", *spikes(network, inputs))
    print("  spikes after ", *spikes(again, inputs))
PY
expected <<'OUT'
reset subtract: nir.LIF with tau 0.001, r 10, v_threshold 1, v_reset 0; read as reset zero
  spikes before 0 1 1 0 1 1 0 1 1 0 1 1
  spikes after  0 1 0 1 0 1 0 1 0 1 0 1
reset zero: nir.LIF with tau 0.001, r 10, v_threshold 1, v_reset 0; read as reset zero
  spikes before 0 1 0 1 0 1 0 1 0 1 0 1
  spikes after  0 1 0 1 0 1 0 1 0 1 0 1
reset none: nir.LIF with tau 0.001, r 10, v_threshold 1, v_reset 0; read as reset zero
  spikes before 0 1 1 1 1 1 1 1 1 1 1 1
  spikes after  0 1 0 1 0 1 0 1 0 1 0 1
OUT
