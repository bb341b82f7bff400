"""The backend of the CPU: loops that numba compiles.

`neuron` is one neuron at one time step, `row` many of them, `unit` and `pool` the loops of a norm-neuron unit without
and with pooling; `calls` starts them, `alone` is a layer of neurons without a norm. All loops work on rows of
neighbouring elements, one row for each time step. A block of them, small enough for the caches, goes through all time
steps before the next one starts: membrane potentials never reach memory. No fast-math anywhere: forward does the
operations of `kernels/reference.py` in their order, and no spike may flip.
"""
