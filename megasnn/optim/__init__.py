"""What turns gradients into steps: optimizers, learning rates, and norms that do not depend on the layout."""

from megasnn.optim.building import build_optimizer, held_state_bytes, state_bytes, state_kinds
from megasnn.optim.norms import GradientNorm, ShardedNorms
from megasnn.optim.rates import learning_rate

__all__ = [
    "GradientNorm",
    "ShardedNorms",
    "build_optimizer",
    "held_state_bytes",
    "learning_rate",
    "state_bytes",
    "state_kinds",
]
