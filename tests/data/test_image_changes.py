"""Random changes of images as timm makes them: which there are, how large, and that only the key decides."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from megasnn.augment.images import ImageRecipe, erase, jitter, random_box
from megasnn.augment.rand_augment import _INCREASING, _ORIGINAL, RandAugment, parse_rand_augment
from megasnn.config import DataConfig
from megasnn.data import open_datasets
from megasnn.data.images import NORMALISATIONS, ImageFormat
from megasnn.random import Draws
from tests.data.shard_files import image_file, loader, write_shard

noise = np.random.default_rng(0).integers(0, 256, (48, 40, 3), dtype=np.uint8)
picture = Image.fromarray(noise)
FILL = (10, 20, 30)
EVERYTHING = {"augment": "crop", "rand_augment": "rand-m9-mstd0.5-inc1", "random_erasing": 0.5}


def test_a_random_part_has_the_area_and_shape_that_were_asked_for() -> None:
    boxes = np.array([random_box((300, 200), 0.1, 4 / 3, Draws("box", index)) for index in range(1000)])
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    assert boxes.min() >= 0 and boxes[:, 2].max() <= 300 and boxes[:, 3].max() <= 200
    share, shape = width * height / 60000, width / height
    assert 0.095 < share.min() < 0.12 and 0.85 < share.max() <= 1
    assert 0.72 < shape.min() < 0.78 and 1.3 < shape.max() < 1.4
    assert boxes[:, 0].min() == 0 and boxes[:, 2].max() == 300
    assert random_box((40, 40), 1, 1, Draws("box")) == (0, 0, 40, 40)
    assert random_box((90, 30), 1, 2, Draws("box")) == (15, 0, 75, 30), "the middle, where nothing else fits"


def test_a_part_is_cut_out_of_the_whole_image_and_scaled() -> None:
    ramp = np.zeros((400, 600, 3), np.uint8)
    ramp[..., 0], ramp[..., 1] = np.arange(600) // 3, np.arange(400)[:, None] // 2
    for kind, tolerance in (("PNG", 1), ("JPEG", 4)):  # a JPEG is decoded at half its size where that is enough
        format = ImageFormat(50, 3, recipe=ImageRecipe(0.3, 1.2))
        augmentation = format.augmentation("crop")
        image = augmentation.decoder(1, 2, 3)(image_file(ramp, kind)).astype(int)
        left, top, right, bottom = format.recipe.box((600, 400), 1, 2, 3)
        columns = left + (np.arange(50) + 0.5) / 50 * (right - left) - 0.5
        rows = top + (np.arange(50) + 0.5) / 50 * (bottom - top) - 0.5
        assert np.abs(image[..., 0] - columns / 3)[:, 2:-2].max() <= tolerance
        assert np.abs(image[..., 1] - rows[:, None] / 2)[2:-2].max() <= tolerance


def test_a_whole_image_of_the_right_size_is_not_touched() -> None:
    square = noise[:40]
    format = ImageFormat(40, 3, recipe=ImageRecipe(crop_scale=1, crop_ratio=1))
    change = format.augmentation("crop")
    decoded = change.decoder(1, 2, 3)(image_file(square))
    assert np.array_equal(decoded, square)
    drawn = [np.array_equal(change(decoded, 1, 0, sample), square) for sample in range(400)]
    assert 0.4 < np.mean(drawn) < 0.6 and np.array_equal(change(decoded, 1, 0, drawn.index(False)), square[:, ::-1])


class Signs:
    """In place of `Draws`, for operations that draw nothing but a sign."""

    def __init__(self, sign: int) -> None:
        self.sign = sign

    def coin(self) -> bool:
        return self.sign < 0


def expected_operations(level: float, sign: int, increasing: bool) -> list[Image.Image]:
    """timm's `auto_augment.py`, level by level, for its magnitudes from 0 to 10."""
    width, height = picture.size
    options = {"resample": Image.Resampling.BICUBIC, "fillcolor": FILL}
    factor = max(0.1, 1 + sign * level / 10 * 0.9) if increasing else level / 10 * 1.8 + 0.1
    bits, thresh = int(level / 10 * 4), int(level / 10 * 256)
    bits, thresh = (4 - bits, 256 - thresh) if increasing else (bits, thresh)
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


@pytest.mark.parametrize("increasing", [False, True])
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("level", [0.0, 2.5, 9.0, 10.0])
def test_the_operations_are_those_of_timm(increasing: bool, sign: int, level: float) -> None:
    operations = _INCREASING if increasing else _ORIGINAL
    for number, expected in enumerate(expected_operations(level, sign, increasing)):
        changed = operations[number](picture, level / 10, Signs(sign), FILL)
        assert np.abs(np.asarray(changed).astype(int) - np.asarray(expected)).max() <= 1, number
    assert len(operations) == number + 1


