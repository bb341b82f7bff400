"""Layer norm, embedding and the loss of the next token, cut over ranks, against torch's functions in float64."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megasnn.common.recompute import recording_collectives, replaying_collectives
from megasnn.layers import vocabulary
from megasnn.layers.embedding import ParallelEmbedding
from megasnn.layers.layer_norm import ParallelLayerNorm
from megasnn.layers.token_context import own_tokens
from megasnn.layers.vocabulary import NextTokenLoss
from megasnn.layers.weight_grad import WeightGradients
from megasnn.parallel.traffic import traffic
from megasnn.parallel_state import Group
from tests.distributed.whole import (
    build,
    by_one,
    channels_last,
    context,
    cut_part,
    everybody,
    mine,
    random,
    require_close,
    run,
    whole_part,
)
from tests.parts import Part, assemble, gradients

T, N, C, L = 2, 3, 12, 5
VOCAB_SIZE = 11  # which 2 and 3 ranks do not divide evenly
NORM = {"weight": random(C, seed=1), "bias": random(C, seed=2)}
# A mean far from 0, where a difference of squares would lose the variance.
STREAM = 1e3 + random(T, N, C, L, seed=3)
TABLE = {"weight": random(VOCAB_SIZE, C, seed=4), "positions": random(L + 2, C, seed=5)}
OUTPUT = {"weight": random(VOCAB_SIZE, C, seed=6)}
TOKENS = torch.randint(VOCAB_SIZE, (1, N, L), generator=torch.Generator().manual_seed(7))
TARGETS = torch.randint(VOCAB_SIZE, (1, N, L), generator=torch.Generator().manual_seed(8))
OF_LOSSES = random(1, N, seed=9)


def _norm() -> list[Part]:
    group = everybody()
    return run(ParallelLayerNorm(C, context(group)), NORM, STREAM, group)


def _embedding() -> list[Part]:
    group = everybody()
    layer = ParallelEmbedding(VOCAB_SIZE, C, context(group), length=L + 2)
    tensors = build({"layer": layer}, {f"layer.{name}": value for name, value in TABLE.items()})
    layer(TOKENS.to("meta"))
    y = layer(TOKENS)
    assert y.movedim(2, -1).is_contiguous()
    (y * mine(random(1, N, C, L, seed=50), group)).sum().backward()
    return [cut_part("y", y, group), *gradients(tensors)]


def _loss() -> list[Part]:
    group = everybody()
    layer = NextTokenLoss(C, VOCAB_SIZE, context(group))
    tensors = build({"layer": layer}, {f"layer.{name}": value for name, value in OUTPUT.items()})
    x = mine(channels_last(STREAM - 1e3), group).requires_grad_()
    layer(x.detach().to("meta"), TARGETS.to("meta"))
    vocabulary.CHUNK_VALUES = 40  # several chunks, the last one smaller
    output = layer(x, TARGETS)
    (output["loss"] * OF_LOSSES).sum().backward()
    assert output["logits"].isnan().all()
    answer = layer(x)
    assert answer["loss"].isnan().all()
    found = [whole_part(name, output[name]) for name in ("loss", "top1")]
    found += [whole_part("logits", answer["logits"]), cut_part("x", x.grad, group)]
    return [*found, *gradients(tensors)]


def _all() -> list[list[Part]]:
    return [_norm(), _embedding(), _loss()]


def _expected(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of the loss, with logits of all steps, tokens and words."""
    x = (STREAM - 1e3).requires_grad_()
    logits = F.linear(x.movedim(2, -1), given["weight"]).mean(0)
    losses = F.cross_entropy(logits.transpose(1, 2), TARGETS[0], reduction="none").mean(1)
    (losses * OF_LOSSES[0]).sum().backward()
    hits = (logits.argmax(2) == TARGETS[0]).double().mean(1)
    named = {"loss": losses[None], "top1": hits[None], "logits": logits[None, :, -1], "x": x.grad}
    return {**named, "layer.weight": given["weight"].grad}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_outputs_and_gradients_are_those_of_torch(ranks, size: int) -> None:
    norms, embeddings, losses = (assemble(each) for each in zip(*ranks(size, _all), strict=True))
    given = {name: value.clone().requires_grad_() for name, value in NORM.items()}

    def norm(x: Tensor) -> Tensor:
        return F.layer_norm(x.movedim(2, -1), [C], given["weight"], given["bias"]).movedim(-1, 2)

    require_close(norms, by_one(norm, given, STREAM), "norm", rtol=1e-10, atol=1e-10)
    table = {name: value.clone().requires_grad_() for name, value in TABLE.items()}
    y = F.embedding(TOKENS, table["weight"]).movedim(-1, 2) + table["positions"][:L].T
    (y * random(1, N, C, L, seed=50)).sum().backward()
    named = {"y": y, **{f"layer.{name}": value.grad for name, value in table.items()}}
    require_close(embeddings, named, "embedding", rtol=1e-12, atol=1e-12)
    wanted = _expected({name: value.clone().requires_grad_() for name, value in OUTPUT.items()})
    require_close(losses, wanted, "loss", rtol=1e-12, atol=1e-12)


class _Products(TorchDispatchMode):
    """Counts multiply-adds of matrix products; torch's counter knows none that add to a matrix."""

    multiply_adds = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.__name__.split(".")[0] in ("mm", "addmm", "addmm_"):
            a, b = args[-2:]
            self.multiply_adds += a.numel() * b.shape[1]
        return function(*args, **(kwargs or {}))


