"""Between a step's first action and the reading of its loss the host never waits, and then it reads once."""

from __future__ import annotations

import pytest
import torch

from tests.host_waits import MODEL_FLAGS, host_waits, waits_of_steps

THE_READING = ["megasnn/engine/model.py, finish_step: tolist"]
# Of the one batch that there is, and of the total over all batches, which comes from the host.
OF_THE_EVALUATION = [
    f"megasnn/engine/model.py, {each}" for each in ("evaluate: tolist", "total: tensor", "total: tolist")
]
OF_THE_LOG = ["megasnn/telemetry/spikes.py, _statistics: tolist"]
PIPELINE = "--pipeline-model-parallel-size 2 --pipeline-schedule"


@pytest.mark.parametrize(
    ("ranks_wanted", "flags", "fewer"),
    [
        (1, "", 7),
        (1, "--loss mse --optimizer lamb", 7),
        (1, "--bptt-steps 1", 7),
        (2, f"{PIPELINE} 1f1b", 7),
        (2, f"{PIPELINE} zbv", 7),
        (2, "--tensor-model-parallel-size 2", 7),
        (2, "", 7),
        (2, "--use-distributed-optimizer", 7),
        (2, "--context-parallel-size 2", 6),  # each has a sample of every micro-batch
        (2, "--context-parallel-size 2 --context-parallel-cut rows", 7),
        (2, "--weight-parallel-size 2 --weight-gradients scattered", 4),
    ],
    ids=[
        "one-rank",
        "mse-and-lamb",
        "windows",
        "1f1b",
        "zbv",
        "tensor",
        "data",
        "owned-rows",
        "samples",
        "rows",
        "shared-weights",
    ],
)
@pytest.mark.parametrize("model", MODEL_FLAGS)
def test_a_step_is_read_once(ranks, model: str, ranks_wanted: int, flags: str, fewer: int) -> None:
    """The first one, too: no rank is told by another what a boundary carries."""
    for found in ranks(ranks_wanted, waits_of_steps, model, flags, fewer):
        assert found.first == found.second == found.smaller == THE_READING
        assert found.evaluation == OF_THE_EVALUATION
        assert found.log == OF_THE_LOG


WAITING = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool((x == 0).all()),
    "float": lambda x: float(x[0]),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "chosen by a mask": lambda x: x[x > 0],
    "set by a mask": lambda x: x.clone().__setitem__(x > 0, torch.ones(3)),
    "unique": lambda x: x.unique(),
    "repeated": lambda x: x.repeat_interleave(x.long()),
    "equal": lambda x: torch.equal(x, x),
    "from a list": lambda x: x.new_tensor([1.0]),
    "from a list, to a device": lambda x: torch.tensor([1.0], device=x.device),
    "synchronised": lambda x: torch.cuda.synchronize(),
}
GOING_ON = {
    "arithmetic": lambda x: (x * 2 + 1).sum() / 3,
    "a part": lambda x: x[1:3],
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "places": lambda x: x[torch.tensor([0, 1])],
    "host to device": lambda x: torch.tensor([1.0]).to(x.device),
}


@pytest.mark.parametrize("what", WAITING)
def test_what_waits_is_listed(what: str) -> None:
    x = torch.arange(4.0)
    with host_waits() as found:
        WAITING[what](x)
    assert len(found) >= 1, "not seen"


@pytest.mark.parametrize("what", GOING_ON)
def test_what_does_not_wait_is_not_listed(what: str) -> None:
    x = torch.arange(4.0)
    with host_waits() as found:
        GOING_ON[what](x)
    assert found == []


def test_tensors_of_the_host_are_not_listed() -> None:
    steps = torch.zeros(())
    with host_waits(lambda: {steps.untyped_storage().data_ptr()}) as found:
        steps.item()
    assert found == []
