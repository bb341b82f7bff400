"""Trained models as plain modules: equal to an Engine's predictions, followed by torch.export and torch.jit.trace, kept
in folders."""

from __future__ import annotations

import copy
import json
import multiprocessing
import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megasnn import CheckpointError, ConvNormNeuron, Engine, MeanLinear, SpikingNeuron, TrainedModel, layer, load_model
from megasnn.common.files import DamagedError
from megasnn.layers import NeuronLayer, ParallelBatchNorm
from megasnn.layers.layer import Layer
from megasnn.models.model import Model
from megasnn.models.vgg_dvs.model import VggDvs
from tests.engine.test_engine import MODEL
from tests.training.runs import train

SAMPLES, SIZES = 6, {"micro_batch_size": 3, "global_batch_size": 6, "train_iters": 3, "lr": 1e-2}


class Rising(SpikingNeuron):
    """Neurons whose thresholds rise with every spike."""

    def start(self, x: Tensor) -> dict[str, Tensor]:
        return {"v": torch.zeros_like(x), "a": torch.zeros_like(x)}

    def charge(self, x: Tensor, state: dict[str, Tensor]) -> Tensor:
        return state["v"] + (x - state["v"]) / 2

    def fire(self, h: Tensor, state: dict[str, Tensor]) -> Tensor:
        return self.spike(h - 1 - 0.2 * state["a"])

    def reset(self, h: Tensor, spikes: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"v": h * (1 - spikes.detach()), "a": 0.9 * state["a"] + spikes}


@dataclass(frozen=True, kw_only=True)
class Own(Model):
    """A unit that is used twice, neurons of one's own, and torch's modules."""

    image_size: int = 8
    time_steps: int = 3
    num_classes: int = 4

    def layers(self) -> Iterable[Layer]:
        unit = ConvNormNeuron(8, 8, 3)
        yield layer("first", ConvNormNeuron(3, 8, 3, max_pool=True, neuron=Rising(8, surrogate="atan")))
        yield layer("twice", unit)
        yield layer("pool", nn.AvgPool2d(2))
        yield layer("again", unit)
        yield layer("head", MeanLinear(8, 4))


VGG = VggDvs(channels="8,P,8,16,P", image_size=8, time_steps=2, num_classes=5)
MODELS: dict[str, Model] = {"spikformer": MODEL, "vgg": VGG, "own": Own()}


def images(model: Model) -> Tensor:
    return model.inputs["images"].examples(SAMPLES, torch.Generator().manual_seed(0)).double()


def firing(model: TrainedModel) -> dict[str, Tensor]:
    """Weights with which neurons fire in evaluation as they do in training: the statistics are those of the images."""
    norms = [each for each in model.modules() if isinstance(each, ParallelBatchNorm)]
    for number, norm in enumerate(norms):
        for parameter, bounds in ((norm.weight, (0.8, 1.6)), (norm.bias, (0.2, 1.2))):
            torch.nn.init.uniform_(parameter, *bounds, torch.Generator().manual_seed(number))
        norm.record_statistics()
    model.chunk.train()(images(model.config), range(SAMPLES))
    for norm in norms:
        mean, variance, _ = norm.pending[0]
        norm.running_mean.copy_(mean), norm.running_var.copy_(variance)
    return model.state()


def spikes_of(neurons: Iterable[nn.Module], call: Callable[[], Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for neuron in neurons:
        assert isinstance(neuron, NeuronLayer)
        neuron.observer = lambda spikes: found.append(spikes.clone())
    call()
    for neuron in neurons:
        neuron.observer = None  # type: ignore[assignment]
    return found


@pytest.fixture(scope="module", params=MODELS)
def trained(request: Any, tmp_path_factory: Any) -> Iterator[tuple[TrainedModel, Tensor, Tensor]]:
    """A model that was loaded from an Engine's checkpoint, images, and what the Engine predicts for them."""
    model, folder = MODELS[request.param], tmp_path_factory.mktemp("checkpoints")
    x, own = images(model), Own if request.param == "own" else None
    with Engine(model, **SIZES, precision="fp64") as engine:
        engine.save(folder)
        engine.load_state_dict(firing(load_model(folder, own)))
        engine.save(folder)
        expected = engine.predict(x)
        neurons = [neuron for _, neuron in engine.distributed.neurons()]
        spikes = spikes_of(neurons, lambda: engine.predict(x[:3]))
    loaded = load_model(folder, own)
    mine = spikes_of([each for each in loaded.modules() if isinstance(each, NeuronLayer)], lambda: loaded(x[:3]))
    assert torch.pdist(expected).median() > 1e-3 and 0.02 < torch.cat([each.flatten() for each in spikes]).mean() < 0.8
    assert len(mine) == len(spikes) and all(map(torch.equal, mine, spikes))
    yield loaded, x, expected


def close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).norm() <= 1e-9 * expected.norm())


