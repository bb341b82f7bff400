#!/usr/bin/env bash
# NeuroBench 2.3.0: how many accumulations and multiplications a network does for a sample depends on the batch size.
# Inputs of a layer are counted as accumulations where all of them are -1, 0 or 1 in a time step of a batch. One pixel
# with two events makes multiplications of all other samples' inputs in that step as well. The sum of both stays the
# same; the energy that is derived from them does not.

source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
packages torch==2.13.0 neurobench==2.3.0 snntorch==1.0.0 numpy==2.4.6
program <<'PY'
import contextlib
import io

import snntorch
import torch
from neurobench.benchmarks import Benchmark
from neurobench.metrics.workload import SynapticOperations
from neurobench.models import SNNTorchModel
from torch.utils.data import DataLoader, TensorDataset

frames = torch.zeros(4, 5, 10)  # samples, time steps, pixels
frames[:, :, ::2] = 1
frames[3, 2, 0] = 2  # two events in one pixel of the last sample
data = TensorDataset(frames, torch.zeros(4))
network = torch.nn.Sequential(
    torch.nn.Linear(10, 3, bias=False), snntorch.Leaky(beta=0.5, init_hidden=True, output=True)
)
for batch_size in (1, 2, 4):
    with contextlib.redirect_stdout(io.StringIO()):
        benchmark = Benchmark(SNNTorchModel(network), DataLoader(data, batch_size), [], [], [[], [SynapticOperations]])
        counted = benchmark.run(verbose=False)["SynapticOperations"]
    print(f"batches of {batch_size}, a sample: {counted}")
PY
expected <<'OUT'
batches of 1, a sample: {'Effective_MACs': 3.75, 'Effective_ACs': 71.25, 'Dense': 150.0}
batches of 2, a sample: {'Effective_MACs': 7.5, 'Effective_ACs': 67.5, 'Dense': 150.0}
batches of 4, a sample: {'Effective_MACs': 15.0, 'Effective_ACs': 60.0, 'Dense': 150.0}
OUT
