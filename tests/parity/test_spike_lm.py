"""SpikeLM on one rank is plain PyTorch in float64 to 1e-12, and every layout is one rank to 1e-9."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from megasnn import Engine
from megasnn.kernels import NeuronSpec
from megasnn.layers import BuildContext
from megasnn.layers.tensors import materialise
from megasnn.models.spike_lm.blocks import MLPHalf
from megasnn.models.spike_lm.model import SpikeLM
from megasnn.training.operations import Operations
from tests import parts
from tests.parity import spike_lm as plain
from tests.parity.ranks import TOLERANCE, error

SAMPLES, MICRO, STEPS = 7, 3, 3  # the last micro-batch has one sample
WORDS = 131  # a number that no ranks divide evenly
LENGTH = 12
LEARNED = SpikeLM(
    embed_dim=16,
    depth=2,
    num_heads=4,
    time_steps=3,
    seq_length=LENGTH,
    vocab_size=WORDS,
    positions="learned",
)
MODELS: dict[str, tuple[SpikeLM, dict[str, Any]]] = {
    "learned": (LEARNED, {}),
    "tied": (replace(LEARNED, tied=True, positions="rotary"), {"v_threshold": 0.7}),
    "calibrated": (replace(LEARNED, amplitude="first-batch", positions="rotary"), {}),
    "spiking": (replace(LEARNED, attention="spiking", amplitude="first-batch"), {}),
    "spiking fixed": (replace(LEARNED, attention="spiking"), {"v_threshold": 1.5}),
}
"""With their neuron's flags."""
FLAGS = {"micro_batch_size": MICRO, "global_batch_size": SAMPLES, "precision": "fp64", "weight_decay": 0.0}


@dataclass
class Found:
    """What one rank has of some steps and an evaluation behind them; gradients are those of the first step."""

    losses: list[float]
    hits: list[float]
    evaluated: Mapping[str, float]
    answers: Tensor
    weights: dict[str, Tensor]
    gradients: list[parts.Part]


def text() -> tuple[Tensor, Tensor]:
    """Tokens and next tokens of a text that ships with Python."""
    letters = torch.tensor([ord(letter) % WORDS for letter in inspect.getsource(textwrap)])
    rows = torch.stack([letters[60 * number : 60 * number + LENGTH + 1] for number in range(SAMPLES)])
    return rows[:, :-1], rows[:, 1:]


def found(name: str, flags: Mapping[str, Any]) -> Found:
    tokens, targets = text()
    model, of_neuron = MODELS[name]
    options = {**FLAGS, **of_neuron, "train_iters": STEPS, "lr": 1e-2, **flags}
    with Engine(model, **options) as engine:
        results = [engine.train_step(tokens, targets)]
        gradients = parts.gradients(engine.distributed.owned)
        for _ in range(STEPS - 1):
            results.append(engine.train_step(tokens, targets))
        record = engine.evaluate(tokens, targets)
        assert record.samples == SAMPLES
        evaluated = {"loss": record.loss, **record.metrics}
        hits = [result.sums["top1"] for result in results]
        answers = engine.predict(tokens)
        return Found([r.loss for r in results], hits, evaluated, answers, engine.state_dict(), gradients)


@cache
def one(name: str) -> Found:
    return found(name, {})


TP2 = {"tensor_model_parallel_size": 2}
TOKENS2 = {"context_parallel_size": 2, "context_parallel_cut": "tokens"}
ZBV2 = {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zbv"}
LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "cp2 tokens": (2, "learned", TOKENS2),
    "cp2 tokens spiking": (2, "spiking", TOKENS2),
    "tp2": (2, "learned", TP2),
    "pp2 zbv tied": (2, "tied", ZBV2),
    "dp2 calibrated": (2, "calibrated", {}),
}
MATRIX: dict[str, tuple[int, str, dict[str, Any]]] = {
    "dp2 pp2 calibrated": (4, "calibrated", ZBV2),
    "tp2 calibrated": (2, "calibrated", TP2),
    "tp2 spiking": (2, "spiking", TP2),
    "cp5 tokens": (5, "tied", {"context_parallel_size": 5, "context_parallel_cut": "tokens"}),
    "cp2 tokens tp2": (4, "tied", TOKENS2 | TP2),
    "cp2 tokens tp2 pp2": (8, "spiking", TOKENS2 | TP2 | ZBV2),
    "tp4": (4, "tied", {"tensor_model_parallel_size": 4}),
    "pp3 interleaved": (3, "learned", {"pipeline_model_parallel_size": 3, "pipeline_schedule": "interleaved"}),
    "weights 2": (2, "learned", {"weight_parallel_size": 2, "micro_batch_size": 4}),
    "weights 2 zbv": (4, "tied", {"weight_parallel_size": 2, "micro_batch_size": 4} | ZBV2),
    "zero 1": (2, "learned", {"use_distributed_optimizer": True}),
    "recompute tp2": (2, "tied", TP2 | {"recompute": "always"}),
    "recompute tokens": (2, "calibrated", TOKENS2 | {"recompute": "always"}),
    "cp2 samples": (2, "learned", {"context_parallel_size": 2, "micro_batch_size": 4}),
    "cp2 samples calibrated": (2, "calibrated", {"context_parallel_size": 2, "micro_batch_size": 4}),
}


def layouts() -> list[Any]:
    usual = [pytest.param(*LAYOUTS[name], id=name) for name in LAYOUTS]
    return usual + [pytest.param(*MATRIX[name], id=name, marks=pytest.mark.matrix) for name in MATRIX]