def _products(work: Callable[[], object]) -> float:
    """Number of products of all rows with all words."""
    with _Products() as counted:
        work()
    return counted.multiply_adds / (N * L * C * VOCAB_SIZE)


def _built_loss(group: Group) -> tuple[NextTokenLoss, Tensor, WeightGradients]:
    of_group = context(group)
    layer = NextTokenLoss(C, VOCAB_SIZE, of_group)
    build({"layer": layer}, {f"layer.{name}": value for name, value in OUTPUT.items()})
    x = mine(channels_last(STREAM - 1e3), group).requires_grad_()
    layer(x.detach().to("meta"), TARGETS.to("meta"))
    return layer, x, of_group.weight_gradients


@pytest.mark.parametrize("chunk_values", [VOCAB_SIZE * N * L, 40])
def test_a_cut_backward_leaves_the_weight_gradient_of_the_loss_for_later(monkeypatch, chunk_values: int) -> None:
    monkeypatch.setattr(vocabulary, "CHUNK_VALUES", chunk_values)
    whole, x, _ = _built_loss(Group("tp"))
    assert _products(whole(x, TARGETS)["loss"].sum().backward) == 3
    layer, x, weight_gradients = _built_loss(Group("tp"))
    loss = layer(x, TARGETS)["loss"].sum()
    with weight_gradients.deferring() as tasks:
        # The logits of one chunk wait; of several only their sum, so that no rank holds logits of all tokens.
        assert _products(loss.backward) == (2 if chunk_values > 40 else 3)
    assert x.grad is not None and layer.weight.grad is None
    (task,) = tasks
    task()
    assert torch.equal(layer.weight.grad, whole.weight.grad)


def test_a_frozen_output_layer_forms_no_weight_gradient() -> None:
    layer, x, _ = _built_loss(Group("tp"))
    layer.weight.requires_grad_(False)
    assert _products(layer(x, TARGETS)["loss"].sum().backward) == 2
    assert x.grad is not None and layer.weight.grad is None


def _recomputed_loss() -> tuple[list[float], list[bool]]:
    layer, x, _ = _built_loss(everybody())
    cache: deque[object] = deque()
    outputs = []

    def forward() -> None:
        outputs.append(layer(x, TARGETS))

    with recording_collectives(cache):
        products = [_products(forward)]
    with replaying_collectives(cache):
        products.append(_products(forward))
    first, again = outputs
    return products, [torch.equal(first[name], again[name]) for name in ("loss", "top1")]


@pytest.mark.parametrize("size", [1, 2])
def test_a_recomputed_loss_forms_no_logits(ranks, size: int) -> None:
    for products, same_bits in ranks(size, _recomputed_loss):
        assert products[0] == pytest.approx(1 / size, rel=0.1)  # ranks divide 11 words
        assert products[1] == 0
        assert same_bits == [True, True]


def _last_logits() -> tuple[float, Tensor]:
    group = everybody("cp")
    layer = NextTokenLoss(C, VOCAB_SIZE, replace(context(group), context_cut="tokens"))
    build({"layer": layer}, {f"layer.{name}": value for name, value in OUTPUT.items()})
    x = channels_last(STREAM - 1e3)
    layer(x.to("meta"))
    answers = []

    def predict() -> None:
        answers.append(layer(own_tokens(x, group))["logits"])

    return _products(predict), answers[0]


def test_only_the_rank_with_the_last_token_computes_an_answer(ranks) -> None:
    (none, zeros), (some, logits) = ranks(2, _last_logits)
    assert none == 0 < some
    assert not zeros.any()
    whole, x, _ = _built_loss(Group("tp"))
    assert torch.equal(zeros + logits, whole(x)["logits"])


def _loss_traffic(vocab_size: int) -> list[float]:
    group = everybody()
    layer = NextTokenLoss(C, vocab_size, context(group))
    build({"layer": layer}, {})
    x = mine(channels_last(STREAM), group).requires_grad_()
    targets = TARGETS % vocab_size
    layer(x.detach().to("meta"), targets.to("meta"))
    with traffic.counting():
        before = traffic.total().bytes
        layer(x, targets)["loss"].sum().backward()
        return [traffic.total().bytes - before]


def test_the_bytes_of_the_loss_do_not_grow_with_the_vocabulary(ranks) -> None:
    assert ranks(2, _loss_traffic, 8) == ranks(2, _loss_traffic, 8000) != [[0], [0]]


def test_sizes_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="6 tokens have only 5 positions"):
        ParallelEmbedding(VOCAB_SIZE, C, length=5)(torch.empty(1, 1, 6, dtype=torch.long, device="meta"))
    with pytest.raises(ValueError, match="layer norm takes 12 channels, got 8"):
        ParallelLayerNorm(C)(torch.empty(1, 1, 8, 3, device="meta"))
    with pytest.raises(ValueError, match="output layer takes 12 channels, got 8"):
        NextTokenLoss(C, VOCAB_SIZE)(torch.empty(1, 1, 8, 3, device="meta"))


def _small_vocabulary() -> str:
    with pytest.raises(ValueError) as refused:
        NextTokenLoss(C, 1, context(everybody()))
    return str(refused.value)


def test_a_vocabulary_smaller_than_the_ranks_is_refused(ranks) -> None:
    assert ranks(2, _small_vocabulary) == 2 * ["a vocabulary of 1 is smaller than --tensor-model-parallel-size 2"]
