"""Flags that need a GPU are refused as other wrong flags are where a rank has none, before ranks join each other."""

from __future__ import annotations

import pytest
import torch

from megasnn.config import parse
from megasnn.models.model import run_config
from megasnn.models.spikformer.dimensions import Spikformer
from megasnn.pretraining import pretrain, refuse_other_device

RUN = "--config spikformer/digits --train-iters 10"
OF_GPUS = {
    "--cuda-graphs on": "there are none with --device cpu; use auto or off (--device auto comes to the CPU here: torch",
    "--fp32-products split": "is for GPUs, not --device cpu; use auto or ieee (--device auto comes to the CPU here: ",
    "--precision tf32": "is for GPUs, not --device cpu; use --precision fp32 (--device auto comes to the CPU here: ",
    "--wait-after-actions": "is for GPUs, not --device cpu: leave it out (--device auto comes to the CPU here: torch",
    "--device cuda": "and torch finds no GPU: ",
    "--backend nccl": "needs a GPU for each rank; 1 rank(s), 0 GPU(s): use gloo",
    "--neuron-backend triton": "the triton kernels cannot be used: ",
}


@pytest.fixture(params=[0, 1])
def gpus(request, monkeypatch) -> int:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)
    return request.param


@pytest.mark.parametrize("flags", OF_GPUS)
@pytest.mark.parametrize("gpus", [0], indirect=True)
def test_they_are_wrong_flags_without_a_gpu(gpus, flags: str, capsys) -> None:
    assert pretrain("spikformer", [*RUN.split(), *flags.split()]) == 2
    first, told = capsys.readouterr().err.splitlines()
    assert first == "[rank 0] 1 problem in the configuration:"
    assert OF_GPUS[flags] in told and flags.split()[0] in told


@pytest.mark.parametrize("flags", [flags for flags in OF_GPUS if flags != "--neuron-backend triton"])
@pytest.mark.parametrize("gpus", [1], indirect=True)
def test_they_are_taken_with_one(gpus, flags: str) -> None:
    config = parse(run_config(Spikformer), [*flags.split(), "--train-iters", "1"])
    assert refuse_other_device(config, 1) is None
    assert refuse_other_device(parse(run_config(Spikformer), ["--train-iters", "1", "--device", "cpu"]), 1) is None
