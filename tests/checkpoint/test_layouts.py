"""What one layout saves, every other loads: bit for bit; a loaded optimizer goes on as the saved one would have."""

from __future__ import annotations

import json
import os
import random
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megasnn.checkpoint.format import OPTIMIZER, Progress, SavedTensor, covers_once
from megasnn.checkpoint.load import load_checkpoint, load_global_tensors
from megasnn.checkpoint.optimizer_state import allocate
from megasnn.checkpoint.save import save_checkpoint
from megasnn.common.grid import Coordinates, Grid
from megasnn.layers.tensors import sharded_tensors
from tests.checkpoint.fake_model import CONFIG, Rank, known, layer, wrong

LAYOUTS = [
    *(Grid(), Grid(tp=2), Grid(tp=4), Grid(dp_replicate=2)),
    *(Grid(tp=2, dp_replicate=2), Grid(pp=2), Grid(tp=2, pp=2)),
]
EXTRA = {"schedule": {"lr": 0.25}, "epoch": 3}


def save_known(layout: Grid, folder: Path) -> None:
    rank = Rank(layout)
    rank.fill()
    progress = Progress(100, 6400, "fake", CONFIG, {"tensor": layout.tp}, EXTRA)
    save_checkpoint(folder, progress, rank.state, rank.group)


def load_all(layout: Grid, folders: list[Path]) -> list[list[str]]:
    wrong_names = []
    for folder in folders:
        rank = Rank(layout, seed=1)
        loaded = load_checkpoint(folder, rank.state, process_group=rank.group)
        assert (loaded.iteration, loaded.consumed_samples, loaded.extra) == (100, 6400, EXTRA)
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
    assert not [name for name in load_global_tensors(folders[0]) if name.startswith(OPTIMIZER)]
    for layout, folder in zip(LAYOUTS, folders, strict=True):  # one replica writes
        assert len(list((folder / "iter_0000100").glob("*.safetensors"))) == layout.tp * layout.pp


def test_the_description_is_readable_and_the_files_are_any_safetensors(folders):
    path = folders[0] / "iter_0000100"
    metadata = json.loads((path / "metadata.json").read_text())
    assert (metadata["model"], metadata["config"], metadata["optimizer"]) == ("fake", CONFIG, "AdamW")
    told = metadata["tensors"]["blocks.0.qkv"]
    assert (told["shape"], told["dtype"], told["boxes"][0]["sizes"]) == ([48, 16, 1], "float32", [48, 16, 1])
    theirs, ours = load_file(path / told["boxes"][0]["file"]), load_global_tensors(folders[0], with_optimizer=True)
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in ours)


def test_a_folder_whose_name_is_not_utf8(tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    save_known(Grid(), folder)
    assert load_all(Grid(), [folder]) == [[]]


def test_boxes_of_numbers_and_of_nothing():
    assert covers_once((), [((), ())]) and covers_once((0, 3), []) and not covers_once((), [((), ()), ((), ())])


def test_boxes_hold_each_element_once():
    """Cut at a place in each dimension; half of the time a box is moved to where it may lie on others."""
    draw, found = random.Random(0), []
    for _ in range(400):
        shape = tuple(draw.randint(2, 6) for _ in range(draw.randint(1, 4)))
        at = [draw.randint(0, length) for length in shape]
        parts = [
            ((0, coordinates), (coordinates, length - coordinates))
            for coordinates, length in zip(at, shape, strict=True)
        ]
        boxes = [tuple(zip(*box, strict=True)) for box in product(*parts)]
        if draw.random() < 0.5:
            number = draw.randrange(len(boxes))
            sizes = boxes[number][1]
            boxes[number] = tuple(draw.randint(0, n - size) for n, size in zip(shape, sizes, strict=True)), sizes
        held = np.zeros(shape, int)
        for offsets, sizes in boxes:
            held[tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))] += 1
        found.append(covers_once(shape, boxes))
        assert found[-1] == bool((held == 1).all()), (shape, boxes)
    assert 100 < sum(found) < 390


OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1),
    "AdamW amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "SGD momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def saved(rank: Rank, folder) -> None:
    save_checkpoint(folder, Progress(1), rank.state)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_goes_on_bit_for_bit(tmp_path, kind, steps_before):
    first, second = Rank(), Rank(seed=1)
    for rank in (first, second):
        rank.optimizer = OPTIMIZERS[kind](rank.parameters())
    for _ in range(steps_before):
        first.step()
    saved(first, tmp_path)
    second.step()  # state of its own, which must be replaced
    load_checkpoint(tmp_path, second.state)
    for rank in (first, second):
        rank.step()
    before, after = first.snapshot(), second.snapshot()
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


def test_a_frozen_parameter_has_no_state(tmp_path):
    rank, other = Rank(), Rank(seed=1)
    for parameter in rank.parameters()[1:]:
        parameter.grad = torch.ones_like(parameter)
    rank.optimizer.step()
    saved(rank, tmp_path)
    other.step()
    load_checkpoint(tmp_path, other.state)
    assert other.optimizer.state[other.parameters()[0]] == {}
    assert set(other.optimizer.state[other.parameters()[1]]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize(("capturable", "device"), [(False, "cpu"), (True, "meta")])
def test_the_step_count_lies_where_the_optimizer_looks_for_it(capturable, device):
    """The meta device stands for an accelerator: nothing is computed here."""
    tensors = list(sharded_tensors([("stem", layer("stem", Coordinates()))]))
    optimizer = torch.optim.AdamW([tensors[0].tensor], capturable=capturable)
    saved = {
        "stem.weight": SavedTensor((8, 3, 3, 3), "float32", ()),
        "optimizer.step.stem.weight": SavedTensor((), "float32", ()),
        "optimizer.exp_avg.stem.weight": SavedTensor((8, 3, 3, 3), "float32", ()),
        "optimizer.exp_avg_sq.stem.weight": SavedTensor((8, 3, 3, 3), "float32", ()),
    }
    state = allocate(tensors, optimizer, saved)[tensors[0].tensor]
    assert (state["step"].device.type, state["exp_avg"].device.type) == (device, "meta")