def test_names_of_variants() -> None:
    assert parse_rand_augment("rand-m9-mstd0.5-inc1") == RandAugment(9, 2, 0.5, increasing=True)
    assert parse_rand_augment("rand-m9-n1-mstd0.4-inc1") == RandAugment(9, 1, 0.4, increasing=True)
    assert parse_rand_augment("rand-n3-p0.25-mmax12-m11") == RandAugment(11, 3, 0, 12, 0.25)
    assert parse_rand_augment("rand") == RandAugment()
    for wrong in ("", "m9", "rand-", "rand-m", "rand-w0", "rand-m9-m8", "rand-m-9", "rand-n0", "rand-n16", "rand-n1.5",
                  "rand-inc2", "rand-p1.5", "rand-m9_mstd1", "rand-m1e3", "rand-m" + "9" * 5000):  # fmt: skip
        with pytest.raises(ValueError, match="--rand-augment"):
            parse_rand_augment(wrong)


def test_a_choice_of_operations() -> None:
    """Each name stands for its operation: those of one strength and the others are known by what they do."""
    for name, expected in (
        ("invert", ImageOps.invert(picture)),
        ("equalize", ImageOps.equalize(picture)),
        ("translate-y", _INCREASING[14](picture, 0.9, Signs(-1), FILL)),
        ("sharpness", _INCREASING[10](picture, 0.9, Signs(-1), FILL)),
    ):
        found = [
            parse_rand_augment("rand-m9-n1-p1-inc1", name)(picture, Draws("ops", index), FILL) for index in range(20)
        ]
        assert any(np.array_equal(np.asarray(each), np.asarray(expected)) for each in found), name
        assert len({each.tobytes() for each in found}) <= 2, name


def test_magnitudes_and_chances_of_operations() -> None:
    def magnitudes(name: str) -> np.ndarray:
        variant = parse_rand_augment(name)
        return np.array([variant._magnitude(Draws("magnitude", index)) for index in range(2000)])

    assert set(magnitudes("rand-m9")) == {9.0} and set(magnitudes("rand-m12")) == {10.0}
    normal, uniform = magnitudes("rand-m5-mstd1"), magnitudes("rand-m8-mstd101")
    assert abs(normal.mean() - 5) < 0.1 and abs(normal.std() - 1) < 0.1
    assert 0 <= uniform.min() < 0.1 < 7.9 < uniform.max() < 8
    assert magnitudes("rand-m9-mstd3").max() == 10.0 and magnitudes("rand-m1-mstd3").min() == 0.0
    same = {p: 0 for p in ("1", "0.5", "0")}
    for p in same:
        variant = parse_rand_augment(f"rand-m9-n1-p{p}-inc1")
        same[p] = sum(variant(picture, Draws("chance", index), FILL) is picture for index in range(200))
    assert same["1"] == 0 and 70 < same["0.5"] < 130 and same["0"] == 200


def test_colours_are_scaled_by_up_to_the_strength() -> None:
    grey = Image.new("RGB", (4, 4), (100, 100, 100))  # neither contrast nor saturation changes it
    values = np.array([jitter(grey, 0.4, Draws("jitter", index)).getpixel((0, 0))[0] for index in range(600)])
    assert 60 <= values.min() < 63 and 137 < values.max() <= 140 and abs(values.mean() - 100) < 3
    results = {jitter(picture, 0.4, Draws("jitter", index)).tobytes() for index in range(20)}
    assert len(results) == 20


@pytest.mark.parametrize("mode", ["pixel", "rand", "const"])
def test_a_rectangle_is_replaced_by_normal_numbers_once_normalised(mode: str) -> None:
    format = ImageFormat(48, 3, "imagenet", recipe=ImageRecipe(erasing=0.6, erasing_mode=mode))
    square, change = np.full((48, 48, 3), 255, np.uint8), format.augmentation("none")
    results = [change(square, 1, 0, sample) for sample in range(300)]
    erased = [each for each in results if each is not square]
    assert 0.5 < len(erased) / 300 < 0.7
    plain, *tensors = format.to_tensor([square, *erased]).permute(0, 2, 3, 1).numpy()
    holes = [tensor[(tensor != plain).all(-1)] for tensor in tensors]
    shares = np.array([len(hole) / 48**2 for hole in holes])
    assert 0.015 < shares.min() < 0.05 and 0.28 < shares.max() < 0.35
    if mode == "const":
        assert max(np.abs(hole).max() for hole in holes) < 1e-5
        return
    values = np.concatenate(holes if mode == "pixel" else [hole[:1] for hole in holes])
    assert abs(values.mean()) < 0.15 and abs(values.std() - 1) < 0.15 and values.min() < -2.2, "darker than black"
    assert all(bool(np.ptp(hole, axis=0).max() < 1e-5) is (mode == "rand") for hole in holes)


