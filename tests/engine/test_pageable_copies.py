"""Inside a step nothing goes from the host's pageable memory to a GPU: the host would wait for that copy."""

from __future__ import annotations

import pytest
import torch

from megasnn.pinned import copy_without_waiting, without_waiting
from tests.host_waits import MODEL_FLAGS
from tests.pageable_copies import copies_of_a_replayed_step, copies_of_a_step, pageable_copies

PIPELINE = "--pipeline-model-parallel-size 2 --pipeline-schedule"
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("ranks_wanted", "flags"),
    [
        (1, ""),
        (1, "--loss mse --optimizer lamb"),
        (1, "--bptt-steps 1"),
        (1, "--recompute always"),
        (2, f"{PIPELINE} 1f1b"),
        (2, f"{PIPELINE} zbv"),
        (2, "--tensor-model-parallel-size 2"),
        (2, "--use-distributed-optimizer --deterministic"),
        (2, "--context-parallel-size 2"),
        (2, "--context-parallel-size 2 --context-parallel-cut rows"),
        (2, "--weight-parallel-size 2 --weight-gradients scattered"),
    ],
)
@pytest.mark.parametrize("model", MODEL_FLAGS)
def test_a_step_has_none(ranks, model: str, ranks_wanted: int, flags: str) -> None:
    assert ranks(ranks_wanted, copies_of_a_step, model, flags) == [[]] * ranks_wanted


def test_mixed_samples_have_none(ranks) -> None:
    flags = "--mixup-alpha 0.4 --cutmix-alpha 1 --label-smoothing 0.1"
    assert ranks(1, copies_of_a_step, "spikformer", flags) == [[]]


@pytest.mark.parametrize("model", MODEL_FLAGS)
def test_a_step_with_cuda_graphs_has_none(ranks, model: str) -> None:
    assert ranks(1, copies_of_a_replayed_step, model) == [[]]


PAGEABLE = {
    "moved": lambda x, host: host.to(x.device),
    "moved and converted": lambda x, host: host.to(device="cpu", dtype=torch.float64),
    "moved behind other work": lambda x, host: (host * 2)[1:].to(x.device),
    "made and moved": lambda x, host: torch.tensor([1.0, 2.0]).to(x.device),
    "of an array": lambda x, host: torch.from_numpy(host.numpy()).to(x.device),
    "copied": lambda x, host: x.copy_(host),
    "set": lambda x, host: x.__setitem__(slice(None), host),
    "added": lambda x, host: x + host,
    "a place": lambda x, host: x[torch.tensor([0, 1])],
    "made without a device": lambda x, host: x + torch.arange(4),
}
FINE = {
    "by pinned memory": lambda x, host: without_waiting(host, x.device) + x,
    "into its place by pinned memory": lambda x, host: copy_without_waiting(host, x),
    "a place by pinned memory": lambda x, host: x[without_waiting(torch.tensor([0, 1]), x.device)],
    "a number": lambda x, host: x * torch.tensor(2.0),
    "among the host's": lambda x, host: host + torch.arange(4),
    "made on the device": lambda x, host: x + torch.arange(4, device=x.device),
    "converted on the device": lambda x, host: x.to(torch.float64).to(x.device),
}


@pytest.mark.parametrize("what", PAGEABLE)
def test_what_is_pageable_is_listed(what: str) -> None:
    x, host = torch.ones(4), torch.arange(4.0)
    with pageable_copies([host]) as found:
        PAGEABLE[what](x, host)
    assert len(found) == 1


@pytest.mark.parametrize("what", FINE)
def test_what_is_not_is_not_listed(what: str) -> None:
    x, host = torch.ones(4), torch.arange(4.0)
    with pageable_copies([host]) as found:
        FINE[what](x, host)
    assert found == []
