"""The example that compares a spiking with a dense language model: its dense model, its text, and its table."""

from __future__ import annotations

import io
import runpy
import sys
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from examples.language_record.dense import DenseLM
from examples.language_record.run import Cost, split, table
from megasnn import Engine
from megasnn.models.registry import MODELS
from megasnn.models.spike_lm.model import SpikeLM
from tests import parts
from tests.parity import spike_lm as plain
from tests.parity.ranks import TOLERANCE, error
from tests.parity.test_spike_lm import text
from tests.training.runs import log_of, train_model, without_trial

EXAMPLE = Path(__file__).parents[2] / "examples" / "language_record" / "dense.py"
SIZES = {"embed_dim": 16, "depth": 2, "num_heads": 4, "seq_length": 12}
STEPS = 2


def plain_losses(weights: dict[str, Tensor], tokens: Tensor, targets: Tensor) -> Tensor:
    """Each sample's mean cross-entropy of the dense decoder in plain PyTorch, `[N]`."""
    heads = SpikeLM(**SIZES)

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"])

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"].squeeze(-1), weights[f"{name}.bias"])

    x = F.embedding(tokens, weights["embedding.weight"]).unsqueeze(0)
    for block in range(SIZES["depth"]):
        name = f"blocks.{block}.attention"
        attended = plain.attention(linear(f"{name}.qkv", norm(f"{name}.norm", x)), heads)
        x = x + linear(f"{name}.projection", attended)
        name = f"blocks.{block}.mlp"
        x = x + linear(f"{name}.fc2", F.gelu(linear(f"{name}.fc1", norm(f"{name}.norm", x))))
    logits = F.linear(norm("norm", x), weights["head.weight"])[0]
    return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(1)


def test_the_dense_model_is_plain_pytorch() -> None:
    tokens, targets = text()
    flags = {"micro_batch_size": 3, "global_batch_size": len(tokens), "precision": "fp64", "clip_grad": 0.0}
    with Engine(DenseLM(**SIZES), **flags, lr=1e-2, train_iters=1) as engine:
        weights = {name: value.requires_grad_() for name, value in engine.state_dict().items()}
        result = engine.train_step(tokens, targets)
        gradients = parts.assemble([parts.gradients(engine.distributed.owned)])
    loss = plain_losses(weights, tokens, targets).mean()
    loss.backward()
    assert result.loss == pytest.approx(loss.item(), rel=1e-12)
    assert gradients.keys() == weights.keys()
    for name, weight in weights.items():
        assert weight.grad is not None, name
        assert error(gradients[name], weight.grad) < 1e-12 or weight.grad.abs().max() < 1e-15, name


def step_losses(**flags: Any) -> list[float]:
    """Losses of three steps of the dense model."""
    tokens, targets = text()
    options = {"micro_batch_size": 3, "global_batch_size": len(tokens), "precision": "fp64", "lr": 1e-2} | flags
    with Engine(DenseLM(**SIZES), **options, train_iters=3) as engine:
        return [engine.train_step(tokens, targets).loss for _ in range(3)]


@pytest.mark.parametrize(
    "flags",
    [
        {"tensor_model_parallel_size": 2},
        {"context_parallel_size": 2, "context_parallel_cut": "tokens"},
        {"pipeline_model_parallel_size": 2},
    ],
    ids=["tp2", "cp2 tokens", "pp2"],
)
def test_the_dense_model_is_cut_like_any_other(ranks, flags: dict[str, Any]) -> None:
    for losses in ranks(2, partial(step_losses, **flags)):
        assert losses == pytest.approx(step_losses(), rel=TOLERANCE)


