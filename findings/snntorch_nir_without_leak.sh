#!/usr/bin/env bash
# snnTorch 1.0.0 writes a neuron without leak (beta = 1) to NIR as a LIF whose time constant and resistance are
# infinite, not as an IF. Its own reader divides one infinity by the other: the threshold becomes NaN and the neuron
# never fires. NumPy warns of a division by zero, and no error is raised. With beta = 0.999 the network comes back and
# fires.

source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
packages torch==2.13.0 snntorch==1.0.0 nir==1.0.8 nirtorch==2.6 numpy==2.4.6
program <<'PY'
import contextlib
import io

import snntorch
import torch
from snntorch.export_nir import export_to_nir
from snntorch.import_nir import import_from_nir

for beta in (0.999, 1.0):
    linear = torch.nn.Linear(1, 1)
    torch.nn.init.ones_(linear.weight)
    torch.nn.init.zeros_(linear.bias)
    one = torch.ones(1)
    neuron = snntorch.Leaky(beta=beta * one, threshold=one, reset_mechanism="zero", init_hidden=True)
    network = torch.nn.Sequential(linear, neuron)
    before = sum(int(network(torch.full((1, 1), 0.3)).item()) for _ in range(50))
    with contextlib.redirect_stdout(io.StringIO()):
        graph = export_to_nir(network, torch.ones(1))
        again = import_from_nir(graph)
    written = [node for node in graph.nodes.values() if hasattr(node, "v_threshold")]
    for node in written:
        values = ", ".join(f"{name} {getattr(node, name).item():.4g}" for name in ("tau", "r", "v_threshold"))
        print(f"beta {beta}: nir.{type(node).__name__} with {values}")
    (read,) = (module for module in again.modules() if isinstance(module, snntorch.Leaky))
    after = 0
    state = None
    for _ in range(50):
        spike, state = again(torch.full((1, 1), 0.3), state)
        after += int((spike[0] if isinstance(spike, tuple) else spike).item())
    print(f"  read with threshold {read.threshold.item():.4g}; 50 inputs of 0.3: {before} spikes before, {after} after")
PY
expected <<'OUT'
beta 0.999: nir.LIF with tau 0.1, r 1000, v_threshold 1
  read with threshold 1; 50 inputs of 0.3: 12 spikes before, 12 after
beta 1.0: nir.LIF with tau inf, r inf, v_threshold 1
  read with threshold nan; 50 inputs of 0.3: 12 spikes before, 0 after
OUT
