#!/usr/bin/env bash
# Triton 3.9: `0.9 * v + x` is one rounding on a GPU and two in the interpreter, which decides whether a neuron fires.
# The compiler's LLVM code shows a multiplication and an addition; the fused instruction appears in the PTX alone. It
# needs no GPU to see this: a kernel is compiled for one that is not there. Triton warns that 3.10 turns the fusion off.
# The potential that a GPU gives is computed here in fractions, from the instruction in the PTX.

source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
packages torch==2.13.0 numpy==2.4.6
replace_package triton==3.9.0
cat > "$FOLDER/kernel.py" <<'PY'
import triton
import triton.language as tl


@triton.jit
def fire(x, v, spike, N: tl.constexpr):
    i = tl.arange(0, N)
    potential = 0.9 * tl.load(v + i) + tl.load(x + i)
    tl.store(spike + i, tl.where(potential >= 1.0, 1.0, 0.0))
PY
export PYTHONPATH=$FOLDER
program <<'PY'
import re

from kernel import fire
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

types = {"x": "*fp32", "v": "*fp32", "spike": "*fp32", "N": "constexpr"}
for options in ({}, {"enable_fp_fusion": False}):
    code = compile(ASTSource(fire, types, {"N": 128}), target=GPUTarget("cuda", 90, 32), options=options).asm
    llvm = sorted(set(re.findall(r" (fmul|fadd|fma)\b", code["llir"])))
    ptx = sorted(set(re.findall(r"\b(?:fma|mul|add)\S*f32", code["ptx"])))
    print(f"compiled for sm_90, options {options}: LLVM {llvm}, PTX {ptx}")
PY
export TRITON_INTERPRET=1
program <<'PY'
from fractions import Fraction

import numpy as np
import torch
from kernel import fire

v, x = (float(np.float32(value)) for value in (0.64, 0.424))
spike = torch.zeros(1)
fire[(1,)](torch.tensor([x]), torch.tensor([v]), spike, 1)
print(f"interpreter, v {v}, x {x}: spike {spike.item()}")

exact = Fraction(float(np.float32(0.9))) * Fraction(v) + Fraction(x)
below = np.nextafter(np.float32(1), np.float32(0))
nearest = min((below, np.float32(1)), key=lambda value: abs(Fraction(float(value)) - exact))
print(f"fused, rounded once: potential {nearest!r}, spike {float(nearest >= 1)}")
PY
expected <<'OUT'
compiled for sm_90, options {}: LLVM ['fadd', 'fmul'], PTX ['fma.rn.f32']
compiled for sm_90, options {'enable_fp_fusion': False}: LLVM ['fadd', 'fmul'], PTX ['add.rn.f32', 'mul.rn.f32']
interpreter, v 0.6399999856948853, x 0.42399999499320984: spike 1.0
fused, rounded once: potential np.float32(0.99999994), spike 0.0
OUT
