"""What the checks of a step find ends every rank with one sentence, which names the place, and changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from torch import Tensor

from megasnn import device_checks
from megasnn.engine import Engine
from megasnn.kernels import spike_codec as codec
from megasnn.layers import ConvNormNeuron, SpikingNeuron
from megasnn.layers.own_neuron import State
from megasnn.models.layer import Layer, layer
from megasnn.pipeline.executor import PipelineError
from tests.models.networks import CLASSES, between


class Half(SpikingNeuron):
    """Gives 0 and 0.5, and does not say so."""

    def charge(self, x: Tensor, state: State) -> Tensor:
        return state["v"] + x

    def fire(self, h: Tensor, state: State) -> Tensor:
        return 0.5 * self.spike(h)

    def reset(self, h: Tensor, spikes: Tensor, state: State) -> State:
        return {"v": h - spikes}


def _honest() -> Iterable[Layer]:
    yield layer("unit", ConvNormNeuron(4, 4))


def _with_halves() -> Iterable[Layer]:
    yield layer("halves", ConvNormNeuron(4, 4, neuron=Half(4)))
    yield layer("behind", ConvNormNeuron(4, 4))


WRONG = {
    "labels": (
        _honest,
        f"labels must be from 0 to {CLASSES - 1} with --num-classes {CLASSES}",
        "got labels from 2 to 77",
    ),
    "spikes": (_with_halves, "pack_bits takes 0 and 1", "got values from 0.0 to 0.5"),
}


LAYOUTS = {"labels": "2|1", "spikes": "2|2"}


def _step(what: str, runs_ahead: bool, stages: int) -> tuple[str, str, str]:
    """What a step says, what the next one says, and what differs after it."""
    layers, *_ = WRONG[what]
    flags = {"micro_batch_size": 2, "global_batch_size": 4, "train_iters": 3, "pipeline_model_parallel_size": stages}
    with ExitStack() as stack:
        if stages > 1:
            flags |= {"pipeline_schedule": "gpipe", "pipeline_model_parallel_layout": LAYOUTS[what]}
        engine = stack.enter_context(Engine(between(layers), **flags))
        before = {entry.name: entry.tensor.clone() for entry in engine.distributed.tensors}
        images, labels = torch.rand(4, 3, 4, 4, generator=torch.Generator().manual_seed(0)), torch.arange(4) % CLASSES
        if what == "labels":
            labels[3] = 77
        batch = engine.batches.share(images, labels, 4, 0)
        stack.enter_context(mock.patch.object(device_checks, "runs_ahead", lambda device: runs_ahead))
        if runs_ahead:
            stack.enter_context(mock.patch.object(codec, "_loops", lambda: None))
        with pytest.raises(PipelineError) as raised:
            engine.train_on(batch)
        with pytest.raises(RuntimeError) as refused:
            engine.train_on(batch)
        changed = [e.name for e in engine.distributed.tensors if not torch.equal(before[e.name], e.tensor)]
    return str(raised.value), str(refused.value), " ".join(changed)


@pytest.mark.parametrize("runs_ahead", [False, True], ids=["as-on-a-cpu", "as-on-a-gpu"])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("what", WRONG)
def test_a_finding_ends_all_ranks_with_its_place(ranks, what, stages, runs_ahead) -> None:
    _, complaint, values = WRONG[what]
    everyone = ranks(stages, _step, what, runs_ahead, stages)
    assert len(set(everyone)) == 1
    told, refused, changed = everyone[0]
    place = "rank 0, pipeline stage 0, action 0SEND_F0, micro-batch 0"  # halves do not fit the boundary
    if what == "labels":
        place = f"rank {stages - 1}, pipeline stage {stages - 1}, action {stages - 1}F1, micro-batch 1"
    elif stages == 1:
        place = "rank 0, pipeline stage 0, action 0F0, micro-batch 0"
    assert told.startswith(f"{place}: ")
    assert complaint in told and (values in told) == (not runs_ahead)
    assert "has ended with an error (PipelineError: rank" in refused
    assert changed == ""


def test_outside_of_a_step_a_finding_is_raised_at_once() -> None:
    with pytest.raises(ValueError, match="in words: complaint, seen"), device_checks.explained("in words: {}".format):
        device_checks.refuse(torch.tensor(True), "complaint", lambda: "seen")
    device_checks.refuse(torch.tensor(False), "complaint")


def test_what_was_found_before_is_forgotten() -> None:
    checks = device_checks.DeviceChecks(torch.device("cpu"))
    with checks.collecting():
        device_checks.refuse(True, "complaint")
    assert checks.count().item() == 1 and [each.text for each in checks.findings()] == ["complaint"]
    with checks.collecting():
        device_checks.refuse(False, "complaint")
    assert checks.count().item() == 0 and checks.findings() == []
