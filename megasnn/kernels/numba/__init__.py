"""The CPU backend: loops compiled by numba.

`lanes` are neighbouring numbers that the processor computes at once. `step` is one time step on lanes, `time_loop` all
time steps. `loops` and `pool` are the kernels without and with pooling; `norm_neuron` starts them. `spike_sums` forms
products with spikes: for each spike it adds a row of the other operand, by the kernels in `spike_sum_loops`.
"""
