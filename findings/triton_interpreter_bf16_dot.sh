#!/usr/bin/env bash
# Triton 3.9: in the interpreter (TRITON_INTERPRET=1) tl.dot of bfloat16 multiplies the bit patterns as whole numbers.
# 1.0 is stored as 16256, so that a product of two matrices of ones has entries of thousands of millions. float16 and
# float32 are right. Nothing is raised: a kernel's test in the interpreter fails, or passes, for no reason of its own.

source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
packages torch==2.13.0 numpy==2.4.6
replace_package triton==3.9.0
program <<'PY'
import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import torch
import triton
import triton.language as tl


@triton.jit
def product(a, b, out, N: tl.constexpr):
    places = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + places, tl.dot(tl.load(a + places), tl.load(b + places)))


for dtype in (torch.float32, torch.float16, torch.bfloat16):
    a = torch.ones(16, 16, dtype=dtype)
    out = torch.zeros(16, 16)
    product[(1,)](a, a, out, 16)
    print(f"{dtype}: an entry of ones(16, 16) @ ones(16, 16) is {out[0, 0].item()}")
print("16 * 16256 ** 2 =", 16 * 16256**2)
PY
expected <<'OUT'
torch.float32: an entry of ones(16, 16) @ ones(16, 16) is 16.0
torch.float16: an entry of ones(16, 16) @ ones(16, 16) is 16.0
torch.bfloat16: an entry of ones(16, 16) @ ones(16, 16) is 4228120576.0
16 * 16256 ** 2 = 4228120576
OUT