def test_no_rectangle_fits_into_a_row_of_pixels() -> None:
    row = noise[:1]
    assert all(erase(row, 1.0, "pixel", (0,), (1,), Draws("row", index)) is row for index in range(5))


@pytest.mark.parametrize("changes", [EVERYTHING, {"augment": "cifar", "random_erasing": 1.0}])
def test_ranks_workers_and_resuming_do_not_alter_it(tmp_path, changes) -> None:
    random = np.random.default_rng(1)
    pictures = {f"s{n}": random.integers(0, 256, (40 + n, 60, 3), dtype=np.uint8) for n in range(12)}
    files = {key: {"jpg": image_file(each, "JPEG"), "cls": b"0"} for key, each in pictures.items()}
    shard = str(write_shard(tmp_path / "a.tar", files))

    def images(dp_size: int, consumed: int, limit: int, config: DataConfig | None = None, **options) -> torch.Tensor:
        config = config or DataConfig(data_path=shard, **changes)
        dataset = open_datasets(config, (3, 16, 16), 3).train
        options = {"augment": config.augment, "dp_size": dp_size, **options}
        ranks = [loader(dataset, dp_rank=rank, **options).batches(consumed, limit) for rank in range(dp_size)]
        batches = [batch for parts in zip(*ranks, strict=True) for batch in parts]
        return torch.cat([part.images for batch in batches for part in batch.micro_batches])

    whole = images(1, 0, 4)
    assert torch.equal(images(2, 0, 4, num_workers=2), whole)
    assert torch.equal(images(1, 20, 2, num_workers=1), whole[20:])
    assert not torch.equal(images(1, 0, 4, seed=8, shuffle=False), images(1, 0, 4, shuffle=False))
    plain = DataConfig(data_path=shard, normalize_images="imagenet" if changes == EVERYTHING else None)
    if changes.get("augment") != "cifar":  # which has constants of its own
        assert torch.equal(images(1, 0, 1, training=False), images(1, 0, 1, plain, training=False))
        assert not torch.equal(images(1, 0, 1), images(1, 0, 1, plain))


def test_what_is_pickled_for_workers_does_the_same() -> None:
    recipe = DataConfig(**EVERYTHING).image_recipe
    change = ImageFormat(48, 3, recipe=recipe).augmentation("crop")
    copy = pickle.loads(pickle.dumps(change))
    data = image_file(noise)
    ours, theirs = (each(each.decoder(1, 2, 3)(data), 1, 2, 3) for each in (change, copy))
    assert np.array_equal(ours, theirs)


def test_each_change_has_a_key_of_its_own() -> None:
    """What one draws does not move when another is left out."""
    whole = replace(DataConfig(**EVERYTHING).image_recipe, rand_augment=None, color_jitter=0.0, erasing=1.0)
    change, alone = (
        ImageFormat(48, 3, recipe=recipe).augmentation("none") for recipe in (replace(whole, color_jitter=0.4), whole)
    )
    square = np.full((48, 48, 3), 255, np.uint8)
    holes = [each(square, 1, 2, 3)[..., 0] for each in (change, alone)]
    kept = holes[1] == 255
    assert np.array_equal(holes[0][~kept], holes[1][~kept]) and np.ptp(holes[0][kept]) < 1e-5


def test_normalisation_is_that_of_the_augmentation_or_as_asked(tmp_path) -> None:
    shard = str(write_shard(tmp_path / "a.tar", {"s": {"png": image_file(noise), "cls": b"0"}}))
    for flags, name in (
        ({}, "generic"),
        ({"augment": "cifar"}, "cifar10"),
        ({"augment": "crop"}, "imagenet"),
        ({"augment": "crop", "normalize_images": "cifar10"}, "cifar10"),
    ):
        format = open_datasets(DataConfig(data_path=shard, **flags), (3, 16, 16), 3).train.format
        assert format.normalisation == name in NORMALISATIONS


@pytest.mark.parametrize(("flags", "shape", "problem"), [
    ({"rand_augment": "rand-m9"}, (1, 16, 16), "--rand-augment: for images in colour; set --in-channels 3"),
    ({"normalize_images": "cifar10"}, (1, 16, 16), "--normalize-images: for images in colour"),
    ({"random_erasing": 0.25}, (3, 2, 16, 16), "--random-erasing: for images, and the model takes event frames"),
    ({"mixup_alpha": 0.2}, (3, 2, 16, 16), "--mixup-alpha: for images, and the model takes event frames"),
    ({"augment": "crop"}, (3, 2, 16, 16), "--augment crop is not for event frames; choose one of none, dvs, nda, roll"),
])  # fmt: skip
def test_what_samples_cannot_take_is_refused(flags, shape, problem) -> None:
    with pytest.raises(ValueError, match=problem):
        open_datasets(DataConfig(data_path="never-opened.tar", **flags), shape, 3)
