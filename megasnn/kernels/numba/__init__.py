"""The CPU backend: loops compiled by numba.

`lanes` are neighbouring numbers that the processor computes at once. `step` is one time step of a neuron on lanes,
`time_loop` all time steps. `loops` and `pool` are the kernels of norm and neurons without and with pooling;
`norm_neuron` starts them. `spike_sums` forms products with spikes as sums of rows of the other operand, one row for
each spike, by the kernels in `spike_sum_loops`.
"""
