#!/usr/bin/env bash
# numba 0.68: a float32 divided by the literal 3 is a float64 in scalar code, and a float32 in an array expression.
# NumPy and torch keep float32 in both. A leaky neuron written as v + (x - v) / 3 in a loop is therefore computed in
# double precision, and its spike at the threshold is another one than torch's, and than numba's own of whole arrays.

source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
packages numba==0.68.1 numpy==2.4.6
program <<'PY'
import numpy as np
from numba import njit


def charge(v, x):
    return v + (x - v) / 3


@njit
def spikes_in_a_loop(v, x):
    fired = np.zeros(v.size, np.bool_)
    for i in range(v.size):
        fired[i] = v[i] + (x[i] - v[i]) / 3 >= 1
    return fired


@njit
def spikes_of_arrays(v, x):
    return v + (x - v) / 3 >= 1


compiled = njit(charge)
v = np.array([0.001], np.float32)
x = np.array([2.9979999065399170], np.float32)
print("v", v[0].item(), "x", x[0].item(), "threshold 1")
print("NumPy, scalars:", charge(v[0], x[0]).dtype, bool(charge(v[0], x[0]) >= 1))
print("NumPy, arrays: ", charge(v, x).dtype, bool(charge(v, x)[0] >= 1))
compiled(v[0], x[0])
compiled(v, x)
print("numba's result types, scalars and arrays:", [each.return_type for each in compiled.nopython_signatures])
print("numba, loop:  ", bool(spikes_in_a_loop(v, x)[0]))
print("numba, arrays:", bool(spikes_of_arrays(v, x)[0]))
PY
expected <<'OUT'
OUT
