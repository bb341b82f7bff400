"""The backend of the CPU: loops that numba compiles.

`lanes` are neighbouring numbers that the processor computes at once; `neuron` is so many neurons at one time step,
`row` many of them through all steps, `unit` and `pool` the loops of a norm-neuron unit without and with pooling;
`calls` starts them, `alone` is a layer of neurons without a norm. A piece of neurons, small enough for the L1 cache,
goes through all time steps before the next one starts: potentials never reach memory. Forward does the operations of
`torch_backend` in their order, without fast-math: no spike may flip.

`spike_sums` forms products of spikes as sums of rows of the other operand, one for each spike: `spike_lists` finds the
spikes, `spike_sum_loops` sums.
"""
