"""Backends that compute neurons: plain PyTorch as the reference, and faster ones that must equal it.

Imports neither torch nor numba nor triton: the command line is checked first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megasnn.common.registry import Registry, later
from megasnn.kernels.neuron_spec import (
    COMPILED_NEURONS,
    FUSED_SURROGATES,
    NEURONS,
    SURROGATES,
    NeuronSpec,
)

if TYPE_CHECKING:
    from torch import Tensor

    from megasnn.kernels.norm_neuron_kernels import NeuronKernels, NormNeuron, NormNeuronKernels


@dataclass(frozen=True)
class NeuronBackend:
    """One implementation of the neurons, and the inputs that it takes.

    Attributes:
        summary: for --help.
        norm_neuron_kernels, neuron_kernels: make its `NormNeuronKernels` and `NeuronKernels` (norm_neuron_kernels.py),
            from an input shape and type, and a `NormNeuron` or a `NeuronSpec`.
        why_unusable: input -> the reason against it, or None.
    """

    summary: str
    neurons: Collection[str]
    surrogates: Collection[str]
    norm_neuron_kernels: Callable[..., NormNeuronKernels[Any]]
    neuron_kernels: Callable[..., NeuronKernels]
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
            later("megasnn.kernels.torch_backend:TorchNormNeuron"),
            later("megasnn.kernels.torch_backend:TorchNeuron"),
        ),
        "fused": NeuronBackend(
            "kernels compiled for the CPU",
            COMPILED_NEURONS,
            FUSED_SURROGATES,
            later("megasnn.kernels.numba.norm_neuron:NumbaNormNeuron"),
            later("megasnn.kernels.numba.neuron:numba_neuron_kernels"),
            later("megasnn.kernels.numba.available:why_unusable"),
        ),
        "triton": NeuronBackend(
            "kernels compiled for NVIDIA GPUs",
            COMPILED_NEURONS,
            FUSED_SURROGATES,
            later("megasnn.kernels.triton.norm_neuron:TritonNormNeuron"),
            later("megasnn.kernels.triton.neuron:triton_neuron_kernels"),
            later("megasnn.kernels.triton.available:why_unusable"),
        ),
    },
    also=(AUTO_BACKEND,),
)
MOST_PREPARED = 4096
_prepared: dict[tuple[object, ...], Any] = {}
"""Kernels by backend name, input shape, type and device, and neuron: every step asks the same for every layer."""


def norm_neuron_kernels(backend: str, x: Tensor, norm_neuron: NormNeuron) -> NormNeuronKernels[Any]:
    """The named backend's kernels for an input. Raises ValueError as `backend_for` does."""
    asked = backend, x.shape, x.dtype, x.device, norm_neuron
    if asked not in _prepared:
        make = backend_for(backend, x, norm_neuron.spec).norm_neuron_kernels
        _remember(asked, make(x.shape, x.dtype, norm_neuron))
    found: NormNeuronKernels[Any] = _prepared[asked]
    return found


def neuron_kernels(backend: str, x: Tensor, spec: NeuronSpec) -> NeuronKernels:
    """The named backend's kernels for neurons without a norm. Raises ValueError as `backend_for` does."""
    asked = backend, x.shape, x.dtype, x.device, spec
    try:
        found: NeuronKernels | None = _prepared.get(asked)
    except TypeError:
        # torch.export's sizes are symbols, which have no hash.
        return backend_for(backend, x, spec).neuron_kernels(x.shape, x.dtype, spec)
    if found is None:
        found = backend_for(backend, x, spec).neuron_kernels(x.shape, x.dtype, spec)
        _remember(asked, found)
    return found


def _remember(asked: tuple[object, ...], kernels: object) -> None:
    # Inputs whose sizes change in every step would fill the memory.
    if len(_prepared) >= MOST_PREPARED:
        _prepared.clear()
    _prepared[asked] = kernels


def backend_for(name: str, x: Tensor, spec: NeuronSpec) -> NeuronBackend:
    """Returns the named backend, or for `auto` the fastest usable one.

    Raises:
        ValueError: an unknown name, or a backend that cannot be used here.
    """
    if name == AUTO_BACKEND:
        # The last entries of the table are the fastest.
        return next(each for each in reversed(BACKENDS.values()) if each.unavailable(x, spec) is None)
    backend = BACKENDS[name]
    reason = backend.unavailable(x, spec)
    if reason is not None:
        usable_names = [other for other, each in BACKENDS.items() if each.unavailable(x, spec) is None]
        choices = " or ".join([AUTO_BACKEND, *usable_names])
        raise ValueError(f"the {name} kernels cannot be used: {reason}; choose --neuron-backend {choices}")
    return backend
