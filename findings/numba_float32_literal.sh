#!/usr/bin/env bash
# numba 0.68: a float32 divided by the literal 3 is a float64, so that a leaky neuron v + (x - v) / 3 is computed in
# double precision. NumPy and torch keep float32, and another spike comes out at the threshold. An array expression in
# numba has float32 as its result, as in NumPy, and still is computed in float64 inside: a comparison in the same
# expression sees the unrounded potential, and one of the stored potential the rounded one.

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


@njit
def stored_potential(v, x):
    potential = np.empty_like(v)
    potential[:] = v + (x - v) / 3
    return potential >= 1


compiled = njit(charge)
v = np.array([0.001], np.float32)
x = np.array([2.9979999065399170], np.float32)
print("v", v[0].item(), "x", x[0].item(), "threshold 1")
print("NumPy, scalars:", charge(v[0], x[0]).dtype, bool(charge(v[0], x[0]) >= 1))
print("NumPy, arrays: ", charge(v, x).dtype, bool(charge(v, x)[0] >= 1))
compiled(v[0], x[0])
compiled(v, x)
print("numba's result types, scalars and arrays:", [each.return_type for each in compiled.nopython_signatures])
print("numba, loop:", bool(spikes_in_a_loop(v, x)[0]))
print("numba, array expression:", bool(spikes_of_arrays(v, x)[0]))
print("numba, stored potential:", bool(stored_potential(v, x)[0]))
PY
expected <<'OUT'
v 0.0010000000474974513 x 2.997999906539917 threshold 1
NumPy, scalars: float32 True
NumPy, arrays:  float32 True
numba's result types, scalars and arrays: [float64, Array(float32, 1, 'C', False, aligned=True)]
numba, loop: False
numba, array expression: False
numba, stored potential: True
OUT
