#!/usr/bin/env bash
# snnTorch 1.0.0: with reset_delay=False and reset by subtraction, a neuron that is driven above twice its threshold
# stays above it and is silent. The threshold is subtracted before the comparison and added back after it, as if that
# reset had been done before. With the default delay the same neuron fires twice. Neurons read from NIR have no delay.

source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
packages torch==2.13.0 snntorch==1.0.0 numpy==2.4.6
program <<'PY'
import snntorch
import torch

for delay in (True, False):
    neuron = snntorch.Leaky(beta=1.0, threshold=1.0, reset_mechanism="subtract", reset_delay=delay)
    potential = neuron.init_leaky()
    spikes = []
    potentials = []
    for x in (2.5, 0.0, 0.0, 0.0, 0.0):
        spike, potential = neuron(torch.tensor([x]), potential)
        spikes.append(int(spike.item()))
        potentials.append(potential.item())
    print(f"input 2.5, then 0; no leak, threshold 1, reset_delay={delay}: spikes {spikes}, potentials {potentials}")
PY
expected <<'OUT'
input 2.5, then 0; no leak, threshold 1, reset_delay=True: spikes [1, 1, 0, 0, 0], potentials [2.5, 1.5, 0.5, 0.5, 0.5]
input 2.5, then 0; no leak, threshold 1, reset_delay=False: spikes [1, 0, 0, 0, 0], potentials [1.5, 1.5, 1.5, 1.5, 1.5]
OUT
