"""Description of a spiking neuron for all backends, and the tables: neurons, surrogate gradients.

Imports neither torch nor numba nor triton: the command line is checked first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from megasnn.common.registry import Registry, later

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_LEVEL = 8
"""Of integer LIF neurons."""
_OF_COUNTS = {"v_reset": None, "decay_input": False, "surrogate": "sigmoid", "alpha": None}
_WITHOUT_RECURRENCE = {"tau": 2.0, "v_reset": 0.0, "decay_input": True, "detach_reset": True}
_TERNARY = {**_WITHOUT_RECURRENCE, "surrogate": "sigmoid", "alpha": None}
# Layers are a higher room. The table only names a layer of theirs, which is imported when it is first built.
_LAYERS = "megasnn.layers.psn"


@dataclass(frozen=True)
class Neuron:
    """A kind of neuron.

    Attributes:
        summary: for --help.
        charge: (a step's input, last potential, description, q) -> potential before firing. q is a learned time
            constant's `sigmoid(w)`, or the result of `constant`.
        leaks: the potential decays by `tau`.
        learns: the time constant is learned, by a parameter `w` that starts at `tau`.
        constant: (input of all steps, description) -> q, computed once for all steps.
        levels: D, if the neuron fires whole numbers from 0 to D; None for spikes.
        ternary: it fires -1, 0 and 1, by rules of its own: see `megasnn.kernels.bispike`.
        fixed: required field values in the description.
        layer: (description, context) -> layer, for neurons without recurrence.
    """

    summary: str
    charge: Callable[[Tensor, Tensor, NeuronSpec, Any], Tensor]
    leaks: bool = True
    learns: bool = False
    constant: Callable[[Tensor, NeuronSpec], Any] = lambda inputs, spec: None
    levels: int | None = None
    ternary: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict)
    layer: Callable[..., Any] | None = None


def _integrate(x: Tensor, v: Tensor, spec: NeuronSpec, q: Any) -> Tensor:
    return v + x


def _leak(x: Tensor, v: Tensor, spec: NeuronSpec, q: Any) -> Tensor:
    if spec.decay_input:
        return v + (x - (v - spec.rest)) / q
    return v - (v - spec.rest) / q + x


def _divisor(inputs: Tensor, spec: NeuronSpec) -> float | Tensor:
    """The leak's divisor, a tensor unless it is a power of two."""
    # On a GPU torch does not divide by a number: it multiplies by the reciprocal, which is rounded once more unless the
    # number is a power of two. It divides by a tensor.
    return spec.tau if _is_power_of_two(spec.tau) else inputs.new_full((), spec.tau)


def _learned_leak(x: Tensor, v: Tensor, spec: NeuronSpec, q: Any) -> Tensor:
    return v + (x - (v - spec.rest)) * q if spec.decay_input else v - (v - spec.rest) * q + x


def _decay(x: Tensor, v: Tensor, spec: NeuronSpec, q: Any) -> Tensor:
    return (1.0 - 1.0 / spec.tau) * v + x


def _no_charge(x: Tensor, v: Tensor, spec: NeuronSpec, q: Any) -> Tensor:
    raise ValueError(f"a {spec.kind} neuron takes all time steps at once: use megasnn.layers.neuron.make_neuron")


def _is_power_of_two(number: float) -> bool:
    return math.frexp(number)[0] == 0.5


NEURONS: Registry[Neuron] = Registry(
    "--neuron",
    {
        "lif": Neuron("leaky integrate-and-fire", _leak, constant=_divisor),
        "if": Neuron("without leak", _integrate, leaks=False),
        "plif": Neuron("with a learned time constant for each layer", _learned_leak, learns=True),
        **{
            f"ilif{most}": Neuron(f"integer LIF, up to {most} spikes a step", _decay, levels=most, fixed=_OF_COUNTS)
            for most in range(1, LARGEST_LEVEL + 1)
        },
        "psn": Neuron(
            "parallel spiking neuron, with learned weights between all time steps",
            _no_charge,
            leaks=False,
            fixed=_WITHOUT_RECURRENCE,
            layer=later(f"{_LAYERS}:ParallelPSN"),
        ),
        "sliding_psn": Neuron(
            "the same with one learned weight for this step and one for the last",
            _no_charge,
            leaks=False,
            fixed=_WITHOUT_RECURRENCE,
            layer=later(f"{_LAYERS}:ParallelSlidingPSN"),
        ),
        "bispike": Neuron(
            "elastic bi-spiking, fires -1, 0 or 1, with a decay of its own",
            _integrate,
            leaks=False,
            ternary=True,
            fixed=_TERNARY,
            layer=later("megasnn.layers.bispike:ParallelBiSpike"),
        ),
    },
)


class Surrogate(NamedTuple):
    """A surrogate gradient.

    Attributes:
        spikingjelly: its class in spikingjelly.activation_based.surrogate; None with a `gradient`.
        gradient: (potential above the threshold, alpha) -> the step's surrogate derivative.
    """

    spikingjelly: str | None
    alpha: float
    gradient: Callable[[Tensor, float], Tensor] | None = None


def _triangle(x: Tensor, alpha: float) -> Tensor:
    """A triangle with height 1 / alpha and half width alpha (arXiv 2202.11946, equation 4)."""
    return (alpha - x.abs()).clamp(min=0) / alpha**2


def _slayer(x: Tensor, alpha: float) -> Tensor:
    """An exponential around the threshold, 0.4 of the height in arXiv 1810.08646 (as in arXiv 2408.07517)."""
    return 0.2 * alpha * (-alpha * x.abs()).exp()


SURROGATES: Registry[Surrogate] = Registry(
    "--surrogate",
    {
        "sigmoid": Surrogate("Sigmoid", 4.0),
        "atan": Surrogate("ATan", 2.0),
        "erf": Surrogate("Erf", 2.0),
        "fake_numerical_gradient": Surrogate("FakeNumericalGradient", 0.3),
        "log_tailed_relu": Surrogate("LogTailedReLU", 0.0),
        "nonzero_sign_log_abs": Surrogate("NonzeroSignLogAbs", 1.0),
        "piecewise_exp": Surrogate("PiecewiseExp", 1.0),
        "piecewise_quadratic": Surrogate("PiecewiseQuadratic", 1.0),
        "q_pseudo_spike": Surrogate("QPseudoSpike", 2.0),
        "rect": Surrogate("Rect", 1.0),
        "s2nn": Surrogate("S2NN", 4.0),
        "slayer": Surrogate(None, 5.0, _slayer),
        "soft_sign": Surrogate("SoftSign", 2.0),
        "super_spike": Surrogate("SuperSpike", 1.0),
        "triangular": Surrogate(None, 1.0, _triangle),
    },
)


@dataclass(frozen=True)
class NeuronSpec:
    """A neuron with the semantics of SpikingJelly's multi-step neurons.

    A time step charges, fires and resets, for input x, potential v, and r = v_reset, or 0 with a soft reset::

        if      h = v + x
        lif     h = v + (x - (v - r)) / tau;  without decay_input  h = v - (v - r) / tau + x
        plif    as lif, with a learned factor sigmoid(w) in place of 1 / tau
        ilif4   h = v - v / tau + x  (arXiv 2407.20708)
        fire    s = 1 where h >= v_threshold;  ilif4  s = h / v_threshold, clipped to 0 to 4, rounded half to even
        reset   v = v_reset where s = 1;  with v_reset None  v = h - s * v_threshold

    `psn` and `sliding_psn` (arXiv 2304.12760) are products over all time steps, in `megasnn.layers`. `bispike` (arXiv
    2406.03287) is in `megasnn.kernels.bispike`.

    Attributes:
        kind: name in `megasnn.kernels.NEURONS`.
        tau: in time steps, above 1; plif's initial one.
        v_threshold: psn's and sliding_psn's initial one; bispike's amplitude.
        v_reset: potential after a spike; None: soft reset.
        detach_reset: no gradient through the spike in the reset.
        surrogate: name in `megasnn.kernels.SURROGATES`; ilif has the gradient of h / v_threshold from 0 to 4 instead,
            bispike from -1 to 1.
        alpha: surrogate sharpness; None for SpikingJelly's default.
    Raises:
        ValueError: unknown kind or surrogate, tau <= 1 with a leak, an amplitude that is not positive, or a value that
            the kind does not allow.
    """

    kind: str = "lif"
    tau: float = 2.0
    v_threshold: float = 1.0
    v_reset: float | None = 0.0
    decay_input: bool = True
    detach_reset: bool = True
    surrogate: str = "sigmoid"
    alpha: float | None = None

    def __post_init__(self) -> None:
        neuron = NEURONS.of_argument("kind", self.kind)
        surrogate = SURROGATES.of_argument("surrogate", self.surrogate)
        if neuron.leaks and not self.tau > 1.0:
            raise ValueError(f"--tau {self.tau} must be greater than 1 for --neuron {self.kind}")
        wrong = [name for name, value in neuron.fixed.items() if getattr(self, name) != value]
        if wrong:
            got = ", ".join(_flag(name, getattr(self, name)) for name in wrong)
            needed = ", ".join(_flag(name, neuron.fixed[name]) for name in wrong)
            raise ValueError(f"--neuron {self.kind} with {got}: it needs {needed}")
        if neuron.ternary and not 0 < self.v_threshold < math.inf:
            raise ValueError(f"--v-threshold {self.v_threshold} must be a positive number for --neuron {self.kind}")
        if self.alpha is None and neuron.levels is None and not neuron.ternary:
            # The dataclass is frozen, and this default depends on another field.
            object.__setattr__(self, "alpha", surrogate.alpha)

    @property
    def largest(self) -> int:
        return NEURONS[self.kind].levels or 1

    @property
    def lowest(self) -> int:
        return -1 if NEURONS[self.kind].ternary else 0

    @property
    def surrogate_alpha(self) -> float:
        """Not for ilif4 and bispike, whose gradients have no sharpness."""
        assert self.alpha is not None
        return float(self.alpha)

    @property
    def rest(self) -> float:
        """Potential before the first step: ``v_reset``, or 0 with a soft reset."""
        return 0.0 if self.v_reset is None else self.v_reset


def _flag(name: str, value: Any) -> str:
    flag = "surrogate-alpha" if name == "alpha" else name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    if value is None:
        value = "none"
    return f"--{flag} {value}"


class FusedSurrogate(NamedTuple):
    """Compiled kernels' surrogate gradient, `amplitude * shape(slope * (h - threshold))`, for alpha = 1."""

    code: str
    amplitude: float
    slope: float


FUSED_CHARGES = ("lif", "if", "plif")
COMPILED_NEURONS = (*FUSED_CHARGES, "bispike")
FUSED_SURROGATES: Registry[FusedSurrogate] = Registry(
    "--surrogate",
    {"sigmoid": FusedSurrogate("SIGMOID", 1.0, 1.0), "atan": FusedSurrogate("ATAN", 0.5, math.pi / 2)},
)


@dataclass(frozen=True)
class Numbers:
    """A neuron in numbers, for the compiled kernels.

    Attributes:
        charge: formula in `numba.step` and `triton.step`.
        surrogate: code of a FusedSurrogate.
        learned: the factor is learned. Triton kernels, whose factor stays on the device, then ignore factor, into and
            through.
        factor: the charge's divisor or multiplier.
        jump, slide: d(v after reset) / d(spike) = jump - slide * h.
        into, through: d(h) / d(x) and d(h) / d(v).
        slope, amplitude: the surrogate gradient is amplitude * shape(slope * (h - threshold)).
    """

    charge: str
    surrogate: str
    learned: bool
    hard: bool
    rest: float
    threshold: float
    factor: float
    jump: float
    slide: float
    into: float
    through: float
    slope: float
    amplitude: float


# Each launch of a kernel asks; a learned leak changes with every step.
@lru_cache(maxsize=256)
def numbers(spec: NeuronSpec, learned_leak: float = 0.0) -> Numbers:
    """A described neuron's numbers. `learned_leak`: a learned factor's value, if the host knows it."""
    surrogate = FUSED_SURROGATES[spec.surrogate]
    neuron = NEURONS[spec.kind]
    charge = "CHARGE_ADD"
    factor = 1.0
    leak = 0.0
    if neuron.leaks:
        leak = learned_leak if neuron.learns else 1.0 / spec.tau
        # By a power of two, multiplying gives the same bits as dividing.
        divides = not neuron.learns and not _is_power_of_two(spec.tau)
        formula = "CHARGE" if spec.decay_input else "LEAK"
        operation = "DIVIDE" if divides else "SCALE"
        charge = f"{formula}_{operation}"
        factor = spec.tau if divides else leak
    input_factor = leak if neuron.leaks and spec.decay_input else 1.0
    hard = spec.v_reset is not None
    jump = 0.0
    slide = 0.0
    if not spec.detach_reset:
        jump = spec.rest if hard else -spec.v_threshold
        slide = 1.0 if hard else 0.0
    return Numbers(
        charge=charge,
        surrogate=surrogate.code,
        learned=neuron.learns,
        hard=hard,
        rest=spec.rest,
        threshold=spec.v_threshold,
        factor=factor,
        jump=jump,
        slide=slide,
        into=input_factor,
        through=1.0 - leak,
        slope=spec.surrogate_alpha * surrogate.slope,
        amplitude=spec.surrogate_alpha * surrogate.amplitude,
    )
