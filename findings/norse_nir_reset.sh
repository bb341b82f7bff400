#!/usr/bin/env bash
# norse 1.1.0 reads NIR's LIF without its v_reset and without its resistance r: the neuron is reset to zero and its
# input is not scaled. Of r it logs a warning and goes on; of v_reset it says nothing. Here v_reset is -3 and r is 2.

source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
packages torch==2.13.0 norse==1.1.0 nir==1.0.8 nirtorch==2.6 numpy==2.4.6
program <<'PY'
import logging

import nir
import norse.torch
import numpy as np
import torch

one = np.ones(1, np.float32)
messages = []
logging.getLogger().addHandler(type("Kept", (logging.Handler,), {"emit": lambda self, each: messages.append(each)})())


def spikes(**changed):
    values = {"tau": one * 2e-3, "r": one, "v_leak": one * 0, "v_threshold": one, "v_reset": one * 0} | changed
    nodes = {
        "input": nir.Input({"input": np.array([1])}),
        "weight": nir.Affine(np.ones((1, 1), np.float32), np.zeros(1, np.float32)),
        "neuron": nir.LIF(**values),
        "output": nir.Output({"output": np.array([1])}),
    }
    graph = nir.NIRGraph(nodes, [("input", "weight"), ("weight", "neuron"), ("neuron", "output")])
    messages.clear()
    module = norse.torch.from_nir(graph, dt=1e-3)
    state = None
    fired = []
    for _ in range(8):
        spike, state = module(torch.tensor([[1.5]]), state)
        fired.append(int(spike.item()))
    return f"spikes {fired}, warnings {len(messages)}"


print("tau 2 ms, dt 1 ms, threshold 1, input 1.5, v_reset  0, r 1:", spikes())
print("tau 2 ms, dt 1 ms, threshold 1, input 1.5, v_reset -3, r 1:", spikes(v_reset=one * -3))
print("tau 2 ms, dt 1 ms, threshold 1, input 1.5, v_reset  0, r 2:", spikes(r=one * 2))
PY
expected <<'OUT'
tau 2 ms, dt 1 ms, threshold 1, input 1.5, v_reset  0, r 1: spikes [0, 1, 0, 1, 0, 1, 0, 1], warnings 0
tau 2 ms, dt 1 ms, threshold 1, input 1.5, v_reset -3, r 1: spikes [0, 1, 0, 1, 0, 1, 0, 1], warnings 0
tau 2 ms, dt 1 ms, threshold 1, input 1.5, v_reset  0, r 2: spikes [0, 1, 0, 1, 0, 1, 0, 1], warnings 1
OUT
