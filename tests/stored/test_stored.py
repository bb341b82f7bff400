"""Files that earlier commits wrote still load: checkpoints, config.json, index.json, costs files.

Each folder beside this file has the name of the commit that wrote its files, on two ranks with tensor parallel 2:

    preprocess_data.py image-folder --input images --output shards      # 2 x 6 images of 8 x 8 pixels
    torchrun --nproc-per-node 2 pretrain_spikformer.py --embed-dim 16 --depth 1 --num-heads 2 --patch-size 4
        --image-size 8 --num-classes 2 --time-steps 2 --data-path "shards/train-*.tar"
        --valid-data-path "shards/val-*.tar" --train-iters 4 --exit-interval 2 --global-batch-size 4
        --micro-batch-size 2 --save checkpoints --ema-decay 0.9 --eval-interval 2 --keep-best
        --tensor-model-parallel-size 2 --lr-decay-style constant
    plan.py spikformer (the same model and sizes) --gpus 2 --memory 1GB --costs costs.json

`tensors.json` has type, shape and digest of every tensor, as that commit read them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

import megasnn
from megasnn.commands import plan
from megasnn.config.cli import parse
from megasnn.data.shards import open_shard
from megasnn.models.model import run_config
from megasnn.models.registry import MODELS
from megasnn.pretraining import pretrain

FOLDERS = sorted(path for path in Path(__file__).parent.iterdir() if (path / "checkpoints").is_dir())


@pytest.fixture(params=FOLDERS, ids=lambda path: path.name)
def stored(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the files of a commit, as the current folder."""
    copy = tmp_path / "stored"
    shutil.copytree(request.param, copy)
    monkeypatch.chdir(copy)
    return copy


def test_a_checkpoint_has_the_tensors_that_were_saved(stored: Path) -> None:
    tensors = megasnn.load_global_tensors(stored / "checkpoints")
    found = {}
    for name, value in tensors.items():
        digest = hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()[:16]
        found[name] = [str(value.dtype).removeprefix("torch."), list(value.shape), digest]
    assert found == json.loads((stored / "tensors.json").read_text())


def test_a_run_goes_on_from_it_on_another_layout_with_its_flags(stored: Path, capsys: pytest.CaptureFixture) -> None:
    flags = (
        "--data-path shards/train-*.tar --valid-data-path shards/val-*.tar --train-iters 4 --global-batch-size 4 "
        "--micro-batch-size 2 --num-workers 0 --load checkpoints --save new --ema-decay 0.9 --log-interval 1 "
        "--eval-interval 2 --lr-decay-style constant"
    )
    assert pretrain("spikformer", flags.split()) == 0
    assert "continuing at iteration 2, 8 samples consumed" in capsys.readouterr().out
    lines = [json.loads(line) for line in Path("new/log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "iteration"]
    # As the commit itself went on, on one rank in float32.
    assert losses == pytest.approx([0.6875, 0.6902], abs=1e-4)


def test_the_configuration_of_a_run_is_taken_by_config(stored: Path) -> None:
    config = parse(run_config(MODELS["spikformer"]), ["--config", "checkpoints/config.json"])
    assert (config.model.embed_dim, config.model.depth, config.model.image_size) == (16, 1, 8)
    assert config.training.global_batch_size == 4
    assert config.optimizer.ema_decay == 0.9
    assert config.parallel.tensor_model_parallel_size == 2
    assert config.checkpoint.keep_best


def test_an_index_of_shards_is_read(stored: Path) -> None:
    shard = open_shard(stored / "shards" / "train-00000.tar")
    assert shard.members.keys == ["cat_0", "cat_1", "cat_2", "dog_0", "dog_1", "dog_2"]
    assert shard.members.labels == [0, 0, 0, 1, 1, 1]


def test_a_costs_file_is_planned_from(stored: Path, capsys: pytest.CaptureFixture) -> None:
    before = (stored / "costs.json").read_bytes()
    flags = (
        "spikformer --embed-dim 16 --depth 1 --num-heads 2 --patch-size 4 --image-size 8 --num-classes 2 "
        "--time-steps 2 --gpus 2 --global-batch-size 4 --micro-batch-size 2 --memory 2GB --costs costs.json"
    )
    assert plan.main(flags.split()) in (0, None)
    assert "spikformer: 8 layers, 7,356 parameters" in capsys.readouterr().out
    assert (stored / "costs.json").read_bytes() == before
