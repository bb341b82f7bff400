"""What a spiking neuron computes, as a value: the one description shared by the reference and the fused kernels."""

from __future__ import annotations

from dataclasses import dataclass

NEURON_KINDS = ("lif", "if", "plif")

# name -> (class in spikingjelly.activation_based.surrogate, its default alpha)
SURROGATES: dict[str, tuple[str, float]] = {
    "sigmoid": ("Sigmoid", 4.0),
    "atan": ("ATan", 2.0),
    "erf": ("Erf", 2.0),
    "fake_numerical_gradient": ("FakeNumericalGradient", 0.3),
    "log_tailed_relu": ("LogTailedReLU", 0.0),
    "nonzero_sign_log_abs": ("NonzeroSignLogAbs", 1.0),
    "piecewise_exp": ("PiecewiseExp", 1.0),
    "piecewise_quadratic": ("PiecewiseQuadratic", 1.0),
    "q_pseudo_spike": ("QPseudoSpike", 2.0),
    "rect": ("Rect", 1.0),
    "s2nn": ("S2NN", 4.0),
    "soft_sign": ("SoftSign", 2.0),
    "super_spike": ("SuperSpike", 1.0),
}


@dataclass(frozen=True)
class NeuronSpec:
    """A neuron with SpikingJelly's semantics (its LIFNode, IFNode and ParametricLIFNode in multi-step mode).

    Charge, with ``r = v_reset`` or 0 for a soft reset:
    ``if``: ``h = v + x``; ``lif``: ``h = v + (x - (v - r)) / tau``, or ``h = v - (v - r) / tau + x`` without
    ``decay_input``; ``plif``: the same with a factor ``sigmoid(w)`` in place of the division by ``tau``.
    Fire: ``s = 1`` where ``h >= v_threshold``. Reset: hard to ``v_reset``, or soft (``v_reset=None``) by subtracting
    ``v_threshold``; with ``detach_reset`` no gradient flows through the spike of the reset.

    ``alpha=None`` takes SpikingJelly's default for that surrogate function. ``tau`` is used by ``lif`` only.

    Raises:
        ValueError: an unknown kind or surrogate name, or ``tau`` not above 1 for ``lif``.
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
        if self.kind not in NEURON_KINDS:
            raise ValueError(f"neuron kind {self.kind!r} is unknown; --neuron takes one of {', '.join(NEURON_KINDS)}")
        if self.surrogate not in SURROGATES:
            known = ", ".join(SURROGATES)
            raise ValueError(f"surrogate {self.surrogate!r} is unknown; --surrogate takes one of {known}")
        if self.kind == "lif" and not self.tau > 1.0:
            raise ValueError(f"a lif neuron needs tau > 1, got {self.tau}; set --tau")
        if self.alpha is None:
            object.__setattr__(self, "alpha", SURROGATES[self.surrogate][1])

    @property
    def surrogate_alpha(self) -> float:
        """``alpha``, resolved."""
        assert self.alpha is not None
        return float(self.alpha)

    @property
    def rest(self) -> float:
        """The potential that a membrane decays to and starts from: ``v_reset``, or 0 with a soft reset."""
        return 0.0 if self.v_reset is None else self.v_reset
