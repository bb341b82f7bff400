"""Traces of some iterations, with actions, layers and messages by name; they change nothing and end no run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from megasnn.config import ConfigError, parse, validate
from megasnn.engine import Engine
from megasnn.layers import BuildContext, ParallelConv, ParallelLinear
from megasnn.models.build import describe
from megasnn.models.description import ModelDescription
from megasnn.models.layer import Layer, layer
from megasnn.models.model import run_config
from megasnn.models.spikformer.model import Spikformer
from tests.models.networks import between
from tests.recorded_graphs import recorded_graphs
from tests.training.runs import TINY, train, whole, without_trial

PP2 = "--pipeline-model-parallel-size 2 --pipeline-schedule 1f1b --train-iters 4 --eval-iters 0".split()


def ranges(path) -> set[str]:
    """The names that code has given to what ran, in a trace."""
    return {event["name"] for event in annotations(path)}


def annotations(path) -> list[dict]:
    events = json.loads(path.read_text())["traceEvents"]
    of_torch = ("gloo:", "Optimizer.")
    return [
        event for event in events if event.get("cat") == "user_annotation" and not event["name"].startswith(of_torch)
    ]


def around(events: list[dict], name: str) -> list[set[str]]:
    """The names of the ranges that each range of this name lies in."""
    return [
        {
            outer["name"]
            for outer in events
            if outer is not inner
            and outer["tid"] == inner["tid"]
            and outer["ts"] <= inner["ts"]
            and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 0.002  # which a file has rounded
        }
        for inner in events
        if inner["name"] == name
    ]


def traced(cache: str, *flags: str):
    with without_trial():
        return train(cache, *flags)


def test_a_trace_names_actions_layers_and_messages_and_changes_no_bit(ranks, tmp_path_factory, tmp_path) -> None:
    cache = str(tmp_path_factory.mktemp("cache"))
    plain = ranks(2, traced, cache, *PP2)
    asked = ("--profile-steps", "2-3", "--tensorboard-dir", str(tmp_path))
    found = ranks(2, traced, cache, *PP2, *asked)
    assert all(torch.equal(one, whole(plain)[name]) for name, one in whole(found).items())
    names = [ranges(tmp_path / "traces" / f"rank{rank}-2-3.pt.trace.json") for rank in range(2)]
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == [
        f"rank{rank}-2-3.pt.trace.json" for rank in range(2)
    ]
    # Three micro-batches through two chunks.
    for micro in range(3):
        assert {f"0F{micro}", f"0B{micro}", f"0SEND_F{micro}", f"0RECV_B{micro}"} <= names[0]
        assert {f"1F{micro}", f"1B{micro}", f"1RECV_F{micro}", f"1SEND_B{micro}"} <= names[1]
    (sent,) = (name.removeprefix("message to stage 1: ") for name in names[0] if name.startswith("message to"))
    assert f"message from stage 0: {sent}" in names[1] and f"message to stage 0: gradient of {sent}" in names[1]
    assert f"message from stage 1: gradient of {sent}" in names[0]
    layers = [each.name for each in _described().layers]
    assert [name in names[0] for name in layers] == [name not in names[1] for name in layers]
    assert layers[0] in names[0] and layers[-1] in names[1]


@pytest.mark.parametrize(("flags", "later"), [("zb1p", "W"), ("1f1b --recompute always", "B"), ("1f1b", "B")])
def test_a_trace_names_what_layers_do_in_backward(ranks, tmp_path_factory, tmp_path, flags: str, later: str) -> None:
    """Each layer's part in the action of the gradients of inputs, and in that of the gradients of weights."""
    cache = str(tmp_path_factory.mktemp("cache"))
    asked = "--profile-steps 2 --tensorboard-dir".split()
    ranks(2, traced, cache, *PP2[:3], *flags.split(), *PP2[4:], *asked, str(tmp_path))
    first = "I" if later == "W" else "B"
    layers, seen = dict(_described().named_layers(BuildContext())), set()
    for rank in range(2):
        events = annotations(tmp_path / "traces" / f"rank{rank}-2-2.pt.trace.json")
        for name, module in layers.items():
            forward, inputs, weights = (
                [{action.lstrip("0123456789") for action in outer} for outer in around(events, name + part)]
                for part in ("", ": input gradient", ": weight gradient")
            )
            if not forward:
                continue
            seen.add(name)
            assert all({f"F{micro}"} in forward for micro in range(3))
            assert inputs == ([{f"{first}{micro}"} for micro in range(3)] if [*module.parameters()] else [])
            products = [each for each in module.modules() if isinstance(each, (ParallelConv, ParallelLinear))]
            actions = [f"{later}{micro}" for micro in range(3) for _ in products]
            assert [outer - {f"{name}: input gradient"} for outer in weights] == [{action} for action in actions]
    assert seen == layers.keys()


