"""The table of models: all that is there is in it, and a model that is added to it needs nothing else."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch
from spikingjelly.activation_based.neuron import LIFNode
from torch import nn

import megasnn
from megasnn.checkpoint.exchange import weights_as
from megasnn.checkpoint.format import Progress, read_metadata
from megasnn.checkpoint.optimizer_state import LocalState
from megasnn.checkpoint.reshard import Target, model_of_checkpoint, reshard
from megasnn.checkpoint.save import save_checkpoint
from megasnn.checkpoint.source import open_source
from megasnn.common.files import CheckpointError
from megasnn.layers import BuildContext, ConvNormNeuron, MeanLinear
from megasnn.layers.layer import Layer, layer
from megasnn.layers.tensors import materialise, sharded_tensors
from megasnn.models.build import describe_model
from megasnn.models.model import Model, run_config
from megasnn.models.registry import MODELS, dialect_for, dialect_of, model_of
from megasnn.pretraining import pretrain
from tests.checkpoint.saved import CPU
from tests.parity.e_spikeformer import Published


@dataclass(frozen=True, kw_only=True)
class Line(Model):
    """A row of convolutions."""

    marker = "line.head.weight"

    width: int = 4
    """Number of channels."""
    depth: int = 3
    """Number of layers."""

    def layers(self) -> Iterable[Layer]:
        widths = [self.in_channels, *[self.width] * (self.depth - 1)]
        for index, inputs in enumerate(widths[:-1]):
            yield layer(f"line.{index}", ConvNormNeuron(inputs, self.width), layer_group="line")
        yield layer("line.head", MeanLinear(self.width, self.num_classes), layer_group="line")

    def problems(self, tensor_parallel: int) -> list[str]:
        wrong = self.width % tensor_parallel
        return [f"--width {self.width} must be a multiple of {tensor_parallel}"] if wrong else []


@dataclass(frozen=True, kw_only=True)
class Converted(Line):
    """SpikingJelly's neurons, which keep what they were made with."""

    marker = "conv.weight"

    def layers(self) -> Iterable[Layer]:
        parts = [nn.Conv2d(self.in_channels, self.width, 3), LIFNode(step_mode="m"), nn.AvgPool2d(30), nn.Flatten()]
        yield from megasnn.shard(nn.Sequential(*parts, nn.Linear(self.width, self.num_classes)))


@pytest.fixture
def line(monkeypatch) -> type[Model]:
    """A model whose only mention outside its own code is its line in the table."""
    monkeypatch.setitem(MODELS, Line.name, Line)
    return Line


def saved(folder: Path, of: type[Model], **changed) -> Path:
    """A checkpoint of weights of the model's default configuration."""
    config = run_config(of)()
    layers = describe_model(config.model, config.neuron.spec).named_layers(BuildContext())
    materialise(layers, CPU, 0)
    told = {"model": of.name, "config": {"model": asdict(config.model), "neuron": asdict(config.neuron)}}
    return save_checkpoint(folder, Progress(3, **(told | changed)), LocalState(list(sharded_tensors(layers))))


@pytest.mark.parametrize(("model", "warned"), [(Line, []), (Converted, ["--tau 4.0", "--surrogate atan"])])
def test_flags_of_the_neuron_that_no_neuron_follows_are_warned_of(monkeypatch, capsys, tmp_path, model, warned) -> None:
    monkeypatch.setitem(MODELS, model.name, model)
    monkeypatch.setenv("MEGASNN_CACHE", str(tmp_path))
    sizes = "--micro-batch-size 2 --global-batch-size 2 --image-size 32 --in-channels 1 --num-classes 10".split()
    flags = [*sizes, "--tau", "4", "--surrogate", "atan", "--num-workers", "0", "--eval-iters", "0"]
    assert pretrain(model, [*flags, "--train-iters", "1"]) == 0
    found = [line for line in capsys.readouterr().out.splitlines() if "follows it" in line]
    assert all(any(flag in line for line in found) for flag in warned) and bool(found) == bool(warned)


def test_every_model_is_in_the_table_under_the_name_of_its_folder():
    folders = {file.parent.name for file in Path(megasnn.__path__[0], "models").glob("*/__init__.py")}
    assert folders == set(MODELS)
    for name, model in MODELS.items():
        assert model.name == name and Path(inspect.getfile(model)).parent.name == name


