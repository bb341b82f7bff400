"""SpikeLM has the bits of one rank over schedules, stages and recomputation; attention on spikes also over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from megasnn import Engine
from megasnn.models.spike_lm.model import SpikeLM
from tests.distributed.whole import digests
from tests.parity.test_spike_lm import FLAGS, LEARNED, text

STEPS = 2
MODELS: dict[str, SpikeLM] = {
    "softmax": replace(LEARNED, positions="rotary"),
    "softmax tied": replace(LEARNED, tied=True, positions="rotary"),
    "spiking": replace(LEARNED, attention="spiking"),
    "spiking tied": replace(LEARNED, attention="spiking", tied=True, amplitude="first-batch"),
}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb1p", "zb2p", "zbv", "v-half", "v-min")
USUAL = {2: ["gpipe", "zbv"], 3: ["interleaved"]}
"""By number of stages."""
OF_SUITE = ("softmax", "spiking tied")
Bits = tuple[list[float], dict[str, str]]
"""Losses and an evaluation; digests of the weights."""


def trained(name: str, flags: dict[str, Any]) -> Bits:
    """Some steps of AdamW on real text, in float32."""
    options = {**FLAGS, "precision": "fp32", "train_iters": STEPS, "lr": 1e-2, "clip_grad": 0.0, **flags}
    # Each rank measures whether sums over spikes are faster, and they add in another order.
    options["sparse_products"] = "off"
    with Engine(MODELS[name], **options) as engine:
        losses = [engine.train_step(*text()).loss for _ in range(STEPS)]
        losses.append(engine.evaluate(*text()).loss)
        return losses, digests(engine.state_dict())


def all_trained(stages: int, cases: Sequence[tuple[str, str, str]]) -> list[Bits]:
    found = []
    for name, schedule, recompute in cases:
        flags = {"pipeline_model_parallel_size": stages, "pipeline_schedule": schedule, "recompute": recompute}
        found.append(trained(name, flags))
    return found


def require_bits_of_one(ranks, stages: int, cases: Sequence[tuple[str, str, str]]) -> None:
    names = [*dict.fromkeys(name for name, *_ in cases)]
    (of_one,) = ranks(1, all_trained, 1, [(name, "1f1b", "never") for name in names])
    expected = dict(zip(names, of_one, strict=True))
    for of_rank in ranks(stages, all_trained, stages, cases):
        for case, found in zip(cases, of_rank, strict=True):
            assert found == expected[case[0]], case


@pytest.mark.parametrize("stages", USUAL)
def test_schedules_and_stages_change_no_bit(ranks, stages: int) -> None:
    require_bits_of_one(ranks, stages, [(name, each, "never") for name in OF_SUITE for each in USUAL[stages]])


@pytest.mark.matrix
@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_every_schedule_changes_no_bit(ranks, stages: int, recompute: str) -> None:
    require_bits_of_one(ranks, stages, [(name, each, recompute) for name in MODELS for each in SCHEDULES])
