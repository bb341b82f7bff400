"""Random changes: their size, that only the key decides, and that no layout alters them."""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from megasnn.augment import AUGMENTATIONS, crop_and_flip, flip_and_one_more, flip_and_roll
from megasnn.augment.images import (
    CROP_SHAPE,
    OPERATION_NAMES,
    ImageRecipe,
    RandAugment,
    flip,
    operate,
    parse_rand_augment,
    random_box,
)
from megasnn.augment.mixing import Mixing
from megasnn.common.random import keyed_numbers
from megasnn.config import DataConfig
from megasnn.data.images import ImageFormat
from tests.data.shard_files import as_events, image_file, loader, open_datasets, write_shard

events = np.random.default_rng(0).integers(1, 200, (3, 2, 24, 24)).astype(np.uint8)
events[1:] = events[0]  # all frames of a sample must change alike
noise = np.random.default_rng(0).integers(0, 256, (48, 40, 3), dtype=np.uint8)
picture = Image.fromarray(noise)
FILL = (10, 20, 30)
EVERYTHING = {"augment": "crop", "rand_augment": "rand-m9-mstd0.5-inc1", "random_erasing": 0.5}


def rolls(frames: np.ndarray) -> dict[bytes, tuple[int, ...]]:
    return {np.roll(frames, shift, (2, 3)).tobytes(): shift for shift in product(range(-5, 6), repeat=2)}


def test_events_are_flipped_and_rolled_by_up_to_five() -> None:
    plain, mirrored = rolls(events), rolls(events[..., ::-1])
    drawn = [flip_and_roll(events, 1, epoch, 5).tobytes() for epoch in range(1200)]
    assert set(drawn) <= plain.keys() | mirrored.keys() and len(set(drawn)) > 225  # of 242
    assert 0.45 < np.mean([content in mirrored for content in drawn]) < 0.55


def test_neuromorphic_augmentation_has_four_kinds_of_change() -> None:
    kinds, plain = Counter(), rolls(events) | rolls(events[..., ::-1])
    for epoch in range(800):
        frames = flip_and_one_more(events, 3, epoch, 11)
        assert frames.dtype == events.dtype and (frames == frames[:1]).all(), "all frames change alike"
        same = (frames == events) | (frames == events[..., ::-1])
        if frames.tobytes() in plain:
            kinds["roll"] += 1
        elif np.array_equal(same, frames > 0):
            assert all(np.ptp(places) < 8 for places in np.nonzero(frames[0, 0] == 0))
            kinds["cut out"] += 1
        else:
            assert set(np.unique(frames)) <= {0, *np.unique(events)}, "counts stay counts"
            kinds["turned"] += 1
    # A turn by two degrees moves no pixel of so small a frame; it counts as a roll by nothing.
    assert abs(kinds["cut out"] - 200) < 40 and 160 < kinds["roll"] < 280 and 320 < kinds["turned"] < 440


def test_crops_shift_by_up_to_four_and_mirror_half():
    square = noise[:32, :32]
    framed = np.pad(square, ((4, 4), (4, 4), (0, 0)))
    windows = {}
    for y, x in product(range(9), repeat=2):
        window = framed[y : y + 32, x : x + 32]
        windows |= {window.tobytes(): (y, x, False), window[:, ::-1].tobytes(): (y, x, True)}
    drawn = [windows[crop_and_flip(square, 1, epoch, 5).tobytes()] for epoch in range(1500)]
    assert len(set(drawn)) > 155  # of 162
    assert 0.45 < np.mean([flipped for _, _, flipped in drawn]) < 0.55
    nearer = [windows[AUGMENTATIONS["cifar2"].change(square, 1, epoch, 5).tobytes()] for epoch in range(500)]
    assert {y for y, _, _ in nearer} == {x for _, x, _ in nearer} == {2, 3, 4, 5, 6}


@pytest.mark.parametrize("name", ["dvs", "nda", "cifar"])
def test_a_sample_is_changed_by_its_key_alone(name) -> None:
    change, data = AUGMENTATIONS[name].change, noise if name == "cifar" else events
    before = data.copy()
    assert np.array_equal(change(data, 1, 2, 3), change(data, 1, 2, 3)) and np.array_equal(data, before)
    keys = (1, 2, 3), (2, 1, 3), (1, 3, 2), (3, 2, 1)
    others = {b"".join(change(data, *key[:2], key[2] + 10 * more).tobytes() for more in range(3)) for key in keys}
    assert len(others) == 4  # of three samples each: one alone may be rolled alike by chance


