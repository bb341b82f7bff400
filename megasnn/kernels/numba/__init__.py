"""The CPU backend: loops compiled by numba.

`step` is one time step on `lanes`, `time_loop` all time steps. `loops` and `pool` are the kernels without and with
pooling; `norm_neuron` starts them. `spike_sums` and `spike_sum_loops` form products with spikes.
"""
