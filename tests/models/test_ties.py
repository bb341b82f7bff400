"""Layers that are used more than once, and tied weights: one owner, wherever the users are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from spikingjelly.activation_based import functional
from torch import Tensor, nn

from megasnn.checkpoint.load import load_global_tensors
from megasnn.checkpoint.reshard import Target, model_of_checkpoint, reshard
from megasnn.checkpoint.source import open_source
from megasnn.common.grid import Grid
from megasnn.layers import BuildContext, ConvNormNeuron, Numerics
from megasnn.layers.layer import layer
from megasnn.layers.tensors import described_tensors, materialise, sharded_tensors
from megasnn.models.build import describe_model
from megasnn.models.losses import cross_entropy_sum
from megasnn.models.model import Model
from megasnn.models.registry import MODELS
from megasnn.parallel.sharding import parameter_count
from megasnn.parallel.traffic import traffic
from megasnn.parallel_state import ParallelState
from tests.models.networks import Again, Tied, TwoTied, between
from tests.parity.ranks import (
    Layout,
    assemble,
    built,
    error,
    forward_backward,
    images,
    inputs_of,
    one_step,
    tensors_of,
)
from tests.training.runs import train_model

CPU = torch.device("cpu")


def test_gradients_have_their_owners_names_and_count_once(ranks) -> None:
    one = ranks(1, one_step, Tied(), Layout())
    gradients = assemble(one, "gradients")
    assert gradients.keys() == {
        *("stem.conv.weight", "stem.norm.weight", "stem.norm.bias", "mix.linear.weight", "mix.linear.bias"),
        *(f"block.0.unit.{name}" for name in ("conv.weight", "conv.bias", "norm.weight", "norm.bias", "neuron.w")),
        *("between.conv.weight", "between.norm.weight", "between.norm.bias", "late.norm.weight", "late.norm.bias"),
        "head.bias",
    }
    squares = [value.square().sum() for value in gradients.values()]
    assert one[0].norm == pytest.approx(float(sum(squares)) ** 0.5, rel=1e-12)
    assert assemble(one, "buffers")["block.0.unit.norm.num_batches_tracked"] == 3


def _one_micro_batch() -> dict[str, Tensor]:
    """Gradients and buffers behind a step of one micro-batch on one rank, and the initial values."""
    model = Tied(plain=True)
    with built(describe_model(model), Layout(), seed=5) as engine:
        before = {f"before {entry.name}": entry.tensor.detach().clone() for entry in engine.tensors}
        x, labels = images(model)
        forward_backward(engine, inputs_of(engine, x, labels, len(x)), len(x))
        engine.running_statistics.merge(1)
        return before | {name: value.detach().clone() for name, value in tensors_of(engine).items()}


def test_one_rank_computes_what_autograd_computes_with_one_module(ranks) -> None:
    (ours,) = ranks(1, _one_micro_batch)
    model = Tied(plain=True)
    layers = {each.name: each.module for each in model.layers() if each.name not in ("stem", "between")}
    block, mix, head = (layers[name].double() for name in ("block.0", "mix", "head"))
    assert block is layers["block.2"] and isinstance(head, nn.Linear)
    context = BuildContext(numerics=Numerics(torch.float64, torch.float64))
    units = [("stem", ConvNormNeuron(3, 4, 3, context)), ("between", ConvNormNeuron(4, 4, 1, context))]
    materialise(units, CPU, 0)
    for prefix, module in (*units, ("block.0", block), ("mix", mix)):
        module.load_state_dict({name: ours[f"before {prefix}.{name}"] for name in module.state_dict()})
    stem, between = (unit for _, unit in units)
    stem.neuron.time_steps = between.neuron.time_steps = model.time_steps
    x, labels = images(model)

    def again(y: Tensor) -> Tensor:
        functional.reset_net(block)
        return block(y)

    y = again(between(again(again(mix(stem(x.unsqueeze(0)))))))
    logits = nn.functional.linear(y.mean((3, 4)), mix.linear.weight, ours["before head.bias"])
    (cross_entropy_sum(logits, labels) / len(x)).backward()
    for prefix, module in (*units, ("block.0", block), ("mix", mix)):
        for name, parameter in module.named_parameters(prefix=prefix):
            assert error(ours[name], parameter.grad) < 1e-9 or parameter.grad.abs().max() < 1e-12, name
    for name, buffer in block.named_buffers(prefix="block.0"):
        torch.testing.assert_close(ours[name], buffer, rtol=1e-12, atol=1e-14)
    assert ours["block.0.1.num_batches_tracked"] == 3


def test_a_tied_parameter_is_counted_initialised_and_described_once() -> None:
    described = describe_model(Tied())
    entries = described.tensors
    names = [entry.name for entry in entries]
    assert len(names) == len(set(names)) and "head.weight" not in names and "block.1.unit.conv.weight" not in names
    assert parameter_count(entries) == 4 * 27 + 8 + 16 + 4 + 144 + 4 + 8 + 1 + 16 + 8 + 8 + 4
    layers = described.named_layers(BuildContext())
    materialise(layers, CPU, 0)
    of = dict(layers)
    assert of["block.0"].unit.conv.weight.data_ptr() == of["block.2"].unit.conv.weight.data_ptr()
    assert of["block.0"].unit.conv.weight is not of["block.2"].unit.conv.weight
    assert of["block.0"].dropout.name != of["block.1"].dropout.name != of["block.2"].dropout.name
    alone = describe_model(Tied()).named_layers(BuildContext())[5:7]
    materialise(alone, CPU, 0)
    assert [name for name, _ in alone] == ["block.2", "late"]
    assert torch.equal(alone[1][1].conv.weight, of["block.0"].unit.conv.weight)
    assert {entry.name for entry in described_tensors(alone) if entry.is_copy} >= {"block.0.unit.conv.weight"}
    assert [entry.name for entry in sharded_tensors(alone)][0] == "late.norm.weight"
    assert {(tie.owner, tie.copy) for tie in described.ties} == {
        ("block.0", "block.1"),
        ("block.0", "block.2"),
        ("block.0", "late"),
        ("mix", "head"),
    }


FLAGS = (
    "--image-size 8 --num-classes 10 --micro-batch-size 4 --global-batch-size 10 --num-workers 0 --lr 1e-2 "
    "--precision fp64 --ema-decay 0.5 --train-iters 3 --eval-iters 1 --eval-interval 2 --log-interval 1"
).split()
"""A step follows another without an evaluation between them, which would give the copies new values by itself."""


def _train(*flags: str) -> None:
    MODELS.setdefault(Tied.name, Tied)
    train_model(Tied.name, [*FLAGS, *flags])
    assert not traffic.enabled


def _flags(folder: Path, layout: Layout) -> list[str]:
    sizes = ["--tensor-model-parallel-size", layout.tensor, "--pipeline-model-parallel-size", layout.pipeline]
    return [*map(str, sizes), "--pipeline-schedule", layout.schedule, "--save", str(folder)]


def _saved(folder: Path) -> tuple[dict[str, Tensor], list[float]]:
    """Weights, averages and optimizer state, and the loss of each evaluation, which the averages are used for."""
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if line["kind"] == "validation"]
    return load_global_tensors(folder, with_optimizer=True), losses


def test_runs_are_saved_resumed_on_another_layout_and_converted(ranks, tmp_path, monkeypatch) -> None:
    one, three, run, new = (tmp_path / name for name in ("one", "three", "run", "new"))
    ranks(1, _train, *_flags(one, Layout()))
    expected, losses = _saved(one)
    assert "ema.block.0.unit.conv.weight" in expected and "optimizer.exp_avg.mix.linear.weight" in expected
    assert not [name for name in expected if "block.1" in name or "head.weight" in name] and len(losses) == 2
    ranks(3, _train, *_flags(three, Layout(pipeline=3)))
    found, theirs = _saved(three)
    assert theirs == losses and found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())

    ranks(3, _train, *_flags(run, Layout(pipeline=3)), "--exit-interval", "2")
    monkeypatch.setitem(MODELS, Tied.name, Tied)
    layers = len(model_of_checkpoint(source := open_source(run))[1].layers)
    reshard(source, new, Target(2, 2, layout=f"2|{layers - 2}"))
    converted, before = (load_global_tensors(folder, with_optimizer=True) for folder in (new, run))
    assert converted.keys() == before.keys() and all(torch.equal(converted[name], before[name]) for name in before)
    for folder, layout, more in (
        (run, Layout(1, 2, 2, "zbv"), ()),
        (new, Layout(2, 1, 2), ("--use-distributed-optimizer",)),
    ):
        ranks(4, _train, *_flags(folder, layout), "--load", str(folder), *more)
        found, theirs = _saved(folder)
        assert theirs[-1] == pytest.approx(losses[-1], rel=1e-9) and found.keys() == expected.keys()
        for name, value in found.items():
            assert error(value, expected[name]) < 1e-9, name


def _model(make: Callable[[], list[nn.Module]]) -> Model:
    return between(lambda: (layer(f"made.{index}", module) for index, module in enumerate(make())))


def tied(**options: Any) -> list[nn.Module]:
    """Two units with one weight. Args: of the second one."""
    first, second = ConvNormNeuron(4, 4, style="row"), ConvNormNeuron(4, 4, **options)
    second.conv.weight = first.conv.weight
    return [first, second]


def test_what_cannot_be_tied_is_refused_with_the_layers_name() -> None:
    with pytest.raises(ValueError, match=r"made\.1\.conv\.weight .*made\.0\.conv\.weight: .* \[4, 4, 3, 3\]"):
        describe_model(_model(lambda: tied(kernel_size=3)))
    described = describe_model(_model(lambda: tied(style="column")))
    with pytest.raises(ValueError, match=r"made\.1\.conv\.weight .*`style`, or set --tensor-model"):
        described.build(BuildContext(ParallelState.without_process_groups(Grid(tp=2))))


def _two_stages(frozen: tuple[str, ...], unused: bool) -> dict[str, Tensor]:
    """Gradients of a model whose second layer has the weights of the first, which another stage may have."""

    def make() -> list[nn.Module]:
        first, second = ConvNormNeuron(4, 4), ConvNormNeuron(4, 4)
        second.conv.weight, second.norm.weight = first.conv.weight, first.norm.weight
        for name in frozen:
            first.get_parameter(name.removeprefix("made.0.")).requires_grad_(False)
        return [first, second]

    model, size = _model(make), torch.distributed.get_world_size()
    with built(describe_model(model), Layout(pipeline=size), seed=5) as engine:
        x, labels = images(model)
        lost = [e for e in engine.copies if unused and e.name == "made.0.norm.weight" and e.tensor.requires_grad]
        for entry in lost:
            entry.tensor.register_post_accumulate_grad_hook(lambda tensor: setattr(tensor, "grad", None))
        forward_backward(engine, inputs_of(engine, x, labels, len(x)), len(x))
        return {e.name: e.tensor.grad.clone() for e in engine.tensors if e.tensor.grad is not None}


@pytest.mark.parametrize(
    ("frozen", "unused"), [((), True), (("made.0.conv.weight",), False), (("made.0.norm.weight",), False)]
)
def test_frozen_and_missing_gradients_are_paired_by_their_tensors(ranks, frozen: tuple[str, ...], unused: bool) -> None:
    (one,) = ranks(1, _two_stages, frozen, unused)
    two: dict[str, Tensor] = {}
    for found in ranks(2, _two_stages, frozen, unused):
        two |= found
    assert one.keys() == two.keys() and not set(frozen) & one.keys()
    assert all(torch.equal(value, two[name]) for name, value in one.items())


def test_weights_tied_inside_a_layer_and_modules_inside_of_two() -> None:
    names = [entry.name for entry in describe_model(_model(lambda: [TwoTied(4)])).tensors]
    assert "made.0.a.weight" in names and "made.0.b.weight" not in names and "made.0.b.bias" in names

    def twice() -> list[nn.Module]:
        module = TwoTied(4)
        return [module, module]

    owned = [entry.name for entry in describe_model(_model(twice)).tensors]
    assert owned == names, "the second layer has nothing of its own"

    def nested() -> list[nn.Module]:
        unit = Again(4)
        return [unit, nn.Sequential(ConvNormNeuron(4, 4), unit.unit)]

    described = describe_model(_model(nested))
    assert {tie.owner for tie in described.ties} == {"made.0"} and len(described.ties) == 8
