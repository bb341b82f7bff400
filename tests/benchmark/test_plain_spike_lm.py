"""The language model that the benchmark compares with is SpikeLM, in float64."""

from __future__ import annotations

import pytest
import torch.nn.functional as F

from megasnn import Engine
from megasnn.models.spike_lm.model import SpikeLM
from tools.benchmark.plain_spike_lm import PlainSpikeLM
from tools.benchmark.rows import parse_row
from tools.benchmark.steps import random_batch


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_the_plain_model_has_the_loss_of_one_rank(positions: str) -> None:
    model = SpikeLM(embed_dim=16, depth=2, num_heads=2, seq_length=9, vocab_size=20, positions=positions)
    plain = PlainSpikeLM(model).double()
    tokens, targets = random_batch(model, 3)
    flags = {"micro_batch_size": 3, "global_batch_size": 3, "precision": "fp64", "train_iters": 1, "lr": 1e-3}
    with Engine(model, **flags) as engine:
        weights = engine.state_dict()
        loss = engine.train_step(tokens, targets).loss
    for name, parameter in plain.named_parameters():
        given = weights["embedding.positions" if name == "positions" else name]
        parameter.data = given.reshape(parameter.shape)
    logits = plain(tokens).mean(0)
    found = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert found.item() == pytest.approx(loss, rel=1e-12)
    assert len(weights) == len(dict(plain.named_parameters()))


def test_rows_of_a_language_model() -> None:
    row = parse_row("plain-compiled", 1)
    assert (row.library, row.compiled, row.ranks) == ("plain", True, 1)
    asked = parse_row("cp2tokens", 1).parallel("auto")
    assert (asked.context_parallel_size, asked.context_parallel_cut) == (2, "tokens")
    for wrong in ("tp2tokens", "cp2rowstokens", "plain-compiled2", "plain:2"):
        with pytest.raises(ValueError, match="cp2tokens"):
            parse_row(wrong, 1)
