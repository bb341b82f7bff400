#!/usr/bin/env bash
# One NIR graph of one integrate-and-fire neuron, threshold 1: four readers, four spike trains. The input 1, 0, 2.5, 0,
# 0 is exact in floating point. At a potential of exactly 1 SpikingJelly and sinabs fire, norse does not. Of 2.5 sinabs
# gives 2 spikes in one step and keeps 0.5; the others give 1 and drop the rest. snnTorch reads another neuron (see
# snntorch_nir_if_leaks.sh). NIR leaves equality and reset to the reader. sinabs 3.1.3 needs nir 1.0.4, so it has an
# environment of its own.

source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
cat > "$FOLDER/graph.py" <<'PY'
import nir
import numpy as np
import torch

one = np.ones(1, np.float32)
nodes = {
    "input": nir.Input({"input": np.array([1])}),
    "weight": nir.Affine(np.ones((1, 1), np.float32), np.zeros(1, np.float32)),
    "neuron": nir.IF(r=one, v_threshold=one),
    "output": nir.Output({"output": np.array([1])}),
}
graph = nir.NIRGraph(nodes, [("input", "weight"), ("weight", "neuron"), ("neuron", "output")])
inputs = [torch.tensor([[value]]) for value in (1.0, 0.0, 2.5, 0.0, 0.0)]


def tell(name, module):
    spikes = []
    state = None
    for x in inputs:
        result = module(x, state)
        spike, state = result if isinstance(result, tuple) else (result, None)
        spike = spike[0] if isinstance(spike, tuple) else spike  # snnTorch: with the potential
        spikes.append(int(spike.item()))
    print(f"{name}: {spikes}")
PY
export PYTHONPATH=$FOLDER
packages torch==2.13.0 spikingjelly==2.0.0 norse==1.1.0 snntorch==1.0.0 nir==1.0.8 nirtorch==2.6 numpy==2.4.6
program <<'PY'
import contextlib
import io

import norse.torch
from graph import graph, tell
from snntorch.import_nir import import_from_nir as import_snntorch
from spikingjelly.activation_based.nir_exchange import import_from_nir as import_spikingjelly

tell("SpikingJelly", import_spikingjelly(graph, dt=1.0))
tell("norse", norse.torch.from_nir(graph, dt=1.0))
with contextlib.redirect_stdout(io.StringIO()):
    snntorch = import_snntorch(graph)
tell("snnTorch", snntorch)
PY
packages torch==2.13.0 sinabs==3.1.3 nir==1.0.4 nirtorch==2.0.2 numpy==2.4.6
program <<'PY'
import sinabs.nir
import torch
from graph import graph, inputs

result = sinabs.nir.from_nir(graph, batch_size=1)(torch.cat(inputs))
spikes = result[0] if isinstance(result, tuple) else result
print("sinabs:", spikes.flatten().int().tolist())
PY
expected <<'OUT'
SpikingJelly: [1, 0, 1, 0, 0]
norse: [0, 0, 1, 0, 0]
snnTorch: [0, 0, 1, 1, 0]
sinabs: [1, 0, 2, 0, 0]
OUT
