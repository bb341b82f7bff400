"""The lowest layer needs no torch, and what it repeats of the layers above is the same there."""

import subprocess
import sys

from megasnn.config import NeuronConfig
from megasnn.kernels import NeuronSpec
from megasnn.models.building import describe
from megasnn.models.spikformer.dimensions import Spikformer

LOWEST = (
    "megasnn",
    "megasnn.grid",
    "megasnn.batching",
    "megasnn.schedule.partition",
    "megasnn.schedule",
    "megasnn.schedule.simulate",
    "megasnn.config",
    "megasnn.events",
    "megasnn.kernels",
    "megasnn.losses",
    "megasnn.optimizers",
    "megasnn.augment",
)


def test_the_lowest_layer_does_not_import_torch() -> None:
    program = f"import sys, {', '.join(LOWEST)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_the_neurons_defaults_are_those_of_its_description() -> None:
    config = NeuronConfig()
    spec = NeuronSpec(
        config.neuron,
        config.tau,
        config.v_threshold,
        config.v_reset,
        config.decay_input,
        config.detach_reset,
        config.surrogate,
        config.surrogate_alpha,
    )
    assert spec == NeuronSpec()


def test_the_layers_that_are_counted_are_those_that_are_built() -> None:
    config = Spikformer(depth=3)
    built = describe(config, NeuronSpec()).layers
    assert [(each.name, each.unit) for each in config.layers()] == [(layer.name, layer.unit) for layer in built]