@pytest.mark.parametrize("name", MODELS)
def test_a_marker_is_of_its_model_alone(name):
    tensors = [entry.name for entry in describe_model(MODELS[name]()).tensors]
    assert [model.name for model in MODELS.values() if model.marker in tensors] == [name]
    for dialect in MODELS[name].dialects():
        assert dialect.marker not in tensors


def test_an_unknown_name_is_refused_with_those_that_are_known(tmp_path):
    expected = "unknown model 'spikfromer'; model takes one of spikformer, vgg_dvs"
    for look_up in (lambda: MODELS["spikfromer"], lambda: pretrain("spikfromer", [])):
        with pytest.raises(ValueError, match=expected):
            look_up()
    saved(tmp_path, MODELS["vgg_dvs"], model="spikfromer")
    source = open_source(tmp_path)
    for use in (lambda: model_of_checkpoint(source), lambda: weights_as(source, "spikingjelly")):
        with pytest.raises(CheckpointError, match=expected):
            use()


def test_a_program_that_has_no_such_model_is_refused_with_those_that_have_one():
    with pytest.raises(
        CheckpointError, match=r"no model of published with the tensors of vgg_dvs; known: spikingjelly "
    ):
        dialect_for("published", [MODELS["vgg_dvs"].marker])
    with pytest.raises(CheckpointError, match=r"looked for .*CIFAR10DVSVGG"):
        dialect_of(["layer1.weight"])


def test_the_flags_of_a_new_model_are_explained_and_checked(line, capsys, monkeypatch):
    with pytest.raises(SystemExit) as ended:
        pretrain("line", ["--help"])
    assert ended.value.code == 0 and "--width" in capsys.readouterr().out
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert pretrain("line", ["--train-iters", "1", "--tensor-model-parallel-size", "3"]) == 2
    assert "--width 4 must be a multiple of 3" in capsys.readouterr().err


def test_a_new_model_is_known_to_the_converter(line, tmp_path):
    path = saved(tmp_path / "saved", line)
    assert read_metadata(path).model == "line" and model_of(None, open_source(path).tensors) is line
    new, _ = reshard(open_source(path), tmp_path / "new", Target(2, 1))
    assert read_metadata(new).model == "line" and len(read_metadata(new).files) == 2
    with pytest.raises(CheckpointError, match="no model of spikingjelly with the tensors of line"):
        weights_as(open_source(path), "spikingjelly")
    with pytest.raises(ValueError, match="SpikingJelly has no model line"):
        line().from_spikingjelly({})
    with pytest.raises(ValueError, match="--tensor-model-parallel-size 3"):
        saved(tmp_path / "odd", line)
        reshard(open_source(tmp_path / "odd"), tmp_path / "no", Target(3, 1))


def test_weights_published_with_sew_resnet_are_known_by_their_names() -> None:
    ours = {entry.name for entry in describe_model(MODELS["sew_resnet"]()).tensors or ()}
    dialect = dialect_for("published", ours)
    theirs = set(dialect.from_ours(ours))
    known = "conv1.weight", "layer1.0.conv1.module.0.weight", "layer2.0.downsample.0.module.1.running_var", "fc.bias"
    assert theirs.issuperset(known) and dialect_of(theirs) is dialect
    recipe = dialect.to_ours(theirs)
    assert recipe.keys() == ours and recipe["layer3.1.second.norm.bias"].sources == ("layer3.1.conv2.module.1.bias",)


def test_names_of_the_published_e_spikeformer_go_both_ways() -> None:
    with torch.device("meta"):
        theirs = Published((48, 96, 192, 240), (6, 2), heads=8, ratio=4, steps=1, classes=1000)
    assert sum(each.numel() for each in theirs.parameters()) == 10_023_112
    shapes = {name: value.shape for name, value in theirs.state_dict().items()}
    ours = {entry.name: entry.shard.global_shape for entry in describe_model(MODELS["e_spikeformer"]()).tensors}
    recipe = dialect_of(shapes).to_ours(shapes)
    assert {name: shapes[made.sources[0]] for name, made in recipe.items()} == ours
    assert dialect_for("published", ours, "e_spikeformer").from_ours(ours).keys() == shapes.keys()
