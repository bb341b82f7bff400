"""Random changes of event frames: which ones, how large, and that all frames of a sample change alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megasnn.augment import AUGMENTATIONS, flip_and_one_more, flip_and_roll
from megasnn.config import DataConfig
from megasnn.data import open_datasets
from tests.data.shard_files import loader, write_shard
from tests.data.test_events import as_events

noise = np.random.default_rng(0).integers(1, 200, (3, 2, 24, 24)).astype(np.uint8)
noise[1:] = noise[0]  # what is done to one frame must be done to all


def rolls(frames: np.ndarray) -> dict[bytes, tuple[int, int]]:
    shifts = [(y, x) for y in range(-5, 6) for x in range(-5, 6)]
    return {np.roll(frames, shift, (2, 3)).tobytes(): shift for shift in shifts}


def test_the_usual_recipe_flips_half_and_rolls_by_up_to_five() -> None:
    plain, mirrored = rolls(noise), rolls(noise[..., ::-1])
    drawn = [flip_and_roll(noise, 1, epoch, 5).tobytes() for epoch in range(1200)]
    assert all(content in plain or content in mirrored for content in drawn)
    assert 0.45 < np.mean([content in mirrored for content in drawn]) < 0.55
    assert len(set(drawn)) > 225  # of 242


def test_rolls_for_what_a_mirror_changes_go_up_to_two() -> None:
    shifts = rolls(noise)
    drawn = {shifts[AUGMENTATIONS["roll"](noise, 1, epoch, 5).tobytes()] for epoch in range(300)}
    assert drawn == {(y, x) for y in range(-2, 3) for x in range(-2, 3)}


def test_neuromorphic_augmentation_has_four_kinds_of_change() -> None:
    kinds = {"roll": 0, "cut out": 0, "turned": 0}
    plain = rolls(noise) | rolls(noise[..., ::-1])
    for epoch in range(800):
        frames = flip_and_one_more(noise, 3, epoch, 11)
        assert frames.shape == noise.shape and frames.dtype == noise.dtype
        assert (frames == frames[:1]).all(), "all frames change alike"
        same = (frames == noise) | (frames == noise[..., ::-1])
        if frames.tobytes() in plain:
            kinds["roll"] += 1
        elif np.array_equal(same, frames > 0):
            rows, columns = np.nonzero(frames[0, 0] == 0)
            assert np.ptp(rows) < 8 and np.ptp(columns) < 8
            kinds["cut out"] += 1
        else:
            assert set(np.unique(frames)) <= {0, *np.unique(noise)}, "counts stay counts"
            kinds["turned"] += 1
    assert abs(kinds["cut out"] - 200) < 40
    # A turn by two degrees moves no pixel of so small a frame; it counts as a roll by nothing.
    assert 160 < kinds["roll"] < 280 and 320 < kinds["turned"] < 440


def test_rotations_and_shears_go_up_to_thirty_degrees() -> None:
    """A point 10 right of the middle: rotations turn it on its circle, shears along x leave it where it is; one 10
    below: shears take it along its row."""
    angles, slopes = [], []
    for epoch in range(600):
        right = np.zeros((1, 2, 41, 41), np.uint8)
        right[..., 19:22, 29:32], below = 1, np.zeros((1, 2, 41, 41), np.uint8)
        below[..., 29:32, 19:22] = 1
        (y, x), (v, u) = (middle(flip_and_one_more(frames, 0, epoch, 0)) for frames in (right, below))
        if np.hypot(y, x) > 9 and abs(abs(x) - 10) > 0.3 or abs(y) > 0.5:
            if abs(np.hypot(y, x) - 10) < 0.5 and abs(np.hypot(v, u) - 10) < 0.5:
                angles.append(np.degrees(np.arctan2(y, abs(x))))
        elif abs(v - 10) < 0.4 and abs(u) > 0.5 and abs(y) < 0.2 and abs(abs(x) - 10) < 0.2:
            slopes.append(np.degrees(np.arctan2(u, v)))
    assert len(angles) > 80 and 27 < max(angles) < 32 and -32 < min(angles) < -27
    assert len(slopes) > 80 and 27 < max(slopes) < 32 and -32 < min(slopes) < -27


def middle(frames: np.ndarray) -> np.ndarray:
    """(down, right) of the middle of what is not zero, from the middle of the frame."""
    places = np.argwhere(frames[0, 0])
    return places.mean(0) - (frames.shape[-1] - 1) / 2 if len(places) else np.zeros(2)


@pytest.mark.parametrize("name", ["dvs", "nda", "roll"])
def test_a_sample_is_changed_by_its_key_alone(name) -> None:
    change = AUGMENTATIONS[name]
    before = noise.copy()
    assert np.array_equal(change(noise, 1, 2, 3), change(noise, 1, 2, 3))
    assert np.array_equal(noise, before)
    keys = (1, 2, 3), (2, 1, 3), (1, 3, 2), (3, 2, 1)
    others = {b"".join(change(noise, *key[:2], key[2] + 10 * more).tobytes() for more in range(3)) for key in keys}
    assert len(others) == 4  # of three samples each: one alone may be rolled alike by chance


@pytest.mark.parametrize("augment", ["dvs", "nda", "roll"])
def test_ranks_workers_and_resuming_do_not_alter_it(tmp_path, augment) -> None:
    shard = write_shard(tmp_path / "a.tar", as_events(range(12), sensor=(16, 16)))
    dataset = open_datasets(DataConfig(data_path=str(shard)), (3, 2, 16, 16), 3).train

    def frames(dp_size: int, consumed: int, limit: int, **changes) -> torch.Tensor:
        options = {"augment": augment, "dp_size": dp_size, **changes}
        ranks = [loader(dataset, dp_rank=rank, **options).batches(consumed, limit) for rank in range(dp_size)]
        batches = [batch for parts in zip(*ranks, strict=True) for batch in parts]
        return torch.cat([part.images for batch in batches for part in batch.micro_batches])

    whole = frames(1, 0, 4)
    assert torch.equal(frames(4, 0, 4, num_workers=3), whole)
    assert torch.equal(frames(2, 20, 2, num_workers=1), whole[20:])
    assert not torch.equal(frames(1, 0, 4, augment="none"), whole)
    assert not torch.equal(frames(1, 0, 1, training=False), frames(1, 0, 1, shuffle=False))
