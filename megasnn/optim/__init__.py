"""Optimizers, learning rates, and norms that do not depend on the layout."""

from megasnn.optim.average import WeightAverage as WeightAverage
from megasnn.optim.build import build_optimizer as build_optimizer
from megasnn.optim.build import held_state_bytes as held_state_bytes
from megasnn.optim.build import state_bytes as state_bytes
from megasnn.optim.build import takes_found_inf as takes_found_inf
from megasnn.optim.build import working_bytes as working_bytes
from megasnn.optim.norms import GradientNorm as GradientNorm
from megasnn.optim.norms import ShardedNorms as ShardedNorms
from megasnn.optim.rates import learning_rate as learning_rate
from megasnn.optim.rates import require_schedule as require_schedule
