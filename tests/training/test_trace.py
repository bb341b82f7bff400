"""Traces of some iterations, with actions, layers and messages by name; they change nothing and end no run."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megasnn.checkpoint.folder import list_checkpoints
from megasnn.config import parse
from megasnn.models.build import describe
from megasnn.models.model import run_config
from megasnn.models.spikformer.model import Spikformer
from tests.small_disk import fill, small_disk
from tests.training.runs import TINY, train, whole, without_trial

FLAGS = "--train-iters 4 --log-interval 2 --eval-iters 0".split()
ZBV = "--pipeline-model-parallel-size 2 --pipeline-schedule zbv --pipeline-model-parallel-layout 2|2|2|2".split()


def ranges(path: Path) -> set[str]:
    """The names that code has given to what ran, in a trace."""
    events = json.loads(path.read_text())["traceEvents"]
    return {event["name"] for event in events if event.get("cat") == "user_annotation"}


def test_a_trace_names_actions_and_layers_and_changes_no_bit(ranks, cache, tmp_path) -> None:
    folder = tmp_path / "run"
    plain = whole(ranks(2, train, cache, *FLAGS, *ZBV))
    asked = ("--profile-step", "3", "--tensorboard-dir", str(folder))
    found = whole(ranks(2, train, cache, *FLAGS, *ZBV, *asked))
    assert all(torch.equal(one, plain[name]) for name, one in found.items())
    files = [f"rank{rank}-3.pt.trace.json" for rank in range(2)]
    assert sorted(path.name for path in (folder / "traces").iterdir()) == files
    first, second = (ranges(folder / "traces" / file) for file in files)
    for micro in range(3):  # the first rank has chunks 0 and 3, the second one 1 and 2
        assert {f"{kind}{micro}" for kind in ("0F", "0I", "0W", "0SEND_F", "0RECV_B", "3F", "3RECV_F")} <= first
        assert {f"{kind}{micro}" for kind in ("1F", "1I", "1W", "1RECV_F", "2F", "2SEND_F", "1SEND_B")} <= second
    config = parse(run_config(Spikformer), list(TINY))
    layers = [each.name for each in describe(config.model, config.neuron.spec).layers]
    assert [name in first for name in layers] == [name not in second for name in layers]
    assert layers[0] in first and layers[-1] in first and layers[3] in second
    events = EventAccumulator(str(folder)).Reload()
    assert [image.step for image in events.Images("pipeline/simulated")] == [0], "at the start"


def test_what_cannot_be_reported_ends_no_run(cache, tmp_path, capfd) -> None:
    """TensorBoard's files, pictures and the trace on a full disk."""
    flags = "--train-iters 2 --eval-iters 0 --profile-step 1".split()
    with small_disk(tmp_path / "disk", "64k") as disk, without_trial():
        fill(disk)
        folders = ("--tensorboard-dir", str(disk / "board"), "--save", str(tmp_path / "run"))
        outcome = train(cache, *flags, *folders)
    told = [line for line in capfd.readouterr().out.splitlines() if "WARNING" in line]
    assert outcome.iteration == 2 and list_checkpoints(tmp_path / "run") == [2]
    assert len(told) == len({line.split(" failed")[0] for line in told}) and all(str(disk) in line for line in told)
    assert told and all("No space left on device" in line for line in told), told