def test_a_random_part_has_the_area_and_shape_that_were_asked_for() -> None:
    boxes = np.array([random_box((300, 200), 0.1, 4 / 3, keyed_numbers("box", index)) for index in range(1000)])
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    assert boxes.min() >= 0 and boxes[:, 2].max() <= 300 and boxes[:, 3].max() <= 200
    share, shape = width * height / 60000, width / height
    assert 0.095 < share.min() < 0.12 and 0.85 < share.max() <= 1
    assert 0.72 < shape.min() < 0.78 and 1.3 < shape.max() < 1.4
    assert random_box((40, 40), 1, 1, keyed_numbers("box")) == (0, 0, 40, 40)
    assert random_box((90, 30), 1, 2, keyed_numbers("box")) == (15, 0, 75, 30), "the middle, where nothing else fits"


def test_a_part_is_cut_out_of_the_whole_image_and_scaled() -> None:
    ramp = np.zeros((400, 600, 3), np.uint8)
    ramp[..., 0], ramp[..., 1] = np.arange(600) // 3, np.arange(400)[:, None] // 2
    for kind, tolerance in (("PNG", 1), ("JPEG", 4)):  # a JPEG is decoded at half its size where that is enough
        format = ImageFormat(50, 3, recipe=ImageRecipe(0.3), augment=AUGMENTATIONS["crop"])
        image = flip(format.decode(image_file(ramp, kind), (1, 2, 3)), 1, 2, 3).astype(int)
        left, top, right, bottom = random_box((600, 400), 0.3, CROP_SHAPE, keyed_numbers(1, "crop", 2, 3))
        columns = left + (np.arange(50) + 0.5) / 50 * (right - left) - 0.5
        rows = top + (np.arange(50) + 0.5) / 50 * (bottom - top) - 0.5
        assert np.abs(image[..., 0] - columns / 3)[:, 2:-2].max() <= tolerance
        assert np.abs(image[..., 1] - rows[:, None] / 2)[2:-2].max() <= tolerance


SIGNS = {sign: SimpleNamespace(integers=lambda _, sign=sign: int(sign < 0)) for sign in (-1, 1)}
"""In place of a generator, for operations that draw nothing but a sign."""


def expected_operations(level: float, sign: int) -> list[Image.Image]:
    """timm's `auto_augment.py`, level by level, for its magnitudes from 0 to 10."""
    width, height = picture.size
    options = {"resample": Image.Resampling.BICUBIC, "fillcolor": FILL}
    factor = max(0.1, 1 + sign * level / 10 * 0.9)
    bits, thresh = 4 - int(level / 10 * 4), 256 - int(level / 10 * 256)
    lighter = [min(255, value + int(level / 10 * 110)) if value < 128 else value for value in range(256)]
    shear, shift = sign * level / 10 * 0.3, sign * level / 10 * 0.45

    def affine(*matrix: float) -> Image.Image:
        return picture.transform(picture.size, Image.Transform.AFFINE, matrix, **options)

    return [
        ImageOps.autocontrast(picture),
        ImageOps.equalize(picture),
        ImageOps.invert(picture),
        picture.rotate(sign * level / 10 * 30, **options),
        ImageOps.posterize(picture, bits) if bits else Image.new("RGB", picture.size),
        ImageOps.solarize(picture, thresh),
        picture.point(lighter * 3),
        *(getattr(ImageEnhance, name)(picture).enhance(factor) for name in ("Color", "Contrast", "Brightness")),
        ImageEnhance.Sharpness(picture).enhance(factor),
        affine(1, shear, 0, 0, 1, 0),
        affine(1, 0, 0, shear, 1, 0),
        affine(1, 0, shift * width, 0, 1, 0),
        affine(1, 0, 0, 0, 1, shift * height),
    ]


