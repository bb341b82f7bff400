"""Facts about modules: one attribute, which copies take with them."""

from __future__ import annotations

import copy

from torch import nn

from megasnn.layers import ParallelBatchNorm
from megasnn.layers.facts import facts


def test_a_copied_layer_keeps_its_shards_and_has_facts_of_its_own() -> None:
    norm = ParallelBatchNorm(4)
    copied = copy.deepcopy(norm)
    assert facts(copied) == facts(norm) and {"weight", "running_var"} <= facts(copied).shards.keys()
    facts(copied).shards.clear()
    facts(copied).count_call()
    facts(copied).count_call()
    assert facts(norm).shards and norm.calls == 1 and copied.calls == 2


def test_facts_are_the_only_attribute_that_a_module_gets() -> None:
    module = nn.Linear(2, 2)
    before = {*vars(module)}
    assert facts(module) is facts(module)
    assert len({*vars(module)} - before) == 1
