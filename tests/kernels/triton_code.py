"""Triton's kernels compiled for GPUs that are not there, as the calls would start them, on tensors without memory."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from tempfile import NamedTemporaryFile
from typing import Any
from unittest import mock

import torch

from megasnn.kernels import NeuronSpec
from megasnn.kernels.norm_neuron_kernels import BatchNorm, NormNeuron, NormNeuronInput

SMALL = 8, 64, 32, 32  # samples, channels and sides: programs that sum have several tiles


@dataclass(frozen=True)
class Code:
    """A kernel's code: intermediate as text, and of the machine."""

    kernel: str
    ptx: str
    cubin: bytes

    @cached_property
    def sass(self) -> str:
        """The machine's as text."""
        return self._told("-sass")

    @cached_property
    def stack(self) -> int:
        """Bytes of local memory that a thread takes for what its registers do not hold."""
        found = re.findall(r"(?:STACK|LOCAL):(\d+)", self._told("-res-usage"))
        assert len(found) == 2
        return sum(map(int, found))

    def _told(self, option: str) -> str:
        from triton import knobs

        with NamedTemporaryFile() as file:
            file.write(self.cubin)
            file.flush()
            told = [knobs.nvidia.cuobjdump.path, option, file.name]
            return subprocess.run(told, capture_output=True, text=True, check=True).stdout

    @cached_property
    def memory(self) -> str:
        """Its loads (L) from and stores (S) to the card's memory, and barriers (B) of a program's threads, in order."""
        found = re.findall(r"\b(ld|st)\.global|\b(bar)\.sync", self.ptx)
        return "".join({"ld": "L", "st": "S", "bar": "B"}[access or barrier] for access, barrier in found)

    def count(self, start: str) -> int:
        """Instructions of the intermediate code that start so."""
        return len(re.findall(rf"\b{re.escape(start)}", self.ptx))


class AbsentGpu:
    """What Triton asks its driver for when it compiles."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling_for(capability: int) -> Iterator[list[Code]]:
    """In it kernels are compiled where they would be started, and nothing is computed."""
    from triton.runtime import driver

    from megasnn.kernels.triton.launch import OPTIONS, Launch

    found: list[Code] = []

    def compile_only(launch: Launch, *tensors: torch.Tensor | None) -> None:
        code = launch.kernel.warmup(*tensors, *launch.numbers, **launch.constants, **OPTIONS, grid=(1,))
        found.append(Code(launch.kernel.fn.__name__, code.asm["ptx"], code.asm["cubin"]))

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(driver, "_active", AbsentGpu(capability)))
        stack.enter_context(mock.patch.object(Launch, "__call__", compile_only))
        yield found


@cache
def compiled(
    capability: int,
    dtype: torch.dtype,
    steps: int,
    tau: float,
    pool: bool,
    decay_input: bool = True,
    sizes: tuple[int, int, int, int] = SMALL,
) -> list[Code]:
    """All kernels that forward and backward of a unit start, and without pooling those of neurons alone.

    Several tests look at the same ones: compiling takes seconds.
    """
    from megasnn.kernels.triton.neuron import TritonNeuron
    from megasnn.kernels.triton.norm_neuron import TritonNormNeuron

    def absent(*sides: int) -> torch.Tensor:
        samples, channels, *_ = sizes
        return torch.empty(steps, samples, *sides, channels, dtype=dtype, device="meta").movedim(-1, 2)

    spec = NeuronSpec(kind="lif", tau=tau, decay_input=decay_input)
    channels = torch.empty(sizes[1], device="meta")
    neuron, norm = NormNeuron(spec, 1e-5, pool, steps), (channels.double(), channels.double(), channels, channels)
    x, g = absent(*sizes[2:]), absent(*neuron.space_of_spikes(sizes[2:]))
    kernels, inputs = TritonNormNeuron(x.shape, dtype, neuron), NormNeuronInput(x, *norm)
    with compiling_for(capability) as found:
        kernels.statistics(x, BatchNorm(channels, channels))
        kernels.fire(inputs, packed=True)
        complete = kernels.backward_sums(inputs, g, False, count=7)
        kernels.input_gradient(inputs, g, complete.sums, 7, complete.intermediate)
        if not pool:
            TritonNeuron(x.shape, dtype, spec).multi_step(x.requires_grad_(), None, None)[0].backward(g)
    return found
