"""Traces of some iterations, with actions, layers and messages by name; they change nothing and end no run."""

from __future__ import annotations

import json

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megasnn.config import ConfigError, parse, validate
from megasnn.models.build import describe
from megasnn.models.description import ModelDescription
from megasnn.models.model import run_config
from megasnn.models.spikformer.model import Spikformer
from tests.training.runs import TINY, train, whole, without_trial

PP2 = "--pipeline-model-parallel-size 2 --pipeline-schedule 1f1b --train-iters 4 --eval-iters 0".split()


def ranges(path) -> set[str]:
    """The names that code has given to what ran, in a trace."""
    return {event["name"] for event in annotations(path)}


def annotations(path) -> list[dict]:
    events = json.loads(path.read_text())["traceEvents"]
    of_torch = ("gloo:", "Optimizer.", "ProfilerStep")
    return [
        event for event in events if event.get("cat") == "user_annotation" and not event["name"].startswith(of_torch)
    ]


def traced(cache: str, *flags: str):
    with without_trial():
        return train(cache, *flags)


def test_a_trace_names_actions_and_layers_and_changes_no_bit(ranks, tmp_path_factory, tmp_path) -> None:
    cache = str(tmp_path_factory.mktemp("cache"))
    plain = ranks(2, traced, cache, *PP2)
    asked = ("--profile-steps", "2-3", "--tensorboard-dir", str(tmp_path))
    found = ranks(2, traced, cache, *PP2, *asked)
    assert all(torch.equal(one, whole(plain)[name]) for name, one in whole(found).items())
    names = [ranges(tmp_path / "traces" / f"rank{rank}-2-3.pt.trace.json") for rank in range(2)]
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == [
        f"rank{rank}-2-3.pt.trace.json" for rank in range(2)
    ]
    pictures = EventAccumulator(str(tmp_path)).Reload().Images("pipeline/simulated")
    assert [image.step for image in pictures] == [0], "at the start"
    # Three micro-batches through two chunks.
    for micro in range(3):
        assert {f"0F{micro}", f"0B{micro}", f"0SEND_F{micro}", f"0RECV_B{micro}"} <= names[0]
        assert {f"1F{micro}", f"1B{micro}", f"1RECV_F{micro}", f"1SEND_B{micro}"} <= names[1]
    layers = [each.name for each in _described().layers]
    assert [name in names[0] for name in layers] == [name not in names[1] for name in layers]
    assert layers[0] in names[0] and layers[-1] in names[1]


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
        ("--profile-steps 0-3", "--profile-steps 0-3: give iterations"),
        ("--profile-steps 5-3", "--profile-steps 5-3: give iterations"),
        ("--profile-steps ten", "--profile-steps ten: give iterations"),
    ],
)
def test_what_cannot_be_traced_is_refused(tmp_path, flags, problem) -> None:
    given = [*TINY, "--train-iters", "4", "--tensorboard-dir", str(tmp_path), *flags.split()]
    with pytest.raises(ConfigError) as error:
        validate(parse(run_config(Spikformer), given), 1)
    assert any(found.startswith(problem) for found in error.value.problems), error.value.problems