@pytest.mark.parametrize("sign", [-1, 1])
def test_the_operations_are_those_of_timm(sign: int) -> None:
    for level in (0.0, 2.5, 9.0, 10.0):
        for name, expected in zip(OPERATION_NAMES, expected_operations(level, sign), strict=True):
            changed = operate(name, picture, level / 10, SIGNS[sign], FILL)
            assert np.abs(np.asarray(changed).astype(int) - np.asarray(expected)).max() <= 1, name


def test_names_of_variants() -> None:
    assert parse_rand_augment("rand-m9-mstd0.5-inc1") == RandAugment(9, 2, 0.5)
    assert parse_rand_augment("rand-m9-n1-mstd0.4-inc1", "rotate, color") == RandAugment(9, 1, 0.4, ("rotate", "color"))
    for wrong in ("", "m9", "rand-m9", "rand-m9-w0-inc1", "rand-m-9-inc1", "rand-m9-n0-inc1", "rand-m1e3-inc1"):
        with pytest.raises(ValueError, match="--rand-augment"):
            parse_rand_augment(wrong)


def test_choice_magnitude_and_chance_of_operations() -> None:
    def drawn(variant: RandAugment, count: int) -> list[Image.Image]:
        return [variant(picture, keyed_numbers("ops", index), FILL) for index in range(count)]

    for name in ("invert", "translate-y", "sharpness"):
        expected = np.asarray(operate(name, picture, 0.9, SIGNS[-1], FILL))
        found = drawn(parse_rand_augment("rand-m9-n1-inc1", name), 30)
        assert any(np.array_equal(np.asarray(each), expected) for each in found), name
        assert len({each.tobytes() for each in found}) <= 3, name
    assert 70 < sum(each is picture for each in drawn(parse_rand_augment("rand-m9-n1-inc1"), 200)) < 130
    moved = [each for each in drawn(parse_rand_augment("rand-m5-n1-mstd1-inc1", "translate-y"), 800) if each != picture]
    shifts = [(np.asarray(each) == FILL).all((1, 2)).sum() / (0.45 * 48) * 10 for each in moved]
    assert abs(np.mean(shifts) - 5) < 0.4 and 0.7 < np.std(shifts) < 1.3, "normal about m, of deviation mstd"


def test_an_erased_rectangle_is_zero_once_normalised_and_drawn_by_a_key_of_its_own() -> None:
    format = ImageFormat(48, 3, "imagenet", recipe=ImageRecipe(erasing=0.6))
    white = np.full((48, 48, 3), 255, np.uint8)
    file = image_file(white)
    results = [format.decode(file, (1, 0, sample)) for sample in range(300)]
    erased = [each for each in results if not np.array_equal(each, white)]
    assert 0.5 < len(erased) / 300 < 0.7
    plain, *tensors = format.batch([white, *erased]).transpose(0, 2, 3, 1)
    holes = [tensor[(tensor != plain).all(-1)] for tensor in tensors]
    shares = np.array([len(hole) / 48**2 for hole in holes])
    assert 0.015 < shares.min() < 0.05 and 0.28 < shares.max() < 0.35
    assert max(np.abs(hole).max() for hole in holes) < 1e-5
    # Another change before it leaves it where it is: equalising leaves white as it is.
    both = replace(format, recipe=replace(format.recipe, rand_augment=parse_rand_augment("rand-m9-inc1", "equalize")))
    for sample in range(20):
        assert np.array_equal(both.decode(file, (1, 0, sample)), results[sample])


