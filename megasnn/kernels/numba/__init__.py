"""The CPU backend: loops compiled by numba.

`lanes` are neighbouring numbers that the processor computes at once. `step` is one time step of a neuron on lanes,
`time_loop` all time steps. `loops` and `pool` are the kernels of norm and neurons without and with pooling;
`norm_neuron` starts them. A block of neurons fits in the L1 cache and runs all time steps before the next block starts,
so potentials never reach memory. Forward does the operations of `torch_backend` in their order, without fast-math: no
spike may flip.

`spike_sums` forms products with spikes as sums of rows of the other operand, one row for each spike; `spike_sum_loops`
finds the spikes and sums.
"""
