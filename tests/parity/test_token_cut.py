"""Ranks that divide sequences by tokens train as one rank does; what has no tokens, or mixes them, is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasnn import ArraySpec, ConvNormNeuron, Engine, Model, ParallelConv, ParallelDropout, layer
from megasnn.config import ConfigError
from megasnn.layers.layer import Layer
from megasnn.models.build import describe_model
from megasnn.models.model import run_config
from megasnn.planner.analyze import counted_sizes
from tests.parity.ranks import TOLERANCE, error

LENGTH = 13  # tokens, which no number of ranks divides
WORDS = 16
SAMPLES, MICRO = 5, 2  # the last micro-batch has one sample


class Embed(nn.Module):
    mixes_tokens = False

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.table.mixes_tokens = False  # a class of torch's, which says nothing

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens).movedim(-1, 2)


class Sum(nn.Module):
    mixes_tokens = False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


@dataclass(frozen=True, kw_only=True)
class Tagger(Model):
    """A tag for each word; the words stay an input of the last stage."""

    time_steps: int = 2
    kernel: int = 1
    inputs_have_tokens: bool = True

    @property
    def inputs(self) -> Mapping[str, ArraySpec]:
        return {"words": ArraySpec((LENGTH,), "int", below=WORDS, over_tokens=self.inputs_have_tokens)}

    @property
    def target(self) -> ArraySpec:
        return ArraySpec((LENGTH,), "int", below=WORDS, over_tokens=True)

    def layers(self) -> Iterable[Layer]:
        yield layer("embed", Embed(WORDS, 8))
        yield layer("unit.0", ConvNormNeuron(8, 8, self.kernel, dims=1))
        yield layer("drop", ParallelDropout(0.3, "drop"))
        yield layer("unit.1", ConvNormNeuron(8, 8, dims=1))
        yield layer("again", Embed(WORDS, 8), takes="words")
        yield layer("sum", Sum(), takes=("unit.1", "again"))
        yield layer("tags", ParallelConv(8, WORDS, 1, dims=1, bias=True))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.mean(0), target, reduction="none").sum(1) / LENGTH

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"right": (output.mean(0).argmax(1) == target).double().sum(1) / LENGTH}

    def predict(self, output: Tensor) -> Tensor:
        return output.mean(0).sum(2)


def trained(flags: Mapping[str, Any]) -> tuple[list[float], Mapping[str, float], Tensor, dict[str, Tensor]]:
    """Losses of two steps of AdamW, the figures of an evaluation, answers and weights."""
    words = torch.randint(WORDS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    tags = (3 * words + words.roll(1, 1)) % WORDS
    with Engine(
        Tagger(), micro_batch_size=MICRO, global_batch_size=SAMPLES, train_iters=2, lr=1e-2, precision="fp64", **flags
    ) as engine:
        losses = [engine.train_step(words, tags).loss for _ in range(2)]
        record = engine.evaluate(words, tags)
        assert record.samples == SAMPLES
        figures = {"loss": record.loss, **record.metrics}
        return losses, figures, engine.predict(words), engine.state_dict()


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "cp3": (3, {"context_parallel_size": 3}),
    "cp2-tp2": (4, {"context_parallel_size": 2, "tensor_model_parallel_size": 2}),
    "cp2-pp2": (
        4,
        {
            "context_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "pipeline_schedule": "zbv",
            "recompute": "always",
        },
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_as_one_rank_does(ranks, layout: str) -> None:
    size, flags = LAYOUTS[layout]
    losses, figures, answers, weights = trained({})
    for found in ranks(size, trained, {**flags, "context_parallel_cut": "tokens"}):
        assert found[0] == pytest.approx(losses, rel=TOLERANCE)
        assert found[1] == pytest.approx(figures, rel=TOLERANCE)
        torch.testing.assert_close(found[2], answers, rtol=TOLERANCE, atol=1e-12)
        for name, value in weights.items():
            assert error(found[3][name], value) < TOLERANCE or value.abs().max() < 1e-12, name


@pytest.mark.parametrize(
    ("model", "size", "named"),
    [
        (Tagger(kernel=3), 2, r"unit.0: conv \(ParallelConv\) may mix tokens.*mixes_tokens = False"),
        (Tagger(inputs_have_tokens=False), 2, r"words \[13\] has none.*over_tokens=True"),
        (Tagger(), 14, "13 token.* for 14 ranks"),
    ],
)
def test_a_model_whose_tokens_cannot_be_cut_is_refused(monkeypatch, model: Tagger, size: int, named: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(size))
    flags = {"context_parallel_size": size, "context_parallel_cut": "tokens"}
    with pytest.raises(ConfigError, match=named):
        Engine(model, micro_batch_size=MICRO, global_batch_size=SAMPLES, lr=1e-2, train_iters=1, **flags)


def test_a_plan_knows_which_sizes_cut_the_tokens() -> None:
    model = Tagger()
    found = counted_sizes(describe_model(model, model.neuron().spec), run_config(Tagger)(model=model))
    by_tokens, by_rows = found.possible["tokens"], found.possible["rows"]
    assert by_tokens[12] is None and "13 tokens for 16 ranks" in str(by_tokens[16])
    assert all("the input words [13] is none" in str(refused) for refused in by_rows.values())
    assert found.shared["tokens"].cut == "tokens" and "rows" not in found.shared
    for whole, part in zip(found.alone.costs[-1], found.shared["tokens"].costs[-1], strict=True):
        # Seven tokens of thirteen.
        assert 0 < part.output <= 7 / 13 * whole.output