@pytest.mark.parametrize("changes", [EVERYTHING, {"augment": "nda"}])
def test_ranks_workers_and_resuming_do_not_alter_it(tmp_path, changes) -> None:
    random, of_events = np.random.default_rng(1), changes["augment"] == "nda"
    pictures = {f"s{n}": random.integers(0, 256, (40 + n, 60, 3), dtype=np.uint8) for n in range(12)}
    files = {key: {"jpg": image_file(each, "JPEG"), "cls": b"0"} for key, each in pictures.items()}
    shard = write_shard(tmp_path / "a.tar", as_events(range(12), sensor=(16, 16)) if of_events else files)
    shape = (3, 2, 16, 16) if of_events else (3, 16, 16)
    dataset = open_datasets(DataConfig(data_path=str(shard), **changes), shape, 3).train
    assert pickle.dumps(pickle.loads(pickle.dumps(dataset.format))) == pickle.dumps(dataset.format)

    def batches(dp_size: int, consumed: int, limit: int, **options) -> torch.Tensor:
        options["dp_size"] = dp_size
        ranks = [loader(dataset, dp_rank=rank, **options).batches(consumed, limit) for rank in range(dp_size)]
        found = [batch for parts in zip(*ranks, strict=True) for batch in parts]
        return torch.cat([part.inputs for batch in found for part in batch.micro_batches])

    everything = batches(1, 0, 4)
    assert torch.equal(batches(2, 0, 4, num_workers=2), everything)
    assert torch.equal(batches(1, 20, 2, num_workers=1), everything[20:])
    in_file_order = batches(1, 0, 4, shuffle=False)
    assert not torch.equal(batches(1, 0, 4, seed=8, shuffle=False), in_file_order)
    assert not torch.equal(in_file_order[:12], in_file_order[12:24]), "the next epoch changes a sample anew"
    assert not torch.equal(batches(1, 0, 1, training=False), batches(1, 0, 1, shuffle=False))


BOTH = Mixing(seed=1, mixup_alpha=0.5, cutmix_alpha=1.0, classes=7, size=(12, 16))
MIXUP, CUTMIX = replace(BOTH, cutmix_alpha=None), replace(BOTH, mixup_alpha=None)
pictures = torch.randn(7, 3, 12, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
labels = torch.arange(7)


def test_mixing_follows_from_seed_and_position_and_ends_at_its_epoch() -> None:
    for first in range(0, 300, 7):
        partners = BOTH.plan(first, 7).partners
        assert sorted(partners) == list(range(7)) and all(own != other for own, other in enumerate(partners))
    assert BOTH.plan(0, 1).partners == [0], "alone in the last micro-batch of an epoch"
    assert BOTH.plan(14, 7) == replace(BOTH).plan(14, 7)
    assert BOTH.plan(14, 7) != BOTH.plan(21, 7) and BOTH.plan(14, 7) != replace(BOTH, seed=2).plan(14, 7)
    mixing = replace(BOTH, until=100)
    assert mixing.plan(99, 7) is not None and mixing.plan(100, 7) is None and mixing.images(pictures, 100) is pictures
    assert torch.equal(mixing.labels(labels.view(-1, 1), 100), torch.eye(7, dtype=torch.float64))


def test_mixup_and_cutmix_take_turns_and_draw_their_shares() -> None:
    plans = [BOTH.plan(first, 4) for first in range(2000)]
    mixed, cut = [p for p in plans if p.box is None], [p for p in plans if p.box is not None]
    assert 900 < len(mixed) < 1100
    assert np.var([p.share for p in mixed]) == pytest.approx(1 / 8, rel=0.1), "of the beta distribution of 0.5"
    for plan in cut:
        rows, columns = plan.box
        assert 0 <= rows.start <= rows.stop <= 12 and 0 <= columns.start <= columns.stop <= 16
        assert plan.share == 1 - (rows.stop - rows.start) * (columns.stop - columns.start) / (12 * 16)
    assert all(MIXUP.plan(first, 4).box is None and CUTMIX.plan(first, 4).box is not None for first in range(50))


@pytest.mark.parametrize("mixing", [MIXUP, CUTMIX])
def test_labels_tell_how_much_of_whom_is_in_an_image(mixing: Mixing) -> None:
    for first in range(20):
        plan, mixed, wanted = mixing.plan(first, 7), mixing.images(pictures, first), mixing.labels(labels, first)
        for own, other in enumerate(plan.partners):
            if plan.box is None:
                expected = plan.share * pictures[own] + (1 - plan.share) * pictures[other]
            else:
                expected = pictures[own].clone()
                expected[(slice(None), *plan.box)] = pictures[other][(slice(None), *plan.box)]
                taken = (mixed[own] == pictures[other]).double().mean().item()
                assert wanted[own, other].item() == pytest.approx(taken)
            torch.testing.assert_close(mixed[own], expected)
            assert wanted[own, own].item() == pytest.approx(plan.share) and wanted[own].sum().item() == pytest.approx(1)
