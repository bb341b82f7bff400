"""SpikeLM's flags that do not fit are refused before anything is built: one sentence each, with value and flag."""

from __future__ import annotations

import pytest

from megasnn.config import PretrainConfig, parse, validate
from megasnn.config.checks import refusal
from megasnn.engine.build import model_problems
from megasnn.models.build import describe_model
from megasnn.models.model import run_config
from megasnn.models.spike_lm.model import SpikeLM

SMALL = "--embed-dim 32 --depth 1 --num-heads 4 --time-steps 2 --seq-length 32 --train-iters 1"
REFUSED = [
    ("--tensor-model-parallel-size 3 --mlp-ratio 3", "--num-heads 4 does not divide by --tensor-model-parallel-size 3"),
    ("--num-heads 7", "--embed-dim 32 must be a multiple of --num-heads 7"),
    ("--embed-dim 30 --num-heads 10", "needs heads of an even size, and --embed-dim 30 with --num-heads 10 gives 3"),
    ("--mlp-ratio 0.001", "--mlp-ratio 0.001 of --embed-dim 32 gives 0 hidden channels: raise it"),
    (
        "--mlp-ratio 1.04 --tensor-model-parallel-size 2",
        "--embed-dim 32 gives 33 hidden channels, which do not divide by --tensor-model-parallel-size 2",
    ),
    ("--vocab-size 3 --tensor-model-parallel-size 4", "--vocab-size 3 is smaller than --tensor-model-parallel-size 4"),
    ("--attention spiking", "--attention spiking has spikes, which do not rotate: give it --positions learned"),
    ("--amplitude first-batch --neuron lif", "--neuron lif has no amplitude: use --amplitude fixed"),
    ("--amplitude first-batch --v-threshold 2", "--v-threshold 2.0 is the amplitude of --amplitude fixed"),
    ("--amplitude first-batch --bptt-steps 1", "--bptt-steps 1 cuts images and logits in time"),
    ("--seq-length 2 --context-parallel-size 3 --context-parallel-cut tokens", "2 tokens for 3 ranks"),
    ("--context-parallel-size 2 --context-parallel-cut rows", "--context-parallel-size by rows cuts images"),
]  # fmt: skip


def problems(config: PretrainConfig) -> list[str]:
    """As the command line finds them, before ranks join."""
    parallel = config.parallel
    ranks = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    return refusal(validate, config, ranks) or model_problems(config)


@pytest.mark.parametrize(("flags", "sentence"), REFUSED)
def test_refused_by_value_and_flag(flags: str, sentence: str) -> None:
    found = problems(parse(run_config(SpikeLM), f"{SMALL} {flags}".split()))
    assert len(found) == 1
    assert "\n" not in found[0]
    assert sentence in found[0]


def test_the_dry_run_of_a_very_long_text_allocates_nothing() -> None:
    # Tables of sines of this length take 29 GB.
    description = describe_model(SpikeLM(embed_dim=32, depth=1, num_heads=4, time_steps=2, seq_length=3 * 10**8))
    assert description.layers[0].entries[None].shape == (1, 2, 32, 3 * 10**8)
