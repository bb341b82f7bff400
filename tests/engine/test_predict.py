"""Predictions and evaluations of networks that fire: beside SpikingJelly's own, in order, and on every layout."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from spikingjelly.activation_based import functional
from spikingjelly.activation_based.model.spikformer import Spikformer
from torch import Tensor

from megasnn import ConvNormNeuron, Engine
from megasnn.layers import ParallelBatchNorm
from megasnn.layers.layer import layer
from tests.engine.test_engine import MODEL, PP2, SIZES
from tests.models.networks import between
from tests.parity.spikingjelly_reference import from_spikingjelly, with_other_norms

SAMPLES = 23
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor": (2, {"tensor_model_parallel_size": 2}),
    "stages and replicas": (4, PP2),
    "samples of stages": (
        4,
        {"context_parallel_size": 2, "pipeline_model_parallel_size": 2, "pipeline_schedule": "zbv"},
    ),
    "shared weights": (4, {"weight_parallel_size": 2, "global_batch_size": 16}),
    "rows": (2, {"context_parallel_size": 2, "context_parallel_cut": "rows"}),
}


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.rand(SAMPLES, *MODEL.input_shape, generator=generator).double(), torch.arange(SAMPLES) % 10


def trained_spikingjelly() -> torch.nn.Module:
    """SpikingJelly's model behind some forwards of training: its norms' statistics let neurons fire in evaluation."""
    size = dict(T=2, in_channels=1, img_size_h=8, img_size_w=8, patch_size=4, num_classes=10)
    make = partial(Spikformer, **size, embed_dims=32, num_heads=4, mlp_ratio=2.0, depths=1)
    model = with_other_norms(make, 0, (1.0, 3.0), (0.5, 2.0))
    for seed in range(30):
        model(torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(seed)).double())
        functional.reset_net(model)
    return model.eval()


@cache
@torch.no_grad()
def by_spikingjelly() -> tuple[dict[str, Tensor], Tensor]:
    """Weights by our names, and logits `[T, N, classes]`."""
    model = trained_spikingjelly()
    return from_spikingjelly(model.state_dict()), model(batch()[0])


def answers(flags: dict[str, Any], inference: bool = False) -> dict[str, Any]:
    """What an Engine in float64 says of samples, few and uneven ones too."""
    images, labels = batch()
    with Engine(MODEL, **{**SIZES, **flags}, precision="fp64") as engine:
        engine.load_state_dict(by_spikingjelly()[0])
        pairs = [(images[:1], labels[:1]), (images[1:], labels[1:])]
        with torch.inference_mode(inference):
            return {
                "logits": engine.predict(images),
                "of one": engine.predict(images[22:]),
                "whole": engine.evaluate(images, labels),
                "in parts": engine.evaluate(pairs),
            }


def require_right(found: dict[str, Any], logits: Tensor) -> None:
    expected, labels = logits.mean(0), batch()[1]
    assert (found["logits"] - expected).norm() <= 1e-9 * expected.norm()
    assert (found["of one"] - expected[22:]).norm() <= 1e-9 * expected[22:].norm()
    loss = torch.nn.functional.cross_entropy(expected, labels).item()
    for record in (found["whole"], found["in parts"]):
        assert record.samples == SAMPLES and record.loss == pytest.approx(loss, rel=1e-9)
        assert record.top1 == pytest.approx((expected.argmax(1) == labels).double().mean().item())
        assert record.top5 == pytest.approx((expected.topk(5).indices == labels[:, None]).any(1).double().mean().item())


def test_the_network_fires_and_its_samples_differ() -> None:
    """So that the tests below see whose logits they are, and of which time step."""
    _, logits = by_spikingjelly()
    assert (logits[0] - logits.mean(0)).norm() > 1e-3 * logits.mean(0).norm()
    assert torch.cdist(logits.mean(0), logits.mean(0)).add(torch.eye(SAMPLES)).min() > 1e-3


def test_one_rank_says_what_spikingjelly_says() -> None:
    require_right(answers({}), by_spikingjelly()[1])
    require_right(answers({}, inference=True), by_spikingjelly()[1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_so_does_every_layout(ranks, layout: str) -> None:
    size, flags = LAYOUTS[layout]
    for found in ranks(size, answers, flags):
        require_right(found, by_spikingjelly()[1])


# --- evaluation leaves training alone


def computed(flags: dict[str, Any], evaluates: bool, inference: bool = False) -> list[Any]:
    """Losses of two steps, with evaluations around them, and the tensors behind them."""
    images, labels = batch()
    losses: list[Any] = []
    with Engine(MODEL, **SIZES, **flags) as engine:
        engine.load_state_dict(
            {name: v.float() if v.is_floating_point() else v for name, v in by_spikingjelly()[0].items()}
        )
        for _ in range(2):
            if evaluates:
                with torch.inference_mode(inference):
                    engine.evaluate(images.float(), labels), engine.predict(images.float())
                    engine.predict(images[:1].float())  # an even number of exchanges would undo each other
            losses.append(engine.train_step(images[:10].float(), labels[:10]).loss)
        averages = [] if engine.trainer.average is None else [e.tensor.clone() for e in engine.trainer.average.tensors]
        return [*losses, *engine.state_dict().values(), *averages]


@pytest.mark.parametrize(
    ("size", "flags"), [(1, {"ema_decay": 0.5}), (1, {"recompute": "always"}), (2, {"ema_decay": 0.5, **PP2})]
)
def test_evaluations_change_no_bit_of_the_training(ranks, size: int, flags: dict[str, Any]) -> None:
    """Running statistics of a network that fires among it, and their average; on one rank inside of inference mode."""
    plain = ranks(size, computed, flags, False)
    for found, expected in zip(ranks(size, computed, flags, True, size == 1), plain, strict=True):
        assert found[:2] == expected[:2] and all(map(torch.equal, found[2:], expected[2:]))


def evaluated_by_batch(flags: dict[str, Any], samples: int) -> float | str:
    """Of a model with a norm that has no running statistics: in evaluation, too, it normalises by the batch."""
    norm = partial(ParallelBatchNorm, 4, track_running_stats=False)
    model = between(lambda: [layer("unit", ConvNormNeuron(4, 4, 3, norm=norm()))])
    with Engine(model, **SIZES, **flags, precision="fp64") as engine:
        images = torch.rand(samples, *model.input_shape, generator=torch.Generator().manual_seed(1))
        try:
            return engine.evaluate(images, torch.arange(samples) % 4).loss
        except ValueError as error:
            return str(error)


def test_a_norm_without_running_statistics(ranks) -> None:
    """With fewer samples than ranks, one would stand in for a sample."""
    (one,) = ranks(1, evaluated_by_batch, {}, 7)
    assert ranks(2, evaluated_by_batch, {"context_parallel_size": 2}, 7) == [pytest.approx(one, 1e-9)] * 2
    for said in ranks(2, evaluated_by_batch, {"context_parallel_size": 2}, 5):
        assert "--context-parallel-size 2" in str(said)


# --- ranks that share micro-batches

CP2 = {"context_parallel_size": 2}
MIXED = {"mixup_alpha": 0.4, "cutmix_alpha": 1.0, "micro_batch_size": 5}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "mixed": (4, {**CP2, "use_distributed_optimizer": True}, MIXED),
    "windows": (2, CP2, {"bptt_steps": 1, "ema_decay": 0.5}),
}
"""Ranks, flags of their layout, and flags of what is computed."""


def steps(flags: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    images, labels = batch()
    with Engine(MODEL, **{**SIZES, "precision": "fp64", **flags}) as engine:
        results = [engine.train_step(images[at : at + 10], labels[at : at + 10]) for at in (0, 5)]
        record = engine.evaluate(images[:15], labels[:15])
        figures = [value for each in results for value in (each.loss, each.correct, each.grad_norm)]
        return [*figures, record.loss, record.top1], engine.state_dict()


@pytest.mark.parametrize("case", CASES)
def test_they_compute_what_one_rank_computes(ranks, case: str) -> None:
    size, layout, computed = CASES[case]
    ((figures, weights),) = ranks(1, steps, computed)
    for found, theirs in ranks(size, steps, {**computed, **layout}):
        assert found == pytest.approx(figures, rel=1e-9)
        for name, value in weights.items():
            assert (theirs[name] - value).double().norm() <= 1e-8 * value.double().norm(), name


def refusals(layout: dict[str, Any]) -> list[str]:
    images, labels = batch()
    said = list[str]()
    with Engine(MODEL, **{**SIZES, **layout}) as engine:
        for samples in (9, 1):
            with pytest.raises(ValueError) as caught:
                engine.train_step(images[:samples], labels[:samples])
            said.append(str(caught.value))
        assert engine.train_step(images[:8], labels[:8]).loss > 0, "nothing was changed"
    return said


@pytest.mark.parametrize(
    ("layout", "named"),
    [(CP2, "context_parallel_size 2"), (LAYOUTS["shared weights"][1], "weight_parallel_size 2")],
)
def test_what_cannot_be_shared_is_refused_on_every_rank(ranks, layout: dict[str, Any], named: str) -> None:
    first, second = ranks(2, refusals, layout)
    assert first == second and all(named in text for text in first)
