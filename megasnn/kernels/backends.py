"""Backends that compute neurons: plain PyTorch as the reference, and faster ones that must equal it.

Imports neither torch nor numba nor triton: the command line is checked first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
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
        neurons, surrogates: names the backend computes.
        norm_neuron_kernels: makes its `megasnn.kernels.norm_neuron_kernels.NormNeuronKernels`.
        why_unusable: input -> the reason against it, or None.
    """

    summary: str
    neurons: Collection[str]
    surrogates: Collection[str]
    norm_neuron_kernels: Callable[[], Any]
    why_unusable: Callable[[Tensor], str | None] = lambda x: None

    def lacks(self, neuron: str, surrogate: str) -> str | None:
        """Names a neuron part that the backend computes for no input; None if there is none."""
        for flag, name, known in (("neuron", neuron, self.neurons), ("surrogate", surrogate, self.surrogates)):
            if name not in known:
                return f"they know the {flag}s {', '.join(known)}, not --{flag} {name}"
        return None

    def unavailable(self, x: Tensor, spec: NeuronSpec) -> str | None:
        """Reason against this neuron on this input, or None."""
        return self.lacks(spec.kind, spec.surrogate) or self.why_unusable(x)


AUTO_BACKEND = "auto"
"""Stands for the fastest usable backend."""
BACKENDS: Registry[NeuronBackend] = Registry(
    "--neuron-backend",
    {  # the reference, then faster and faster ones: backend_for depends on the order
        "torch": NeuronBackend(
            "plain PyTorch",
            NEURONS,
            SURROGATES,
            later("megasnn.kernels.torch_backend:TorchKernels"),
        ),
        "fused": NeuronBackend(
            "kernels compiled for the CPU",
            FUSED_CHARGES,
            FUSED_SURROGATES,
            later("megasnn.kernels.numba.norm_neuron:NumbaKernels"),
            later("megasnn.kernels.numba.available:why_unusable"),
        ),
        "triton": NeuronBackend(
            "kernels compiled for NVIDIA GPUs",
            FUSED_CHARGES,
            FUSED_SURROGATES,
            later("megasnn.kernels.triton.norm_neuron:TritonKernels"),
            later("megasnn.kernels.triton.available:why_unusable"),
        ),
    },
    also=(AUTO_BACKEND,),
)
_fastest: dict[tuple[object, ...], NeuronBackend] = {}
"""Answers of `backend_for` for `auto`: every step asks the same for every layer."""


def backend_for(name: str, x: Tensor, spec: NeuronSpec) -> NeuronBackend:
    """Returns the named backend, or for `auto` the fastest usable one.

    Raises:
        ValueError: an unknown name, or a backend that cannot be used here.
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
        usable_names = [other for other, each in BACKENDS.items() if each.unavailable(x, spec) is None]
        choices = " or ".join([AUTO_BACKEND, *usable_names])
        raise ValueError(f"the {name} kernels cannot be used: {reason}; choose --neuron-backend {choices}")
    return backend
