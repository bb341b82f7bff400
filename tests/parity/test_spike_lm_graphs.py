"""SpikeLM in CUDA graphs, by a stand-in (recorded_graphs.py): the bits of steps without, on layouts of tokens too."""

from __future__ import annotations

import pytest

from megasnn import Engine
from megasnn.config import parse
from megasnn.config.training import Length
from megasnn.models.model import run_config
from megasnn.models.spike_lm.model import SpikeLM
from tests.distributed.whole import digests
from tests.parity.test_spike_lm import WORDS, text
from tests.recorded_graphs import recorded_graphs

STEPS = 3
# Each rank measures whether sums over spikes are faster, and they add in another order.
FLAGS = (
    f"--embed-dim 16 --depth 1 --num-heads 4 --time-steps 2 --seq-length 12 --vocab-size {WORDS} --micro-batch-size 3 "
    "--global-batch-size 7 --train-iters 9 --lr 1e-3 --neuron-backend torch --sparse-products off"
)
TOKENS = "--context-parallel-size 2 --context-parallel-cut tokens"
SPIKING = "--attention spiking --positions learned"
USUAL = [
    (1, f"{SPIKING} --tied --amplitude first-batch"),
    (2, f"{TOKENS} {SPIKING}"),
]
MATRIX = [
    (1, "--tied"),
    (1, "--amplitude first-batch"),
    (2, TOKENS),
    (2, "--tensor-model-parallel-size 2"),
    (2, f"{SPIKING} --amplitude first-batch --tensor-model-parallel-size 2"),
    (2, "--pipeline-model-parallel-size 2 --pipeline-schedule zbv --tied"),
    (4, f"{TOKENS} --pipeline-model-parallel-size 2 {SPIKING}"),
]


def trained(flags: str) -> tuple[list[float], dict[str, str]]:
    """Losses, and digests of the weights. The first step is without graphs."""
    config = parse(run_config(SpikeLM), f"{FLAGS} {flags}".split())
    with Engine(config, length=Length(STEPS)) as engine:
        losses = [engine.train_step(*text()).loss for _ in range(STEPS)]
        return losses, digests(engine.state_dict())


def changes_no_bit(flags: str) -> None:
    with recorded_graphs() as graphs:
        found = trained(f"{flags} --cuda-graphs on")
        assert graphs.replays > 0
    assert found == trained(flags)


@pytest.mark.parametrize(
    ("size", "flags"),
    [*USUAL, *(pytest.param(*each, marks=pytest.mark.matrix) for each in MATRIX)],
)
def test_graphs_change_no_bit(ranks, size: int, flags: str) -> None:
    ranks(size, changes_no_bit, flags)
