#!/usr/bin/env bash
# sinabs 3.1.3 reads the seconds of NIR's time constants as steps. A tau of 20 ms, which is 20 steps of 1 ms, becomes
# 0.02 steps: the neuron forgets everything in each step. There is no argument for the length of a step. sinabs needs
# nir 1.0.4 or older, which cannot read files of nir 1.0.8 with a LIF in them either.

source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
packages nir==1.0.8 numpy==2.4.6
export PYTHONPATH=$FOLDER
cat > "$FOLDER/graph.py" <<'PY'
import nir
import numpy as np

one = np.ones(1, np.float32)


def lif(tau):
    nodes = {
        "input": nir.Input({"input": np.array([1])}),
        "weight": nir.Affine(np.ones((1, 1), np.float32), np.zeros(1, np.float32)),
        "neuron": nir.LIF(tau=one * tau, r=one, v_leak=one * 0, v_threshold=one),
        "output": nir.Output({"output": np.array([1])}),
    }
    return nir.NIRGraph(nodes, [("input", "weight"), ("weight", "neuron"), ("neuron", "output")])
PY
program <<'PY'
import nir
from graph import lif

nir.write("../lif.nir", lif(0.02))
PY
packages torch==2.13.0 sinabs==3.1.3 nir==1.0.4 nirtorch==2.0.2 numpy==2.4.6
program <<'PY'
import nir
import sinabs.layers
import sinabs.nir
import torch
from graph import lif

for tau in (0.02, 20.0):
    network = sinabs.nir.from_nir(lif(tau), batch_size=1)
    (neuron,) = (module for module in network.modules() if isinstance(module, sinabs.layers.LIF))
    result = network(torch.full((40, 1), 0.4))
    spikes = result[0] if isinstance(result, tuple) else result
    leak = torch.exp(-1 / torch.as_tensor(neuron.tau_mem)).item()
    kept = f"keeps {leak:.3f} of its potential a step"
    print(f"tau {tau} in the graph: {kept}, {int(spikes.sum())} spikes in 40 steps of 0.4")
try:
    nir.read("../lif.nir")
except TypeError as error:
    print("a file of nir 1.0.8:", str(error).split("__init__() ")[-1])
PY
expected <<'OUT'
tau 0.02 in the graph: keeps 0.000 of its potential a step, 0 spikes in 40 steps of 0.4
tau 20.0 in the graph: keeps 0.951 of its potential a step, 15 spikes in 40 steps of 0.4
a file of nir 1.0.8: got an unexpected keyword argument 'v_reset'
OUT
