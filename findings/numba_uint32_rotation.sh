#!/usr/bin/env bash
# numba 0.68: arithmetic of two uint32 is done in 64 bits, so that hashes and counter-based generators give other
# numbers than in NumPy or C. A rotation by 13 returns bits above the 32nd. Writing the result into a uint32 array does
# not help where bits come back by a shift to the right. Multiplication, addition and shifts need an explicit & mask.

source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
packages numba==0.68.1 numpy==2.4.6
program <<'PY'
import numpy as np
from numba import njit

THIRTEEN = np.uint32(13)
NINETEEN = np.uint32(19)
GOLDEN = np.uint32(0x9E3779B9)


def rotate(x):
    return (x << THIRTEEN) | (x >> NINETEEN)


def upper_half_of_product(values):
    result = np.empty_like(values)
    for i in range(values.size):
        result[i] = (values[i] * GOLDEN) >> np.uint32(16)
    return result


word = np.uint32(0x80000001)
compiled = njit(rotate)
print(f"rotate 0x{word:x} by 13: NumPy 0x{rotate(word):x}, numba 0x{compiled(word):x}")
print("numba's types:", compiled.nopython_signatures)
values = np.array([5, 7], np.uint32)
with np.errstate(over="ignore"):
    print("NumPy (x * 0x9E3779B9) >> 16:", upper_half_of_product(values).tolist())
print("numba, into a uint32 array:  ", njit(upper_half_of_product)(values).tolist())
PY
expected <<'OUT'
rotate 0x80000001 by 13: NumPy 0x3000, numba 0x100000003000
numba's types: [(uint32,) -> uint64]
NumPy (x * 0x9E3779B9) >> 16: [5909, 21380]
numba, into a uint32 array:   [202517, 283524]
OUT