@pytest.mark.parametrize(("ranks_used", "model", "flags"), layouts())
def test_every_layout_computes_what_one_rank_does(ranks, ranks_used: int, model: str, flags: dict[str, Any]) -> None:
    of_one = one(model) if "micro_batch_size" not in flags else found(model, {"micro_batch_size": 4})
    of_ranks = ranks(ranks_used, found, model, flags)
    gradients = parts.assemble([each.gradients for each in of_ranks])
    for name, value in parts.assemble([of_one.gradients]).items():
        assert error(gradients[name], value) < TOLERANCE or value.abs().max() < 1e-12, name
    for other in of_ranks:
        assert other.losses == pytest.approx(of_one.losses, rel=TOLERANCE)
        assert other.hits == pytest.approx(of_one.hits, rel=TOLERANCE)
        assert other.evaluated == pytest.approx(of_one.evaluated, rel=TOLERANCE)
        torch.testing.assert_close(other.answers, of_one.answers, rtol=TOLERANCE, atol=1e-9)
        for name, value in of_one.weights.items():
            assert error(other.weights[name], value) < TOLERANCE or value.abs().max() < 1e-9, name


@torch.no_grad()
def calibrated(given: plain.Given, tokens: Tensor) -> dict[str, Tensor]:
    """Each neuron's amplitudes from these tokens."""
    amplitudes: dict[str, Tensor] = {}
    plain.stream(replace(given, calibrated=amplitudes), tokens)
    return amplitudes


@pytest.mark.parametrize("name", MODELS)
def test_one_rank_is_plain_pytorch(name: str) -> None:
    model, of_neuron = MODELS[name]
    tokens, targets = text()
    flags = {**FLAGS, **of_neuron, "clip_grad": 0.0, "lr_decay_style": "constant", "lr": 1e-2, "train_iters": 1}
    with Engine(model, **flags) as engine:
        before = engine.state_dict()
        result = engine.train_step(tokens, targets)
        gradients = parts.assemble([parts.gradients(engine.distributed.owned)])
        after = engine.state_dict()
    weights = {key: value.requires_grad_() for key, value in before.items() if not key.endswith("amplitude")}
    given = plain.Given(model, weights, of_neuron.get("v_threshold", 1.0))
    if model.amplitude == "first-batch":
        amplitudes = calibrated(given, tokens[:MICRO])
        assert amplitudes.keys() == before.keys() - weights.keys() != set()
        for key, value in amplitudes.items():
            torch.testing.assert_close(after[key], value, rtol=1e-12, atol=0)
        given = replace(given, weights=weights | amplitudes)
    loss = plain.losses(given, tokens, targets).mean()
    loss.backward()
    assert result.loss == pytest.approx(loss.item(), rel=1e-12)
    assert gradients.keys() == weights.keys()
    for key, weight in weights.items():
        assert weight.grad is not None, key
        assert error(gradients[key], weight.grad) < 1e-12 or weight.grad.abs().max() < 1e-15, key


@pytest.mark.parametrize("name", MODELS)
def test_a_prediction_is_the_mean_logits_behind_the_last_token(name: str) -> None:
    model, of_neuron = MODELS[name]
    tokens, _ = text()
    with Engine(model, **FLAGS, **of_neuron, lr=1e-2, train_iters=1) as engine:
        if model.amplitude == "first-batch":
            with pytest.raises(ValueError, match="take a step"):
                engine.predict(tokens)
            engine.train_step(*text())
        given = plain.Given(model, engine.state_dict(), of_neuron.get("v_threshold", 1.0))
        logits = plain.stream(given, tokens)[:, :, -1].mean(0)
        torch.testing.assert_close(engine.predict(tokens), logits, rtol=1e-12, atol=1e-14)


def test_backward_keeps_no_hidden_values_of_the_mlp() -> None:
    steps, dim, hidden = 2, 8, 64
    layer = MLPHalf(dim, hidden, False, BuildContext(neuron=NeuronSpec("bispike"), time_steps=steps))
    x = torch.randn(steps, 3, 5, dim).movedim(-1, 2).requires_grad_()
    layer(x.detach().to("meta"))
    materialise([("mlp", layer)], torch.device("cpu"), seed=0)
    kept: list[int] = []

    def keep(saved: Tensor) -> Tensor:
        kept.append(saved.nbytes)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        y = layer(x)
    y.sum().backward()
    assert 0 < max(kept) < y[:, :, 0].numel() * hidden * y.itemsize


def operations_of_head(flags: Mapping[str, Any]) -> list[tuple[float, float]]:
    tokens, targets = text()
    with Engine(LEARNED, **FLAGS, lr=1e-2, train_iters=1, **flags) as engine:
        operations = Operations(engine.distributed)
        with operations.counting():
            engine.evaluate(tokens, targets)
        found = operations.mean_per_sample(SAMPLES)
        return [(each.effective_macs, each.effective_acs) for each in found if each.name == "head"]


def test_an_evaluation_counts_the_output_layer_on_every_layout(ranks) -> None:
    whole = [(float(LENGTH * WORDS * LEARNED.embed_dim), 0.0)]
    assert operations_of_head({}) == whole
    for flags in (TP2, TOKENS2, {}):
        assert ranks(2, operations_of_head, flags) == [whole, whole]


def test_a_last_chunk_without_layers_cannot_take_the_targets() -> None:
    flags = {"num_virtual_stages_per_pipeline_rank": 2, "pipeline_model_parallel_layout": "7|0"}
    with pytest.raises(ValueError, match="head takes the targets"):
        Engine(LEARNED, **FLAGS, lr=1e-2, train_iters=1, **flags)
