"""Runs of a language model on text: every layout, restarts, perplexity, and refusals before anything is built."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch.nn.functional as F
from torch import Tensor

from megasnn import MODELS, ArraySpec, layer
from megasnn.data.tokens.prepared import write_facts, write_tokens
from megasnn.data.tokens.tokenizer import ByteTokenizer
from megasnn.layers.layer import Layer
from megasnn.pretraining import pretrain
from megasnn.telemetry.records import TextUnits
from tests.parity.test_tasks import Embed, NextWord, Past, Task
from tests.training.runs import close, log_of, same, saved, train_model, without_trial


@dataclass(frozen=True, kw_only=True)
class NextByte(Task):
    """The next byte of a text; the matrix of the last layer is that of the first."""

    seq_length: int = 24
    vocab_size: int = 257

    @property
    def inputs(self) -> Mapping[str, ArraySpec]:
        return {"tokens": ArraySpec((self.seq_length,), "int", below=self.vocab_size)}

    @property
    def target(self) -> ArraySpec:
        return ArraySpec((self.seq_length,), "int", below=self.vocab_size)

    def layers(self) -> Iterable[Layer]:
        embed = Embed(self.vocab_size, 8)
        yield layer("embed", embed)
        yield layer("past.0", Past(8))
        yield layer("past.1", Past(8))
        yield layer("next", NextWord(embed))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.mean(0).transpose(1, 2), target, reduction="none").mean(1)

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"letters": (output.mean(0).argmax(2) == target).double().mean(1)}


FLAGS = "--micro-batch-size 4 --global-batch-size 8 --num-workers 0 --lr 1e-2 --precision fp64 --log-interval 1".split()
LAYOUTS = {
    "one": (1, ""),
    "dp2": (2, "--num-workers 1"),
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "pp2": (2, "--pipeline-model-parallel-size 2 --pipeline-schedule zbv"),
    "cp2": (2, "--context-parallel-size 2 --context-parallel-cut samples"),
}


def trained(cache: str, folder: str, flags: str) -> None:
    """On every rank: three steps with an evaluation, saved after two."""
    os.environ["MEGASNN_CACHE"] = cache
    MODELS[NextByte.name] = NextByte
    common = f"--train-iters 3 --eval-interval 2 --eval-iters 1 --save {folder} --save-interval 2"
    with without_trial():
        train_model(NextByte.name, [*FLAGS, *f"{common} {flags}".split()])


def test_every_layout_trains_alike_and_goes_on_from_another(ranks, cache: str, tmp_path: Path) -> None:
    for name, (size, flags) in LAYOUTS.items():
        ranks(size, trained, cache, str(tmp_path / name), flags)
    one = saved(tmp_path / "one")
    lines = log_of(tmp_path / "one", "iteration")
    assert len(lines) == 3
    for name in LAYOUTS:
        assert close(saved(tmp_path / name), one), name
        losses = [line["loss"] for line in log_of(tmp_path / name, "iteration")]
        assert losses == pytest.approx([line["loss"] for line in lines], rel=1e-9)

    # From the middle of the run on one rank, another layout takes the last step.
    ranks(2, trained, cache, str(tmp_path / "again"), f"--load {tmp_path / 'one'} --ckpt-step 2")
    assert close(saved(tmp_path / "again"), one)
    ranks(1, trained, cache, str(tmp_path / "same"), f"--load {tmp_path / 'one'} --ckpt-step 2")
    assert same(saved(tmp_path / "same"), one)


def test_logs_have_perplexity_bits_per_byte_and_tokens_a_second(ranks, cache: str, tmp_path: Path) -> None:
    ranks(1, trained, cache, str(tmp_path), "")
    (validation, *_) = log_of(tmp_path, "validation")
    for line in [*log_of(tmp_path, "iteration"), validation]:
        assert line["perplexity"] == pytest.approx(math.exp(line["loss"]))
        # 256 of 257 tokens are bytes, nearly: each document has one end.
        bits = line["loss"] / math.log(2)
        assert bits < line["bits_per_byte"] < 1.01 * bits
    (line, *_) = log_of(tmp_path, "iteration")
    assert line["tokens_per_second"] == pytest.approx(24 * line["samples_per_second"])


def test_a_loss_that_no_perplexity_can_show_is_infinite() -> None:
    units = TextUnits(8, bytes_per_token=None)
    assert units.figures(1e4) == {"perplexity": math.inf}
    assert TextUnits(8, bytes_per_token=4.0).figures(math.log(2)) == pytest.approx(
        {"perplexity": 2.0, "bits_per_byte": 0.25}
    )


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        ("--augment cifar", 2, "--augment: for images and recordings, and the model takes tokens"),
        ("--data-path train.idx --tokenizer t.json", 2, "--tokenizer t.json: the data are tokens already"),
        ("--data-path absent.txt", 1, "--data-path absent.txt: absent.txt does not exist"),
        ("--seq-length 900000", 1, "--data-path sample has .* tokens, and one sample is 900,000 and the next one"),
        ("--vocab-size 256", 1, "--data-path sample comes from a tokenizer of 257 tokens, .*--vocab-size to 257"),
    ],
)
def test_text_that_does_not_fit_is_refused(
    monkeypatch, capsys, cache: str, flags: str, status: int, message: str
) -> None:
    monkeypatch.setenv("MEGASNN_CACHE", cache)
    monkeypatch.setitem(MODELS, NextByte.name, NextByte)
    assert pretrain(NextByte, ["--train-iters", "1", "--global-batch-size", "8", *flags.split()]) == status
    assert re.search(message, capsys.readouterr().err)


def test_a_tokenizer_is_for_models_of_tokens(capsys) -> None:
    assert pretrain("spikformer", ["--train-iters", "1", "--tokenizer", "t.json"]) == 2
    assert "--tokenizer t.json: for text, and the model takes no tokens; remove it" in capsys.readouterr().err


def test_an_evaluation_reads_text_with_the_tokenizer_of_the_training(
    ranks, monkeypatch, capsys, cache: str, tmp_path: Path
) -> None:
    ranks(1, trained, cache, str(tmp_path / "run"), "")
    monkeypatch.setenv("MEGASNN_CACHE", cache)
    monkeypatch.setitem(MODELS, NextByte.name, NextByte)
    flags = ["--evaluate-only", "--load", str(tmp_path / "run"), *FLAGS, "--eval-iters", "1"]
    assert pretrain(NextByte, flags) == 0
    (validation, *_) = log_of(tmp_path / "run", "validation")[::-1]
    assert f"perplexity: {validation['perplexity']:.2f}" in capsys.readouterr().out

    facts = write_tokens(tmp_path / "other", ["a" * 100], ByteTokenizer())
    write_facts(tmp_path / "other.json", replace(facts, tokenizer="tokenizer.json 12"))
    for more in (["--evaluate-only"], ["--train-iters", "4"]):
        others = [*more, "--load", str(tmp_path / "run"), *FLAGS, "--data-path", str(tmp_path / "other")]
        assert pretrain(NextByte, [*others, "--valid-data-path", str(tmp_path / "other")]) == 1
        assert "tokenizer: bytes when it was saved, tokenizer.json 12 now" in capsys.readouterr().err