def test_the_dense_model_has_the_tensors_of_the_spiking_one() -> None:
    shapes = []
    for model in (DenseLM(**SIZES), SpikeLM(**SIZES, time_steps=STEPS)):
        with Engine(model, micro_batch_size=1, global_batch_size=1, lr=1e-2, train_iters=1) as engine:
            shapes.append({name: value.shape for name, value in engine.state_dict().items()})
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [({"time_steps": 2}, "--time-steps 2: a dense model"), ({"num_heads": 3}, "--embed-dim 16 must be a multiple")],
)
def test_other_dimensions_are_refused(sizes: dict[str, int], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Engine(DenseLM(**SIZES | sizes), micro_batch_size=1, global_batch_size=1, lr=1e-2, train_iters=1)


def test_every_twentieth_file_is_for_validation(tmp_path: Path) -> None:
    archive = tmp_path / "texts.tar.gz"
    with tarfile.open(archive, "w:gz") as files:
        # Not in the order of their names; two files are no text of the documentation.
        for name in [*(f"a/docs/{number:02d}.txt" for number in reversed(range(40))), "a/b.txt", "a/docs/c.png"]:
            content = name.encode()
            member = tarfile.TarInfo(name)
            member.size = len(content)
            files.addfile(member, io.BytesIO(content))
    split(archive, tmp_path / "texts")
    held_out = [path.read_text() for path in sorted((tmp_path / "texts" / "val").iterdir())]
    assert held_out == ["a/docs/19.txt", "a/docs/39.txt"]
    assert len([*(tmp_path / "texts" / "train").iterdir()]) == 38


def test_the_table_has_what_the_runs_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = (
        "--embed-dim 16 --depth 1 --num-heads 2 --seq-length 32 --micro-batch-size 2 --global-batch-size 2 "
        "--train-iters 2 --lr 1e-2 --eval-iters 2 --num-workers 0 --save"
    ).split()
    monkeypatch.setenv("MEGASNN_CACHE", str(tmp_path / "cache"))
    train_model("spike_lm", ["--time-steps", str(STEPS), *flags, str(tmp_path / "spiking")])
    monkeypatch.setattr(sys, "argv", ["dense.py", *flags, str(tmp_path / "dense")])
    # The script adds its class to the table, and other tests see the table as it was.
    monkeypatch.setitem(MODELS, DenseLM.name, DenseLM)
    monkeypatch.delitem(MODELS, DenseLM.name)
    with without_trial(), pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert not ended.value.code

    lines = table(tmp_path, {"spiking": Cost(1.0, 2.0), "dense": Cost(3.0, 4.0)}).splitlines()
    rows = {cells[1].strip(): [cell.strip() for cell in cells[2:4]] for line in lines if (cells := line.split("|"))}
    assert rows["tokens of training"] == ["128", "128"]
    assert rows["processor minutes"] == ["2.0", "4.0"]
    (spiking,) = log_of(tmp_path / "spiking", "validation")
    (of_dense,) = log_of(tmp_path / "dense", "validation")
    for column, line in enumerate([spiking, of_dense]):
        assert rows["**bits per byte, validation**"][column] == f"**{line['bits_per_byte']:.3f}**"
    # Every input of a dense product is used: 12 x 16 x 16 multiply-adds a token, and 16 x 257 of the output layer.
    assert rows["Effective MACs, a token"][1] == rows["Synaptic operations, Dense, a token"][1] == "7,184"
    # Of a spiking block, two products have dense inputs, 5 x 16 x 16. The other two, 7 x 16 x 16, skip zeros.
    assert rows["Effective MACs, a token"][0] == f"{STEPS * 5 * 256 + 16 * 257:,}"
    assert rows["Synaptic operations, Dense, a token"][0] == f"{STEPS * 12 * 256 + 16 * 257:,}"
    sparsity = float(rows["Activation sparsity of the neurons"][0])
    layers = spiking["layers"]
    fired = layers["blocks.0.attention.qkv"]["acs"] / 48 + layers["blocks.0.mlp.fc1"]["acs"] / 64
    assert sparsity == pytest.approx(1 - fired / (2 * STEPS * 32 * 16), abs=1e-3)
    assert 0.1 < sparsity < 0.9
    assert rows["Activation sparsity of the neurons"][1] == "no neurons"
