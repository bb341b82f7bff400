"""The backend of the CPU: loops that numba compiles.

`neuron` is a row of neurons at one time step, `unit` and `pool` the loops of a norm-neuron unit without and with
pooling, `calls` starts them, `alone` is a layer of neurons without a norm. All loops work on rows of neighbouring
elements, one row for each time step, and a block of them, small enough for the caches, goes through all time steps
before the next one starts: membrane potentials never reach memory. No fast-math anywhere: the operations and their
order are those of `kernels/reference.py`, and no spike may flip.
"""
