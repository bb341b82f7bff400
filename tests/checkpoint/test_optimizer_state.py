"""A loaded optimizer goes on exactly as the one that was saved would have."""

from __future__ import annotations

import pytest
import torch

from megasnn.checkpoint.format import Progress, SavedTensor
from megasnn.checkpoint.load import load_checkpoint
from megasnn.checkpoint.optimizer_state import allocate
from megasnn.checkpoint.save import save_checkpoint
from megasnn.grid import Place
from megasnn.parallel.sharding import sharded_tensors
from tests.checkpoint.fake_model import Rank, layer

OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1),
    "AdamW amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "SGD momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def saved(rank: Rank, folder) -> None:
    save_checkpoint(folder, Progress(1), rank.state)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_goes_on_bit_for_bit(tmp_path, kind, steps_before):
    first, second = Rank(), Rank(seed=1)
    for rank in (first, second):
        rank.optimizer = OPTIMIZERS[kind](rank.parameters())
    for _ in range(steps_before):
        first.step()
    saved(first, tmp_path)
    second.step()  # state of its own, which must be replaced
    load_checkpoint(tmp_path, second.state)
    for rank in (first, second):
        rank.step()
    before, after = first.snapshot(), second.snapshot()
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


def test_a_frozen_parameter_has_no_state(tmp_path):
    rank, other = Rank(), Rank(seed=1)
    for parameter in rank.parameters()[1:]:
        parameter.grad = torch.ones_like(parameter)
    rank.optimizer.step()
    saved(rank, tmp_path)
    other.step()
    load_checkpoint(tmp_path, other.state)
    assert other.optimizer.state[other.parameters()[0]] == {}
    assert set(other.optimizer.state[other.parameters()[1]]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize(("capturable", "device"), [(False, "cpu"), (True, "meta")])
def test_the_step_count_lies_where_the_optimizer_looks_for_it(capturable, device):
    """The meta device stands for an accelerator: nothing is computed here."""
    tensors = list(sharded_tensors([("stem", layer("stem", Place()))]))
    optimizer = torch.optim.AdamW([tensors[0].tensor], capturable=capturable)
    saved = {
        "stem.weight": SavedTensor((8, 3, 3, 3), "float32", ()),
        "optimizer.step.stem.weight": SavedTensor((), "float32", ()),
        "optimizer.exp_avg.stem.weight": SavedTensor((8, 3, 3, 3), "float32", ()),
        "optimizer.exp_avg_sq.stem.weight": SavedTensor((8, 3, 3, 3), "float32", ()),
    }
    state = allocate(tensors, optimizer, saved)[tensors[0].tensor]
    assert (state["step"].device.type, state["exp_avg"].device.type) == (device, "meta")
