"""The check of a GPU, kernels of neurons: spikes, potentials and gradients, alone and behind a norm with and without
pooling, against the reference.

The reference computes on the CPU. On a GPU torch divides by a number by multiplying with its inverse, which is another
rounding: a neuron whose time constant is no power of two would fire elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf, isnan

import torch
import torch.nn.functional as F
from torch import Tensor

from megasnn.kernels import BACKENDS, NeuronSpec
from megasnn.kernels.norm_neuron import Norm, Unit
from megasnn.kernels.unit import neuron_multi_step, norm_pool_neuron
from tools.benchmark.gpu import Figure, Setting

TESTED = "triton"
REFERENCE = "torch"
DOUBLE = 1e-9
EPS = 1e-5
ALLOWED = 1.5  # x the error of plain PyTorch


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        shape: of the input, without time. steps: of time.
        pool: whether there is pooling behind the norm. repeated: whether each step has the same input there.
    """

    spec: NeuronSpec
    shape: tuple[int, ...]
    steps: int
    pool: bool = False
    repeated: bool = False

    def input(self, dtype: torch.dtype, repeated: bool = False) -> Tensor:
        """The same values each time, on the CPU, with the channels last in memory."""
        time = 1 if repeated else self.steps
        samples, channels, *space = self.shape
        generator = torch.Generator().manual_seed(self.steps)
        values = torch.randn(time, samples, *space, channels, generator=generator, dtype=torch.float32)
        return 2.5 * values.to(dtype).movedim(-1, 2)

    def learned(self, dtype: torch.dtype) -> list[Tensor]:
        """The weight of a learned charge, where there is one."""
        return [torch.tensor(-0.3, dtype=dtype)] if self.spec.kind == "plif" else []


def _spec(kind: str, surrogate: str, v_reset: float | None, detach: bool, **more: float | bool) -> NeuronSpec:
    options = {"v_threshold": 0.6, "v_reset": v_reset, "detach_reset": detach, "surrogate": surrogate, **more}
    return NeuronSpec(kind, **options)  # type: ignore[arg-type]


CASES = (
    Case(_spec("if", "sigmoid", 0.0, True), (2, 5, 6, 7), 1),
    Case(_spec("if", "atan", -0.3, False), (1, 40, 5, 4), 10, pool=True),
    Case(_spec("lif", "sigmoid", 0.0, True), (2, 12, 5, 5), 4, pool=True, repeated=True),  # how a Spikformer begins
    Case(_spec("lif", "sigmoid", 0.0, True), (2, 24, 11), 4),  # its tokens
    Case(_spec("lif", "atan", 0.0, True, tau=1.333, decay_input=False), (2, 8, 4, 6), 10),  # the VGG's
    Case(_spec("lif", "atan", None, False), (2, 5, 6, 7), 3, pool=True),
    Case(_spec("lif", "sigmoid", -0.3, True, tau=3.0), (1, 33, 3, 5), 4),
    Case(_spec("lif", "atan", 0.0, False, tau=1.7), (1, 7, 3, 4), 16, pool=True),
    Case(_spec("lif", "sigmoid", None, False, tau=1.7, decay_input=False), (2, 3, 5, 1), 16),
    Case(_spec("plif", "sigmoid", None, True), (1, 7, 5, 3), 16),
    Case(_spec("plif", "atan", -0.3, False, decay_input=False), (2, 6, 5, 4), 3, pool=True),
    Case(_spec("plif", "atan", 0.0, True), (2, 9, 4, 3), 4, repeated=True),
    Case(_spec("plif", "sigmoid", 0.0, False, decay_input=False), (2, 16, 3, 3), 1),
)


def errors(setting: Setting, case: str = "") -> Iterator[Figure]:
    """Of all cases, each alone and behind a norm."""
    yield from _of_double(setting)
    yield from _of_single(setting)
    yield from _of_bfloat16(setting)


def _of_double(setting: Setting) -> Iterator[Figure]:
    """The arithmetic order is that of the reference but for the sums of a norm, which 1e-9 allows for."""
    flipped, worst = 0, 0.0
    for case, compute in ((case, compute) for case in CASES for compute in (_alone, _behind_a_norm)):
        wanted, found = compute(REFERENCE, case, torch.float64), compute(TESTED, case, torch.float64, setting.device)
        flipped += differing(found[0], wanted[0])
        worst = max(worst, *map(error_of, found[1:], wanted[1:]))
    yield Figure("float64: spikes that differ from the reference", flipped, most=0, note=f"{len(CASES)} neurons")
    yield Figure("float64: largest error of potentials, statistics and gradients", worst, most=DOUBLE)


