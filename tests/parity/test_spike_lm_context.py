"""SpikeLM over ranks that divide its tokens, with either attention, beside every other axis: one rank to 1e-9."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from megasnn import Engine
from megasnn.models.spike_lm.model import SpikeLM
from tests import parts
from tests.parity.ranks import TOLERANCE, error
from tests.parity.test_spike_lm import FLAGS, LEARNED, text

STEPS = 3
TOKENS = {"context_parallel_size": 2, "context_parallel_cut": "tokens"}
PIPED = {**TOKENS, "pipeline_model_parallel_size": 2, "pipeline_schedule": "zbv", "recompute": "always"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2 zbv": (4, PIPED),
    "tp2": (4, {**TOKENS, "tensor_model_parallel_size": 2}),
    "dp2 zero 1": (4, {**TOKENS, "use_distributed_optimizer": True}),
    "weights 2": (4, {**TOKENS, "weight_parallel_size": 2, "micro_batch_size": 4}),
}


@cache
def model_of(attention: str) -> SpikeLM:
    return replace(LEARNED, attention=attention, tied=True, positions="rotary" if attention == "softmax" else "learned")


def trained(attention: str, flags: dict[str, Any]) -> tuple[list[float], list[parts.Part], dict[str, Tensor]]:
    """Losses, the first step's gradients and the weights of some steps of AdamW on real text."""
    with Engine(model_of(attention), **{**FLAGS, "train_iters": STEPS, "lr": 1e-2, **flags}) as engine:
        results = [engine.train_step(*text())]
        gradients = parts.gradients(engine.distributed.owned)
        results += [engine.train_step(*text()) for _ in range(STEPS - 1)]
        return [each.loss for each in results], gradients, engine.state_dict()


def layouts() -> list[Any]:
    return ["pp2 zbv", *[pytest.param(name, marks=pytest.mark.matrix) for name in LAYOUTS if name != "pp2 zbv"]]


@pytest.mark.parametrize("attention", ["softmax", "spiking"])
@pytest.mark.parametrize("layout", layouts())
def test_tokens_beside_every_axis(ranks, layout: str, attention: str) -> None:
    size, flags = LAYOUTS[layout]
    sizes = {name: value for name, value in flags.items() if name == "micro_batch_size"}
    losses, gradients, weights = trained(attention, sizes)
    of_ranks = ranks(size, trained, attention, flags)
    summed = parts.assemble([each[1] for each in of_ranks])
    for name, value in parts.assemble([gradients]).items():
        assert error(summed[name], value) < TOLERANCE or value.abs().max() < 1e-12, name
    for found in of_ranks:
        assert found[0] == pytest.approx(losses, rel=TOLERANCE)
        for name, value in weights.items():
            assert error(found[2][name], value) < TOLERANCE or value.abs().max() < 1e-9, name
    assert all(torch.equal(found[2][name], of_ranks[0][2][name]) for found in of_ranks for name in weights)
