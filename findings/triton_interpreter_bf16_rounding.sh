#!/usr/bin/env bash
# Triton 3.9: in the interpreter a float32 becomes a bfloat16 by cutting off 16 bits; a GPU rounds to the nearest. The
# PTX has cvt.rn, round to nearest even, and torch does the same. 1.0078 is nearer to 1.0078125 and becomes 1.0. Half of
# all values are one unit too small in the interpreter, and sums of them are biased. float16 is rounded in both.

source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
packages torch==2.13.0 numpy==2.4.6
replace_package triton==3.9.0
cat > "$FOLDER/kernel.py" <<'PY'
import triton
import triton.language as tl


@triton.jit
def convert(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty))
PY
export PYTHONPATH=$FOLDER
program <<'PY'
import re

from kernel import convert
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

for name in ("bf16", "fp16"):
    source = ASTSource(convert, {"x": "*fp32", "out": f"*{name}", "N": "constexpr"}, {"N": 128})
    ptx = compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    print(f"compiled for sm_90, {name}: {sorted(set(re.findall(r'cvt[a-z0-9.]+', ptx)))}")
PY
export TRITON_INTERPRET=1
program <<'PY'
import torch
from kernel import convert

x = torch.rand(4096, generator=torch.manual_seed(0)) + 1
x[0] = 1.0078
for dtype in (torch.bfloat16, torch.float16):
    out = torch.empty(4096, dtype=dtype)
    convert[(1,)](x, out, 4096)
    smaller = (out < x.to(dtype)).sum().item()
    larger = (out > x.to(dtype)).sum().item()
    first = f"1.0078 becomes {out[0].item()}, in torch {x[0].to(dtype).item()}"
    print(f"interpreter, {dtype}: {first}; of 4096 values {smaller} smaller than torch's, {larger} larger")
PY
expected <<'OUT'
compiled for sm_90, bf16: ['cvt.rn.bf16.f32']
compiled for sm_90, fp16: ['cvt.rn.f16.f32']
interpreter, torch.bfloat16: 1.0078 becomes 1.0, in torch 1.0078125; of 4096 values 2046 smaller than torch's, 0 larger
interpreter, torch.float16: 1.0078 becomes 1.0078125, in torch 1.0078125; of 4096 values 0 smaller than torch's, 0 larger
OUT
