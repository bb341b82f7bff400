#!/usr/bin/env bash
# torch 2.13: SGD(fused=True) with momentum leaves its momentum unwritten when GradScaler skips the first step. The
# second step adds memory that nobody has written to the weights. Skipped first steps are what a GradScaler's large
# initial scale brings about. Without fused, the skipped step makes no momentum, and the second step is a first one.
# So that the script sees the same memory everywhere, torch fills new memory with NaN here.

source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
packages torch==2.13.0 numpy==2.4.6
program <<'PY'
import torch

torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True


def two_steps(fused, first_gradient):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.5, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    for gradient in (first_gradient, 0.25):
        weight.grad = scaler.scale(torch.full((2,), gradient))
        scaler.step(optimizer)
        scaler.update()
        print(f"  gradient {gradient}: weight {weight.tolist()}")


for fused in (False, True):
    for first_gradient in (0.5, float("inf")):
        print(f"fused={fused}, first gradient {first_gradient}")
        two_steps(fused, first_gradient)
PY
expected <<'OUT'
fused=False, first gradient 0.5
  gradient 0.5: weight [0.5, 0.5]
  gradient 0.25: weight [0.0, 0.0]
fused=False, first gradient inf
  gradient inf: weight [1.0, 1.0]
  gradient 0.25: weight [0.75, 0.75]
fused=True, first gradient 0.5
  gradient 0.5: weight [0.5, 0.5]
  gradient 0.25: weight [0.0, 0.0]
fused=True, first gradient inf
  gradient inf: weight [1.0, 1.0]
  gradient 0.25: weight [nan, nan]
OUT
