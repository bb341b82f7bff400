"""Backends that compute a neuron: plain PyTorch, which is the reference, and faster ones that must equal it.

The table needs neither torch nor numba nor triton: a command line is checked by it before they are imported.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from megasnn.common.registry import Registry, later
from megasnn.kernels.neuron_spec import FUSED_CHARGES, FUSED_SURROGATES, NEURONS, SURROGATES, NeuronSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class NeuronBackend:
    """
    Attributes:
        summary: for --help.
        neurons, surrogates: the names that it can compute.
        neuron_multi_step: `(x, spec, v0, w)`, as in `megasnn.kernels.neuron`.
        norm_neuron_kernels: gives a `megasnn.kernels.norm_neuron.NormNeuronKernels`, the four calls of norm, pool and
            neuron.
        refuses: an input -> why it cannot take that one, None where it can.
    """

    summary: str
    neurons: Collection[str]
    surrogates: Collection[str]
    neuron_multi_step: Callable[..., Any]
    norm_neuron_kernels: Callable[[], Any]
    refuses: Callable[[Tensor], str | None] = lambda x: None

    def lacks(self, neuron: str, surrogate: str) -> str | None:
        """Names the part of a neuron that it cannot compute, whatever the input; None where it can."""
        for flag, name, known in (("neuron", neuron, self.neurons), ("surrogate", surrogate, self.surrogates)):
            if name not in known:
                return f"they know the {flag}s {', '.join(known)}, not --{flag} {name}"
        return None

    def unavailable(self, x: Tensor, spec: NeuronSpec) -> str | None:
        """Why it cannot compute this neuron on this input; None where it can."""
        return self.lacks(spec.kind, spec.surrogate) or self.refuses(x)


AUTO_BACKEND = "auto"  # stands for the fastest that can be used
BACKENDS: Registry[NeuronBackend] = Registry(
    "--neuron-backend",
    {  # the reference, and then the faster the later
        "torch": NeuronBackend(
            "plain PyTorch",
            NEURONS,
            SURROGATES,
            later("megasnn.kernels.torch_backend:neuron_multi_step"),
            partial(import_module, "megasnn.kernels.torch_backend"),
        ),
        "fused": NeuronBackend(
            "kernels compiled for the CPU",
            FUSED_CHARGES,
            FUSED_SURROGATES,
            later("megasnn.kernels.numba.norm_neuron:neuron_multi_step"),
            partial(import_module, "megasnn.kernels.numba.norm_neuron"),
            later("megasnn.kernels.numba.available:refuses"),
        ),
        "triton": NeuronBackend(
            "kernels compiled for NVIDIA GPUs",
            FUSED_CHARGES,
            FUSED_SURROGATES,
            later("megasnn.kernels.triton.norm_neuron:neuron_multi_step"),
            partial(import_module, "megasnn.kernels.triton.norm_neuron"),
            later("megasnn.kernels.triton.available:refuses"),
        ),
    },
    also=(AUTO_BACKEND,),
)


def backend_for(name: str, x: Tensor, spec: NeuronSpec) -> NeuronBackend:
    """The backend of a name, or with `auto` the fastest that can compute this neuron on this input.

    Raises:
        ValueError: an unknown name, or one that cannot be used here.
    """
    if name == AUTO_BACKEND:
        asked = x.shape, x.dtype, x.device, spec
        if asked not in _fastest:
            usable = (each for each in reversed(BACKENDS.values()) if each.unavailable(x, spec) is None)
            _fastest[asked] = next(usable)
        return _fastest[asked]
    backend = BACKENDS[name]
    reason = backend.unavailable(x, spec)
    if reason is not None:
        others = [AUTO_BACKEND, *(other for other, each in BACKENDS.items() if each.unavailable(x, spec) is None)]
        raise ValueError(f"the {name} kernels cannot be used: {reason}; choose --neuron-backend {' or '.join(others)}")
    return backend


_fastest: dict[tuple[object, ...], NeuronBackend] = {}
"""Found so far: every step asks the same of every layer."""