def _of_single(setting: Setting) -> Iterator[Figure]:
    """Errors against float64, beside those of plain PyTorch in float32, where all three have the same spikes."""
    flipped, by_norm = 0, 0
    plain, ours = 0.0, 0.0
    for case, compute in ((case, compute) for case in CASES for compute in (_alone, _behind_a_norm)):
        exact = compute(REFERENCE, case, torch.float64, values=torch.float32)
        wanted, found = compute(REFERENCE, case, torch.float32), compute(TESTED, case, torch.float32, setting.device)
        different = differing(found[0], wanted[0])
        if compute is _alone:
            flipped += different
        else:
            by_norm += different
        if not different and not differing(wanted[0], exact[0]):
            plain = max(plain, *map(error_of, wanted[1:], exact[1:]))
            ours = max(ours, *map(error_of, found[1:], exact[1:]))
    yield Figure("float32: spikes that differ from the reference", flipped, most=0, note="without a norm")
    yield Figure("float32: spikes that differ, behind a norm", by_norm, note="whose sums have another order")
    yield _given_statistics(setting, torch.float32)
    note = f"{ours:.2g}, plain PyTorch {plain:.2g}; of potentials, statistics and gradients"
    times = ours / plain if plain else None  # None where no case has equal spikes
    yield Figure("float32: largest error, x plain PyTorch's", times, most=ALLOWED, note=note)


def _given_statistics(setting: Setting, dtype: torch.dtype) -> Figure:
    """Against the reference on values that are normalised in the same order: then all that follows is the same, too."""
    fired = ((_fired(case, dtype, setting.device), _should_fire(case, dtype)) for case in CASES)
    flipped, name = sum(differing(*each) for each in fired), str(dtype).removeprefix("torch.")
    return Figure(f"{name}: spikes that differ from the reference, of given statistics", flipped, most=0)


def _of_bfloat16(setting: Setting) -> Iterator[Figure]:
    """The rule: all is computed in float32 from the values as they are, and a gradient is rounded once."""
    flipped, worst, rounding = 0, 0.0, torch.finfo(torch.bfloat16).eps / 2
    for case in CASES[::2]:  # a GPU has other kernels to compile for each
        wanted = _alone(REFERENCE, case, torch.float32, values=torch.bfloat16)
        found = _alone(TESTED, case, torch.bfloat16, setting.device)
        flipped += differing(found[0], wanted[0])
        if not case.learned(torch.float32):  # the logistic function of a GPU may be rounded otherwise
            flipped += int(found[1].dtype != torch.float32) + differing(found[1], wanted[1])
        worst = max(worst, *(_relative(a.float(), b) for a, b in zip(found[2:3], wanted[2:3], strict=True)))
    yield Figure("bfloat16: spikes and potentials that differ from float32's", flipped, most=0)
    yield _given_statistics(setting, torch.bfloat16)
    # The interpreter of Triton cuts off what a GPU rounds.
    most = 1.01 if setting.is_gpu else 2.01
    yield Figure("bfloat16: largest error of a gradient", worst / rounding, "roundings", most=most)


def error_of(actual: Tensor, expected: Tensor) -> float:
    """The largest difference as a part of the largest value; infinite where one of them is nan, which no bound sees."""
    error = float((actual - expected).abs().max() / expected.abs().max().clamp(min=1))
    return inf if isnan(error) else error


def _relative(actual: Tensor, expected: Tensor) -> float:
    """The largest difference as a part of each value, for values that are not too small for float32."""
    error = float(((actual - expected).abs() / (expected.abs() + 1e-3 * expected.abs().max())).max())
    return inf if isnan(error) else error


def differing(found: Tensor, wanted: Tensor) -> int:
    return int((found.to(wanted.dtype) != wanted).sum())


