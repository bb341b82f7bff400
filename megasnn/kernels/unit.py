"""The public functions: check the arguments, choose a backend, run it."""

from __future__ import annotations

import torch
from torch import Tensor

from megasnn.kernels.backends import AUTO, backend_for
from megasnn.kernels.norm_neuron import Shared, Unit, UnitOutput, norm_pool_neuron_by
from megasnn.kernels.spec import NEURONS, NeuronSpec


def neuron_multi_step(
    x: Tensor,
    spec: NeuronSpec,
    v0: Tensor | None = None,
    w: Tensor | None = None,
    backend: str = AUTO,
) -> tuple[Tensor, Tensor]:
    """A layer of neurons over all time steps.

    Args:
        x: input current ``[T, N, ...]``, in any memory order. On the meta device only shapes are computed.
        v0: membrane potential before the first step ``[N, ...]``; without it ``v_reset``, or 0 with a soft reset.
        w: the parameter of a plif neuron, a scalar.

    Returns:
        Spikes, shaped and typed like ``x``, and the membrane potential ``[N, ...]`` after the last step.

    Raises:
        ValueError: an unknown backend, a shape that does not fit, a plif neuron without ``w`` (or another with it),
            or a backend that cannot be used here.
    """
    _check_neuron(x, spec, w)
    if v0 is not None and v0.shape != x.shape[1:]:
        raise ValueError(f"v0 {tuple(v0.shape)} must have the shape of one time step, {tuple(x.shape[1:])}")
    if x.is_meta:
        return torch.empty_like(x), x.new_empty(x.shape[1:])
    return backend_for(backend, x, spec).neuron_multi_step(x, spec, v0, w)


def norm_pool_neuron(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    *,
    spec: NeuronSpec,
    training: bool,
    eps: float = 1e-5,
    w: Tensor | None = None,
    pool: bool = False,
    time_steps: int | None = None,
    backend: str = AUTO,
    fires: bool = True,
    shared: Shared | None = None,
    above: Tensor | None = None,
) -> UnitOutput:
    """Batch norm, then optionally ``MaxPool2d(3, stride=2, padding=1)``, then a layer of neurons at rest.

    In training the norm uses mean and biased variance of ``x`` over time, samples and space, and leaves the running
    statistics alone: the caller merges what is returned. In evaluation it uses the running statistics.

    Args:
        x: ``[T, N, C, H, W]`` or ``[T, N, C, L]``; on the meta device as for `neuron_multi_step`. With
            ``T = 1 < time_steps`` the same input comes at every step.
        weight, bias: ``[C]`` or None.
        running_mean, running_var: ``[C]``; without them evaluation normalises with the batch as well.
        pool: needs ``[T, N, C, H, W]``.
        fires: False where only the graph is wanted: the spikes are then zeros without memory.
        shared: with whom the values are shared that are normalised together.
        above: with ``pool``, the row ``[T, N, C, 1, W]`` above ``x`` that another rank has, which statistics do not
            count. Then ``x`` begins with an even row of the image; without it, or of no row, at its edge.

    Returns:
        Spikes, and the statistics that were used (float32 when ``x`` is bfloat16); see `UnitOutput`.

    Raises:
        ValueError: an unknown backend, shapes or time steps that do not fit, fewer than two values per channel in
            training, or a backend that cannot be used here.
    """
    _check_neuron(x, spec, w)
    steps = x.shape[0] if time_steps is None else time_steps
    _check_norm(x, weight, bias, training and shared is None, pool, steps)
    if x.is_meta:
        shape = Unit(spec, eps, pool, steps).shape_of_spikes(x)
        of_channels = x.new_empty(x.shape[2:3])
        return UnitOutput(x.new_empty(shape), of_channels, of_channels, x.numel() // x.shape[2])
    running = None if training or running_mean is None or running_var is None else (running_mean, running_var)
    calls = backend_for(backend, x, spec).unit_calls()
    return norm_pool_neuron_by(calls, x, weight, bias, running, w, Unit(spec, eps, pool, steps), fires, shared, above)


def _check_neuron(x: Tensor, spec: NeuronSpec, w: Tensor | None) -> None:
    if x.ndim < 2 or not x.is_floating_point():
        raise ValueError(f"a neuron takes floating-point input [T, N, ...], got {x.dtype} {tuple(x.shape)}")
    if (w is not None) != NEURONS[spec.kind].learns:
        learning = ", ".join(name for name, neuron in NEURONS.items() if neuron.learns)
        raise ValueError(f"w is the parameter of a {learning} neuron and of no other; got kind {spec.kind!r} and w={w}")
    if w is not None and w.numel() != 1:
        raise ValueError(f"w of a {spec.kind} neuron is a scalar, got {tuple(w.shape)}")


def _check_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, pool: bool, time_steps: int
) -> None:
    if x.ndim not in (4, 5) or (pool and x.ndim != 5):
        wanted = "[T, N, C, H, W]" if pool else "[T, N, C, H, W] or [T, N, C, L]"
        raise ValueError(f"norm{', pool' if pool else ''} and neuron take {wanted}, got {tuple(x.shape)}")
    if x.shape[0] not in (1, time_steps):
        raise ValueError(f"input has {x.shape[0]} time steps; it must have 1 or {time_steps} (--time-steps)")
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None and value.shape != x.shape[2:3]:
            raise ValueError(f"the norm's {name} {tuple(value.shape)} does not fit {x.shape[2]} channels")
    if training and x.numel() == x.shape[2]:
        raise ValueError(f"batch norm in training needs more than one value per channel, got input {tuple(x.shape)}")
