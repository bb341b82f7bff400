"""What turns gradients into steps: optimizers, learning rates, and norms that do not depend on the layout."""

from megasnn.optim.average import WeightAverage
from megasnn.optim.building import build_optimizer, held_state_bytes, state_bytes, takes_found_inf, working_bytes
from megasnn.optim.groups import is_frozen, require_matches
from megasnn.optim.norms import GradientNorm, ShardedNorms
from megasnn.optim.rates import learning_rate, require_course

__all__ = [
    "GradientNorm",
    "ShardedNorms",
    "WeightAverage",
    "build_optimizer",
    "held_state_bytes",
    "is_frozen",
    "learning_rate",
    "require_course",
    "require_matches",
    "state_bytes",
    "takes_found_inf",
    "working_bytes",
]