def _alone(
    backend: str,
    case: Case,
    dtype: torch.dtype,
    device: torch.device | None = None,
    values: torch.dtype | None = None,
) -> list[Tensor]:
    """Spikes, potential and gradients, on the CPU.

    Args:
        dtype: that the backend is given. values: that they are rounded to before, if that is another one.
    """
    x, *learned = _leaves([case.input(values or dtype), *case.learned(_whole(values or dtype))], dtype, device)
    spikes, v = neuron_multi_step(x, case.spec, w=learned[0] if learned else None, backend=backend)
    return _on_cpu([spikes, v, *_gradients(spikes, [x, *learned])])


def _behind_a_norm(
    backend: str,
    case: Case,
    dtype: torch.dtype,
    device: torch.device | None = None,
    values: torch.dtype | None = None,
) -> list[Tensor]:
    """Spikes, mean, variance and gradients, on the CPU."""
    given = [case.input(values or dtype, case.repeated), *_scale_and_shift(case, values or dtype)]
    x, weight, bias, *learned = _leaves([*given, *case.learned(values or dtype)], dtype, device)
    spikes, mean, variance, _ = norm_pool_neuron(
        x, weight, bias, spec=case.spec, training=True, w=learned[0] if learned else None, pool=case.pool,
        time_steps=case.steps, backend=backend,
    )  # fmt: skip
    return _on_cpu([spikes, mean, variance, *_gradients(spikes, [x, weight, bias, *learned])])


def _statistics(case: Case) -> tuple[Tensor, Tensor]:
    return torch.linspace(-0.2, 0.3, case.shape[1]).double(), torch.linspace(0.8, 1.9, case.shape[1]).double()


def _fired(case: Case, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Spikes of given statistics, on the CPU."""
    given = [*_statistics(case), *_scale_and_shift(case, _whole(dtype)), *case.learned(_whole(dtype))]
    mean, variance, weight, bias, *learned = (each.to(device) for each in given)
    x, unit = case.input(dtype, case.repeated).to(device), Unit(case.spec, EPS, case.pool, case.steps)
    norm = Norm(mean, variance, weight, bias)
    # Packed as in training, so that a GPU compiles no other kernel for this.
    spikes, _ = BACKENDS[TESTED].unit_calls().fire(x, norm, learned[0] if learned else None, unit, True)
    return spikes.cpu()


def _should_fire(case: Case, dtype: torch.dtype) -> Tensor:
    """The same by plain PyTorch: scale and shift in double precision, then a product and a sum, each rounded."""
    numbers, (mean, variance) = _whole(dtype), _statistics(case)
    weight, bias = _scale_and_shift(case, numbers)
    scale = 1 / (variance + EPS).sqrt() * weight.double()
    factor, term = (
        each.to(numbers).view(-1, *[1] * (len(case.shape) - 2)) for each in (scale, bias.double() - mean * scale)
    )
    y = case.input(dtype, case.repeated).to(numbers) * factor + term
    if case.pool:
        y = F.max_pool2d(y.flatten(0, 1), 3, 2, 1).unflatten(0, y.shape[:2])
    y = y.expand(case.steps, *y.shape[1:])
    learned = case.learned(numbers)
    return neuron_multi_step(y, case.spec, w=learned[0] if learned else None, backend=REFERENCE)[0]


def _whole(dtype: torch.dtype) -> torch.dtype:
    """What parameters have beside an input of this type."""
    return torch.float32 if dtype == torch.bfloat16 else dtype


def _scale_and_shift(case: Case, dtype: torch.dtype) -> list[Tensor]:
    return [torch.linspace(start, end, case.shape[1]).to(dtype) for start, end in ((0.5, 2.0), (0.0, 1.0))]


def _leaves(values: Sequence[Tensor], dtype: torch.dtype, device: torch.device | None) -> list[Tensor]:
    first, *others = values
    numbers = _whole(dtype)
    moved = chain([first.to(device, dtype)], (each.to(device, numbers) for each in others))
    return [each.detach().requires_grad_() for each in moved]


def _gradients(spikes: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    order = torch.arange(spikes.numel(), dtype=torch.float64).view(spikes.shape)
    weights = (order * 0.7).sin().bfloat16().to(spikes)  # exact in every type
    return torch.autograd.grad(spikes, inputs, weights)


def _on_cpu(values: Sequence[Tensor]) -> list[Tensor]:
    return [each.detach().cpu() for each in values]
