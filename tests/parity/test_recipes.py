"""Each published recipe, loaded by its name: three steps equal SpikingJelly's model under torch's own optimizer."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import ceil

import pytest
import torch

from megasnn.optim.rates import learning_rate, require_schedule
from tests.parity import recipes
from tests.parity.ranks import TOLERANCE, error
from tests.parity.recipes import PUBLISHED, SMALL
from tests.parity.spikingjelly_reference import with_other_norms


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.matrix if "imagenet" in name else ()) for name in PUBLISHED]
)
def test_three_steps_equal_spikingjelly(tmp_path, name: str) -> None:
    published = PUBLISHED[name]
    reference = with_other_norms(published.reference)
    torch.save(reference.state_dict(), tmp_path / "start.pt")
    start = ("--load", str(tmp_path / "start.pt"), "--data-path", str(recipes.shard(tmp_path)))
    flags = (*SMALL, *published.flags.split(), *start)
    before = {key: value.clone() for key, value in reference.state_dict().items()}
    batches, losses, found = recipes.train_recipe(name, *flags)
    assert losses == pytest.approx(recipes.train_published(published, reference, batches), rel=TOLERANCE)
    model = recipes.recipe(name, *flags).model
    expected, start_values = (model.from_spikingjelly(each) for each in (reference.state_dict(), before))
    trained = [key for key in found if "running" not in key and "num_batches" not in key]
    for key in trained:
        assert error(found[key], expected[key]) < TOLERANCE, key
    assert len(losses) == 3 and any(not torch.equal(found[key], start_values[key]) for key in trained)


def test_mixing_and_smoothing_are_the_recipes() -> None:
    """What the samples above cannot show: for how long, how strongly, and by which constants they are changed."""
    cifar, imagenet = (recipes.recipe(f"spikformer/{name}", "--data-path", "d") for name in ("cifar10", "imagenet"))
    assert (cifar.data.mixup_alpha, cifar.data.cutmix_alpha, cifar.data.mixup_off_epoch) == (0.5, 0.0, 200)
    assert (imagenet.data.mixup_alpha, imagenet.data.cutmix_alpha, imagenet.data.mixup_off_epoch) == (0.8, 1.0, 0)
    name, _, operations = cifar.data.rand_augment.partition(":")
    assert operations.split(",") == ["equalize", "rotate", "shear-x", "translate-x", "translate-y"]
    assert recipes.recipe("qkformer/cifar10", "--data-path", "d").data == replace(cifar.data, rand_augment=name)


def test_the_rates_are_those_that_were_logged() -> None:
    """QKFormer's published log of CIFAR-10 has 781 iterations in an epoch and these rates."""
    logged = {0: "1.000e-05", 1: "5.950e-05", 8: "4.060e-04", 193: "5.322e-04", 199: "5.089e-04", 200: "5.050e-04",
              403: "1.000e-05", 409: "1.000e-05"}  # fmt: skip
    config, epoch = recipes.recipe("qkformer/cifar10", "--data-path", "d"), Fraction(781)
    assert config.training.length(50_000 // 64 * 64).iterations == 410 * 781
    for number, rate in logged.items():
        for iteration in (781 * number, 781 * number + 780):
            assert f"{learning_rate(config.optimizer, iteration, 410 * 781, epoch):.3e}" == rate, number


@pytest.mark.parametrize("name", PUBLISHED)
def test_rates_over_the_whole_course(name: str) -> None:
    options = recipes.recipe(name, "--data-path", "d")
    epochs, published = options.training.train_epochs, PUBLISHED[name]
    assert epochs == {"qkformer/cifar10": 410, "sew_resnet/imagenet": 320}.get(name, 310)
    length = Fraction(1563, 4)  # of an epoch: its steps do not begin with whole ones
    require_schedule(options.optimizer, int(length * epochs), length)
    for epoch in (0, 1, 19, 20, 21, 150, 299, 300, 309, 319, 399, 400, 409):
        for step in (ceil(length * epoch), ceil(length * (epoch + 1)) - 1):
            if epoch < epochs:
                ours = learning_rate(options.optimizer, step, int(length * epochs), length)
                assert ours == pytest.approx(published.rate(epoch), rel=1e-12), epoch
