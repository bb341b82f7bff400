"""Description of a spiking neuron, as a value: the one for all backends, and the names that it takes.

The tables need neither torch nor numba nor triton: a command line is checked by them before these are imported.
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


@dataclass(frozen=True)
class Neuron:
    """A kind of neuron.

    Attributes:
        summary: for --help.
        charge: (input of a step, last potential, description, q) -> the potential before firing; q is `sigmoid(w)`
            where the time constant is learned, otherwise what `constant` gives.
        leaks: its potential decays, by `tau`, and perhaps its input with it.
        learns: its time constant is learned: it has a parameter `w`, which starts at `tau`.
        constant: (input of all steps, description) -> what all steps are charged with, made once.
        levels: D of a neuron that fires whole numbers from 0 to D; None of one that fires 1 from the threshold on.
        fixed: values that fields of its description must have.
        layer: (description, context) -> the layer of a neuron that is no recurrence; None where `charge` says it.
    """

    summary: str
    charge: Callable[[Tensor, Tensor, NeuronSpec, Any], Tensor]
    leaks: bool = True
    learns: bool = False
    constant: Callable[[Tensor, NeuronSpec], Any] = lambda inputs, spec: None
    levels: int | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    layer: Callable[..., Any] | None = None


def _integrate(x: Tensor, v: Tensor, spec: NeuronSpec, q: Any) -> Tensor:
    return v + x


def _leak(x: Tensor, v: Tensor, spec: NeuronSpec, q: Any) -> Tensor:
    if spec.decay_input:
        return v + (x - (v - spec.rest)) / q
    return v - (v - spec.rest) / q + x


def _divisor(inputs: Tensor, spec: NeuronSpec) -> float | Tensor:
    """Divisor, rounded once on every device. By a number torch does not divide on a GPU: it multiplies
    by its reciprocal, which is rounded as well unless the number is a power of two. So it is a tensor otherwise."""
    return spec.tau if _is_power_of_two(spec.tau) else inputs.new_full((), spec.tau)


def _learned_leak(x: Tensor, v: Tensor, spec: NeuronSpec, q: Any) -> Tensor:
    return v + (x - (v - spec.rest)) * q if spec.decay_input else v - (v - spec.rest) * q + x


def _decay(x: Tensor, v: Tensor, spec: NeuronSpec, q: Any) -> Tensor:
    return (1.0 - 1.0 / spec.tau) * v + x


def _at_once(x: Tensor, v: Tensor, spec: NeuronSpec, q: Any) -> Tensor:
    raise ValueError(f"a {spec.kind} neuron takes all time steps at once; megasnn.layers.neuron.make_neuron gives it")


def _is_power_of_two(number: float) -> bool:
    return math.frexp(number)[0] == 0.5


LARGEST_LEVEL = 8
_OF_COUNTS = {"v_reset": None, "decay_input": False, "surrogate": "sigmoid", "alpha": None}
_AT_ONCE = {"tau": 2.0, "v_reset": 0.0, "decay_input": True, "detach_reset": True}
# Layers lie above, and are meant here all the same: the table names a layer, which is imported when it is asked for.
_LAYERS = "megasnn.layers.neuron"
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
            _at_once,
            leaks=False,
            fixed=_AT_ONCE,
            layer=later(f"{_LAYERS}:ParallelPSN"),
        ),
        "sliding_psn": Neuron(
            "the same with one learned weight for this step and one for the last",
            _at_once,
            leaks=False,
            fixed=_AT_ONCE,
            layer=later(f"{_LAYERS}:ParallelSlidingPSN"),
        ),
    },
)


class Surrogate(NamedTuple):
    """A surrogate gradient.

    Attributes:
        spikingjelly: its class in spikingjelly.activation_based.surrogate; None where `gradient` says it.
        alpha: the default of its sharpness.
        gradient: (potential above the threshold, alpha) -> the derivative that stands for that of the step.
    """

    spikingjelly: str | None
    alpha: float
    gradient: Callable[[Tensor, float], Tensor] | None = None


def _triangle(x: Tensor, alpha: float) -> Tensor:
    """A triangle of height 1 / alpha and half width alpha (arXiv 2202.11946, equation 4)."""
    return (alpha - x.abs()).clamp(min=0) / alpha**2


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
        "soft_sign": Surrogate("SoftSign", 2.0),
        "super_spike": Surrogate("SuperSpike", 1.0),
        "triangular": Surrogate(None, 1.0, _triangle),
    },
)


@dataclass(frozen=True)
class NeuronSpec:
    """A neuron with SpikingJelly's semantics (its LIFNode, IFNode and ParametricLIFNode in multi-step mode).

    Charge, with ``r = v_reset`` or 0 for a soft reset:
    ``if``: ``h = v + x``; ``lif``: ``h = v + (x - (v - r)) / tau``, or ``h = v - (v - r) / tau + x`` without
    ``decay_input``; ``plif``: the same with a factor ``sigmoid(w)`` in place of the division by ``tau``.
    Fire: ``s = 1`` where ``h >= v_threshold``. Reset: hard to ``v_reset``, or soft (``v_reset=None``) by subtracting
    ``v_threshold``; with ``detach_reset`` no gradient flows through the spike of the reset.

    ``ilif4`` (its ILIFNode, arXiv 2407.20708): ``h = v - v / tau + x``; ``s``, from 0 to 4, is ``h / v_threshold``
    clipped and rounded half to even; the reset is soft; the gradient of ``s`` is that of ``h / v_threshold`` from 0
    to 4. ``psn`` and ``sliding_psn`` are layers of their own, whose learned threshold starts at ``v_threshold``.

    ``alpha=None`` takes SpikingJelly's default for that surrogate function. ``tau`` is used by ``lif``, and is
    where the learned time constant of ``plif`` starts.

    Raises:
        ValueError: an unknown kind or surrogate name, ``tau`` not above 1 for a neuron that leaks, or a value that
            the neuron has no use for.
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
        if self.alpha is None and neuron.levels is None:
            object.__setattr__(self, "alpha", surrogate.alpha)

    @property
    def largest(self) -> int:
        """The largest number that it fires in a step."""
        return NEURONS[self.kind].levels or 1

    @property
    def surrogate_alpha(self) -> float:
        """``alpha``, resolved."""
        assert self.alpha is not None
        return float(self.alpha)

    @property
    def rest(self) -> float:
        """The potential that a membrane decays to and starts from: ``v_reset``, or 0 with a soft reset."""
        return 0.0 if self.v_reset is None else self.v_reset


