"""What one layout saves, every other loads: bit for bit, optimizer state included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megasnn.checkpoint import load_checkpoint, load_global_tensors, save_checkpoint
from megasnn.checkpoint.optimizer_state import PREFIX
from tests.checkpoint.fake_model import CONFIG, Layout, Rank, known, wrong

LAYOUTS = [
    Layout(),
    Layout(tensor=2),
    Layout(tensor=4),
    Layout(data=2),
    Layout(tensor=2, data=2),
    Layout(pipeline=2),
    Layout(tensor=2, pipeline=2),
]
EXTRA = {"schedule": {"lr": 0.25}, "epoch": 3}


def save_known(layout: Layout, folder: Path) -> None:
    rank = Rank(layout)
    rank.fill()
    save_checkpoint(
        folder,
        iteration=100,
        consumed_samples=6400,
        tensors=rank.tensors,
        optimizer=rank.optimizer,
        extra=EXTRA,
        config=CONFIG,
        layout={"tensor": layout.tensor},
        process_group=rank.group,
    )


def load_all(layout: Layout, folders: list[Path]) -> list[list[str]]:
    wrong_names = []
    for folder in folders:
        rank = Rank(layout, seed=1)
        state = load_checkpoint(
            folder,
            tensors=rank.tensors,
            optimizer=rank.optimizer,
            config=CONFIG,
            process_group=rank.group,
        )
        assert (state.iteration, state.consumed_samples, state.extra) == (100, 6400, EXTRA)
        wrong_names.append(wrong(rank))
    return wrong_names


@pytest.fixture(scope="module")
def folders(ranks, tmp_path_factory) -> list[Path]:
    root = tmp_path_factory.mktemp("layouts")
    paths = [root / f"{index}" for index in range(len(LAYOUTS))]
    for layout, path in zip(LAYOUTS, paths, strict=True):
        ranks(layout.world_size, save_known, layout, path)
    return paths


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_loads_what_every_layout_saved(ranks, folders, layout):
    for wrong_of_rank in ranks(layout.world_size, load_all, layout, folders):
        assert wrong_of_rank == [[]] * len(LAYOUTS)


def test_global_tensors_are_the_same_whoever_saved_them(folders):
    for folder in folders:
        tensors = load_global_tensors(folder, with_optimizer=True)
        assert len(tensors) == 11 + 3 * 9
        for name, tensor in tensors.items():
            assert torch.equal(tensor.double(), known(name, tuple(tensor.shape))), name


def test_global_tensors_leave_the_optimizer_aside_and_go_by_prefix(folders):
    assert not [name for name in load_global_tensors(folders[0]) if name.startswith(PREFIX)]
    assert set(load_global_tensors(folders[2], 100, prefix="head.")) == {"head.weight", "head.bias"}


def test_only_the_writing_replica_leaves_files(folders):
    for layout, folder in zip(LAYOUTS, folders, strict=True):
        data = list((folder / "iter_0000100").glob("*.distcp"))
        assert len(data) == layout.tensor * layout.pipeline
        assert all(file.stat().st_size for file in data)


def test_metadata_is_readable(folders):
    metadata = json.loads((folders[6] / "iter_0000100" / "metadata.json").read_text())
    assert metadata["config"] == CONFIG
    assert metadata["layout"] == {"tensor": 2}
    assert (metadata["iteration"], metadata["consumed_samples"]) == (100, 6400)
    assert metadata["optimizer"] == "AdamW"
    assert metadata["versions"]["torch"] == torch.__version__
    assert metadata["tensors"]["blocks.0.qkv"] == {"shape": [48, 16, 1], "dtype": "float32"}
    assert metadata["tensors"]["stem.batches"] == {"shape": [], "dtype": "int64"}


def load_without_initialised_torch_distributed(folder: Path) -> list[str]:
    rank = Rank(Layout(), seed=1)
    load_checkpoint(folder, tensors=rank.tensors, optimizer=rank.optimizer, config=CONFIG)
    return wrong(rank)


def test_a_process_on_its_own_saves_and_loads(folders, tmp_path):
    save_known(Layout(), tmp_path)
    for folder in (tmp_path, folders[2]):
        assert load_without_initialised_torch_distributed(folder) == []