def test_it_says_what_an_engine_predicts(trained: Any) -> None:
    model, x, expected = trained
    logits, steps = model(x), model.steps(x)
    assert logits.dtype == torch.float64 and not logits.requires_grad and close(logits, expected)
    assert steps.shape == (model.config.time_steps, *expected.shape) and torch.equal(steps.mean(0), logits)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.torch.jit:DeprecationWarning")
def test_torch_follows_it(trained: Any, tmp_path: Path) -> None:
    """An export leaves the number of samples open; a trace has that of its example."""
    model, x, expected = trained
    samples = torch.export.Dim("samples", min=2, max=1 << 20)
    exported = torch.export.export(model, (x,), strict=False, dynamic_shapes=({0: samples},))
    torch.export.save(exported, tmp_path / "model.pt2")
    assert close(torch.export.load(tmp_path / "model.pt2").module()(x[:4]), expected[:4])
    torch.jit.save(torch.jit.trace(model, x), tmp_path / "model.pt")
    assert close(torch.jit.load(tmp_path / "model.pt")(x.flip(0)), expected.flip(0))


def test_a_folder_brings_it_back(trained: Any, tmp_path: Path) -> None:
    model, x, _ = trained
    model.save_pretrained(tmp_path)
    own = Own if model.about.model == "own" else None
    assert torch.equal(TrainedModel.from_pretrained(tmp_path, own)(x), model(x))
    card = (tmp_path / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: megasnn\n") and f"T = {model.config.time_steps}" in card
    if own is not None:  # a class is never looked for by a name in a file
        assert "again.conv.weight" not in model.state() and "twice.conv.weight" in model.state()
        with pytest.raises(CheckpointError, match="model=MyModel"):
            TrainedModel.from_pretrained(tmp_path)
        with pytest.raises(CheckpointError, match="own.*vgg_dvs"):
            TrainedModel.from_pretrained(tmp_path, VggDvs)


def test_averages_and_steps(tmp_path: Path) -> None:
    x, labels = images(MODEL).float(), torch.arange(SAMPLES)
    with Engine(MODEL, **SIZES, ema_decay=0.9) as engine:
        for _ in range(2):
            engine.train_step(x, labels)
            engine.save(tmp_path)
        expected, weights = engine.predict(x), engine.state_dict()
    averaged = load_model(tmp_path)
    torch.testing.assert_close(averaged(x), expected)
    assert all(torch.equal(value, weights[name]) for name, value in load_model(tmp_path, ema=False).state().items())
    assert not torch.equal(averaged.state()["head.weight"], weights["head.weight"])
    assert load_model(tmp_path, step=1).about.training["iteration"] == 1
    with pytest.raises(CheckpointError, match="3.*1, 2"):
        load_model(tmp_path, step=3)


def test_a_run_and_what_is_damaged(tmp_path: Path) -> None:
    """The card says how pixels become inputs. Nothing of a file that was changed is taken."""
    train(str(tmp_path / "cache"), "--train-iters", "1", "--save", str(tmp_path / "run"))
    model = load_model(tmp_path / "run")
    assert model.about.samples == {"normalize_images": "digits", "center_crop": 1.0, "mean": [0.305], "std": [0.376]}
    folder = tmp_path / "folder"
    model.save_pretrained(folder)
    config, weights = folder / "config.json", folder / "model.safetensors"
    assert "0.376" in (folder / "README.md").read_text()
    good = json.loads(config.read_text())
    for wrong in ({"format": 2}, {"training": 1}, {"code": "import os"}, {"crc32": "00000000"}):
        config.write_text(json.dumps(good | wrong))
        with pytest.raises(DamagedError, match=str(folder)):
            TrainedModel.from_pretrained(folder)
    dimensions = good["config"]["model"] | {"embed_dim": 64}
    config.write_text(json.dumps(good | {"config": good["config"] | {"model": dimensions}}))
    with pytest.raises(CheckpointError, match="shape"):
        TrainedModel.from_pretrained(folder)
    config.write_text(json.dumps(good))
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(DamagedError, match="model.safetensors"):
        TrainedModel.from_pretrained(folder)
    weights.unlink()
    with pytest.raises(DamagedError):
        TrainedModel.from_pretrained(folder)


# --- in programs of others


def test_inputs_that_are_not_the_models_are_refused(trained: Any) -> None:
    model, x, _ = trained
    wrong = {
        "nan or infinite": x.clone().index_fill_(-1, torch.tensor([0]), torch.nan),
        "nan or infinite:": x * 1e39 if model.dtype == torch.float32 else x / 0,
        "uint8": (255 * x.abs().clamp(0, 1)).to(torch.uint8),
        "int64": x.long(),
        "bool": x > 0,
        r"\[6, .*\] of torch.float64": x[..., :-1],
        "got .*3": x.unsqueeze(0).expand(3, *x.shape),
        "list": x.tolist(),
    }
    for named, images_given in wrong.items():
        for call in (model, model.steps, model.output):
            with pytest.raises(ValueError, match=named):
                call(images_given)
    if model.about.model == "vgg":
        with pytest.raises(ValueError, match="got"):
            model(x.repeat(1, 2, 1, 1, 1))  # T = 4


def test_no_samples_and_arrays_of_numpy_have_answers(trained: Any) -> None:
    model, x, expected = trained
    assert model(x[:0]).shape == (0, *expected.shape[1:]) and model(x[:0]).dtype == expected.dtype
    assert model.steps(x[:0]).shape == (model.config.time_steps, 0, *expected.shape[1:])
    assert close(model(x.numpy()), expected)
    turned = x.numpy()[..., ::-1].copy()[..., ::-1]  # of another memory order
    assert close(model(turned), expected) and close(model(x.numpy().astype(">f8")), expected)
    with pytest.raises(ValueError, match="is an array of object, and must be one of numbers"):
        model(x.numpy().astype(object))
    with pytest.raises(ValueError, match="uint8"):
        model((255 * x.abs().clamp(0, 1)).numpy().astype("uint8"))
    with pytest.raises(ValueError, match="got"):
        model(x[:0, ..., 1:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_it_computes_in_the_type_it_is_moved_to(trained: Any, dtype: torch.dtype) -> None:
    model, x, expected = trained
    moved = copy.deepcopy(model).to(dtype)
    assert moved.dtype == dtype and moved.steps(x).dtype == dtype
    assert moved(x).isfinite().all() and moved(x).shape == expected.shape
    if dtype == torch.float64:
        assert close(moved(x), expected)
    again = pickle.loads(pickle.dumps(moved))
    assert again.dtype == dtype and torch.equal(again(x), moved(x))


def _answer(model: TrainedModel, x: Tensor, answers: Any) -> None:
    answers.put(model(x).numpy())


def test_it_is_pickled_saved_and_sent_to_another_process(trained: Any, tmp_path: Path) -> None:
    model, x, _ = trained
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))
    torch.save(model, tmp_path / "model.pt")
    assert torch.equal(torch.load(tmp_path / "model.pt", weights_only=False)(x), model(x))
    processes = multiprocessing.get_context("spawn")
    answers = processes.Queue()
    worker = processes.Process(target=_answer, args=(model, x, answers))
    worker.start()
    found = answers.get(timeout=120)
    worker.join(60)
    assert worker.exitcode == 0 and torch.equal(torch.from_numpy(found), model(x))
