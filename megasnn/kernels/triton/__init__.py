"""Triton kernels for NVIDIA GPUs from compute capability 8.0 on.

`step` is one time step. `fire`, `sums`, `pool`, `codec` and `philox` hold the kernels; `norm_neuron` starts the
neurons'. With TRITON_INTERPRET=1, set before triton is imported, kernels take tensors on the CPU: slowly, for tests.
"""