class Own(nn.Module):
    """A layer of one's own, with weights that autograd differentiates, which hands on its input too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x.flatten(0, 1)).unflatten(0, x.shape[:2]), x


class First(nn.Module):
    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        return x[0] + x[1]


def own() -> Iterable[Layer]:
    yield layer("own", Own())
    yield layer("sum", First())


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_layers_of_ones_own_have_names_in_backward_too(tmp_path, graphs: str) -> None:
    flags = {"micro_batch_size": 4, "global_batch_size": 4, "train_iters": 9, "lr": 1e-2, "neuron_backend": "torch"}
    batch, path = (torch.rand(4, 3, 4, 4), torch.arange(4)), tmp_path / "trace.json"
    known = mock.patch("megasnn.pipeline.graphs.KNOWN", ("megasnn", "torch", "tests"))
    with recorded_graphs(), known, Engine(between(own), cuda_graphs=graphs, **flags) as engine:
        for _ in range(2):
            engine.train_step(*batch)
        with profile(activities=[ProfilerActivity.CPU]) as taken:
            engine.train_step(*batch)
        taken.export_chrome_trace(str(path))
    events = annotations(path)
    for name in ("stem", "own", "sum", "head"):
        (outer,) = around(events, f"{name}: input gradient")
        assert outer == {"0B0"}, name
    for name in ("stem", "head"):
        assert around(events, f"{name}: weight gradient") == [{"0B0", f"{name}: input gradient"}]
    began = {event["name"]: event["ts"] for event in events if event["name"] != "0REDUCE_GRAD"}
    assert sorted(began, key=began.__getitem__) == [
        *("0F0", "stem", "own", "sum", "head", "0B0"),
        *("head: input gradient", "head: weight gradient", "sum: input gradient", "own: input gradient"),
        *("stem: input gradient", "stem: weight gradient"),
    ]


def _described() -> ModelDescription:
    config = parse(run_config(Spikformer), list(TINY))
    return describe(config.model, config.neuron.spec)


def test_a_run_that_ends_early_writes_what_there_was_of_the_chosen_rank(tmp_path) -> None:
    flags = "--train-iters 9 --exit-interval 3 --eval-iters 0 --profile-steps 2-7".split()
    with without_trial():
        train(str(tmp_path / "cache"), *flags, "--tensorboard-dir", str(tmp_path))
    (path,) = (tmp_path / "traces").iterdir()
    assert path.name == "rank0-2-3.pt.trace.json" and {"0F0", "0B2"} <= ranges(path)


def test_a_trace_that_cannot_be_written_ends_no_run(tmp_path, capfd) -> None:
    (tmp_path / "traces").write_text("in the way")
    flags = "--train-iters 2 --eval-iters 0 --profile-steps 1".split()
    with without_trial():
        outcome = train(str(tmp_path / "cache"), *flags, "--tensorboard-dir", str(tmp_path))
    assert outcome.iteration == 2
    assert "WARNING: the trace of --profile-steps failed (FileExistsError" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--profile-steps 0-3", "--profile-steps 0-3: give iterations as 10-12"),
        ("--profile-steps 5-3", "--profile-steps 5-3: give iterations"),
        ("--profile-steps ten", "--profile-steps ten: give iterations"),
        ("--profile-steps 5-6", "--profile-steps 5-6 is after the last of 4 iterations"),
    ],
)
def test_what_cannot_be_traced_is_refused(tmp_path, flags, problem) -> None:
    given = [*TINY, "--train-iters", "4", "--tensorboard-dir", str(tmp_path), *flags.split()]
    with pytest.raises(ConfigError) as error:
        validate(parse(run_config(Spikformer), given), 1)
    assert any(found.startswith(problem) for found in error.value.problems), error.value.problems


def test_a_trace_needs_a_folder() -> None:
    given = [*TINY, "--train-iters", "4", "--profile-steps", "1"]
    with pytest.raises(ConfigError, match="--profile-steps 1 has no folder to write to: give --tensorboard-dir"):
        validate(parse(run_config(Spikformer), given), 1)
