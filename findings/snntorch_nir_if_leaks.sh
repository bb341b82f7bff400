#!/usr/bin/env bash
# snnTorch 1.0.0 reads NIR's integrate-and-fire neuron as a leaky one that forgets a tenth of its potential each step.
# NIR's IF has no leak. Two inputs of 0.6, ten steps apart, make it fire; the module that comes out stays silent. Its
# reset is another one than that of NIR's LIF as well: IF is reset by subtraction, LIF to zero. Nothing is said.

source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
packages torch==2.13.0 snntorch==1.0.0 nir==1.0.8 nirtorch==2.6 numpy==2.4.6
program <<'PY'
import contextlib
import io

import nir
import numpy as np
import snntorch
import torch
from snntorch.import_nir import import_from_nir

one = np.ones(1, np.float32)
for neuron in (nir.IF(r=one, v_threshold=one), nir.LIF(tau=one * 1e-3, r=one * 10, v_leak=one * 0, v_threshold=one)):
    nodes = {
        "input": nir.Input({"input": np.array([1])}),
        "weight": nir.Affine(np.ones((1, 1), np.float32), np.zeros(1, np.float32)),
        "neuron": neuron,
        "output": nir.Output({"output": np.array([1])}),
    }
    graph = nir.NIRGraph(nodes, [("input", "weight"), ("weight", "neuron"), ("neuron", "output")])
    with contextlib.redirect_stdout(io.StringIO()):
        network = import_from_nir(graph)
    (read,) = (module for module in network.modules() if isinstance(module, snntorch.Leaky))
    print(f"nir.{type(neuron).__name__}: Leaky, beta {read.beta.item():.2f}, reset {read.reset_mechanism}")
    if isinstance(neuron, nir.IF):
        potential = read.init_leaky()
        fired = 0
        for step in range(12):
            spike, potential = read(torch.tensor([0.6 if step in (0, 10) else 0.0]), potential)
            fired += int(spike.item())
        result = f"{fired} spikes, potential {potential.item():.3f}"
        print(f"  0.6 in steps 0 and 10, threshold 1: {result}; without leak 1 spike")
PY
expected <<'OUT'
nir.IF: Leaky, beta 0.90, reset subtract
  0.6 in steps 0 and 10, threshold 1: 0 spikes, potential 0.728; without leak 1 spike
nir.LIF: Leaky, beta 0.90, reset zero
OUT
