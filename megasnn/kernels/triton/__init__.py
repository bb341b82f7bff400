"""Neurons, norm, codec and random choices as Triton kernels, for NVIDIA GPUs from compute capability 8.0 on.

`neuron` and `pool` are the parts that kernels are made of; `unit`, `sums`, `codec` and `philox` are the kernels;
`calls` and `alone` start them with tensors. `available` says why they cannot be used, and alone needs no triton.

With TRITON_INTERPRET=1, set before triton is imported, they take tensors on the CPU: for tests, slowly.
"""
