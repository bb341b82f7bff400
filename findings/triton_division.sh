#!/usr/bin/env bash
# Triton 3.9: `/` on float32 becomes an approximate division on a GPU and stays an exact one in the interpreter. PTX
# allows div.full.f32 an error of 2 units in the last place. enable_fp_fusion=False does not change it; tl.math.div_rn
# is the exact one. A square root is approximate in the same way; float64 divisions are exact. No GPU is needed.

source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
packages triton==3.9.0 numpy==2.4.6
program <<'PY'
import re

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def operator(x, tau, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i) / tau)


@triton.jit
def div_rn(x, tau, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.math.div_rn(tl.load(x + i), tau))


@triton.jit
def sqrt(x, tau, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.sqrt(tl.load(x + i)))


@triton.jit
def sqrt_rn(x, tau, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.math.sqrt_rn(tl.load(x + i)))


for kernel in (operator, div_rn, sqrt, sqrt_rn):
    for dtype in ("fp32", "fp64"):
        if dtype == "fp64" and kernel is not operator:
            continue
        types = {"x": f"*{dtype}", "tau": dtype, "out": f"*{dtype}", "N": "constexpr"}
        source = ASTSource(kernel, types, {"N": 128})
        code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
        found = sorted(set(re.findall(r"\b(?:div|sqrt|rcp)\.[a-z0-9.]+", code.asm["ptx"])))
        print(f"{kernel.__name__} {dtype}: {found}")
PY
expected <<'OUT'
operator fp32: ['div.full.f32']
operator fp64: ['div.rn.f64']
div_rn fp32: ['div.rn.f32']
sqrt fp32: ['sqrt.approx.ftz.f32']
sqrt_rn fp32: ['sqrt.rn.f32']
OUT