def _flag(name: str, value: Any) -> str:
    """A field with its value as on the command line."""
    words = {"alpha": "surrogate-alpha"}.get(name, name.replace("_", "-"))
    if isinstance(value, bool):
        return f"--{words}" if value else f"--no-{words}"
    return f"--{words} {'none' if value is None else value}"


# --- compiled kernels


class FusedSurrogate(NamedTuple):
    """A surrogate gradient `amplitude * shape(slope * (h - threshold))`, whose numbers grow with alpha."""

    code: str
    amplitude: float
    slope: float


FUSED_CHARGES = ("lif", "if", "plif")
FUSED_SURROGATES: Registry[FusedSurrogate] = Registry(
    "--surrogate",
    {"sigmoid": FusedSurrogate("SIGMOID", 1.0, 1.0), "atan": FusedSurrogate("ATAN", 0.5, math.pi / 2)},
)


@dataclass(frozen=True)
class Numbers:
    """A neuron in numbers: what the kernels of all backends compute with.

    Attributes:
        charge: how input and last potential are charged, named in `numba.step` and `triton.step`.
        surrogate: code of a FusedSurrogate.
        learned: its factor is learned, and perhaps known on the device alone: then factor, into and through are those
            of the factor that was given.
        hard: the reset is.
        factor: what the charge divides or multiplies by.
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


@lru_cache(maxsize=256)  # each launch of a kernel asks; a learned leak changes with every step
def numbers(spec: NeuronSpec, learned_leak: float = 0.0) -> Numbers:
    """A neuron in numbers. learned_leak: its factor, where that is learned and known here."""
    surrogate, neuron = FUSED_SURROGATES[spec.surrogate], NEURONS[spec.kind]
    charge, factor, leak = "CHARGE_ADD", 1.0, 0.0
    if neuron.leaks:
        factor = leak = learned_leak if neuron.learns else 1.0 / spec.tau
        charge = ("CHARGE_" if spec.decay_input else "LEAK_") + "SCALE"
    if neuron.leaks and not neuron.learns and not _is_power_of_two(spec.tau):  # otherwise multiplying is the same
        charge, factor = charge.replace("SCALE", "DIVIDE"), spec.tau
    hard = spec.v_reset is not None
    jump, slide = (spec.rest, 1.0) if hard else (-spec.v_threshold, 0.0)
    return Numbers(
        charge=charge,
        surrogate=surrogate.code,
        learned=neuron.learns,
        hard=hard,
        rest=spec.rest,
        threshold=spec.v_threshold,
        factor=factor,
        jump=0.0 if spec.detach_reset else jump,
        slide=0.0 if spec.detach_reset else slide,
        into=leak if neuron.leaks and spec.decay_input else 1.0,
        through=1.0 - leak,
        slope=spec.surrogate_alpha * surrogate.slope,
        amplitude=spec.surrogate_alpha * surrogate.amplitude,
    )
