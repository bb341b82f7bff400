"""The backend of the CPU: loops that numba compiles.

`lanes` are neighbouring numbers that the processor computes at once; `neuron` is so many neurons at one time step,
`row` many of them through all steps, `unit` and `pool` the loops of a norm-neuron unit without and with pooling;
`calls` starts them, `alone` is a layer of neurons without a norm. All loops work on rows of neighbouring elements, one
row for each time step. A piece of them, small enough for the L1 cache, goes through all time steps before the next one
starts: membrane potentials never reach memory. No fast-math anywhere: forward does the operations of
`kernels/torch_backend.py` in their order, and no spike may flip.
"""
