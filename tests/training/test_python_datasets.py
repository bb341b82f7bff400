"""Data sets in Python: the same batches, losses and weights on every layout, with workers, and after a restart."""

from __future__ import annotations

import random
import re
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset

from megasnn.config import ConfigError, DataConfig
from megasnn.config.data import GivenDatasets
from megasnn.data.loader import BatchLoader, BatchShare, order_identity
from megasnn.data.map_dataset import MapDataset, require_map_style
from megasnn.data.samples import BrokenSample
from megasnn.models.spikformer.model import Spikformer
from megasnn.pretraining import pretrain
from megasnn.training.data import value_format
from tests.training.runs import TINY, close, log_of, same, saved, train_model, without_trial

SAMPLES = 13
MODEL = Spikformer(image_size=8, in_channels=1, num_classes=10)
ONE = BatchShare(8, 4)


class Noisy(Dataset):
    """Images that say their number, with noise of all three global generators; some are broken."""

    def __init__(self, broken: tuple[int, ...] = (), classes: int = 10) -> None:
        self.broken = broken
        self.number_of_classes = classes

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index in self.broken:
            raise KeyError(f"no file {index}")
        noise = torch.rand(1, 8, 8) + np.random.rand() + random.random()
        return index + noise, index % self.number_of_classes


def fail() -> None:
    raise ImportError("only in the script")


class Unmade(Noisy):
    """Cannot be unpickled."""

    def __reduce__(self):
        return fail, ()


class Private(Noisy):
    """Draws from a generator of its own, which no run seeds."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(np.random.default_rng().random((1, 8, 8))), 0


class Returns(Dataset):
    def __init__(self, sample: object) -> None:
        self.sample = sample

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> object:
        return self.sample


class Endless(IterableDataset):
    def __iter__(self):
        yield torch.zeros(1, 8, 8), 0


def batches(dataset: Dataset, share: BatchShare = ONE, start: int = 0, count: int = 4, **flags):
    """Sample numbers, inputs and targets of micro-batches, in order."""
    loader = BatchLoader(MapDataset(dataset, value_format(MODEL)), share, DataConfig(**flags), seed=5)
    found = []
    for batch in loader.batches(start, count):
        for micro in batch.micro_batches:
            inputs = None if micro.inputs is None else micro.inputs["images"]
            found.append((micro.sample_ids.tolist(), inputs, micro.targets))
    loader.close()
    return found


def assert_equal(found, expected) -> None:
    assert [each[0] for each in found] == [each[0] for each in expected]
    for (_, inputs, targets), (_, due, labels) in zip(found, expected, strict=True):
        assert torch.equal(inputs, due)
        assert torch.equal(targets, labels)


def test_workers_layouts_and_restarts_give_the_same_bits() -> None:
    expected = batches(Noisy(), num_workers=0)
    assert len({image.numpy().tobytes() for _, images, _ in expected for image in images}) == 4 * 8, "fresh each epoch"
    assert expected[0][1].is_contiguous(memory_format=torch.channels_last)
    assert all((images.floor() >= torch.tensor(ids)[:, None, None, None]).all() for ids, images, _ in expected)
    assert_equal(batches(Noisy(), num_workers=2), expected)
    assert_equal(batches(Noisy(), start=16, count=2, num_workers=0), expected[4:])
    for rank in range(2):
        own = batches(Noisy(), BatchShare(8, 4, dp_size=2, dp_rank=rank), num_workers=0)
        assert_equal(own, expected[rank::2])
    last_stage = batches(Noisy(), BatchShare(8, 4, inputs=False), num_workers=0)
    assert [each[1] for each in last_stage] == [None] * 8
    assert all(torch.equal(one[2], other[2]) for one, other in zip(last_stage, expected, strict=True))


def test_reading_leaves_the_generators_of_the_process() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    due = torch.rand(1), np.random.rand(), random.random()
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    batches(Noisy(), num_workers=0)
    assert (torch.rand(1), np.random.rand(), random.random()) == due


def test_classes_and_lambdas_of_a_script_reach_the_workers() -> None:
    class Local(Noisy):
        def __init__(self) -> None:
            super().__init__()
            self.change = lambda image: 2 * image
            self.classes = torch.ones(1)  # a name that torch has as well

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            image, label = super().__getitem__(index)
            return self.change(image), label

    assert_equal(batches(Local(), count=1, num_workers=1), batches(Local(), count=1, num_workers=0))
    with pytest.raises(ValueError, match="Unmade cannot be made in a data worker .ImportError: only in the script"):
        batches(Unmade(), count=1, num_workers=1)
    unsendable = Noisy()
    unsendable.lock = threading.Lock()
    with pytest.raises(ValueError, match="cannot be sent to data workers.*--num-workers 0"):
        batches(unsendable, num_workers=1)


def test_a_broken_sample_of_a_class_that_was_sent_names_its_line() -> None:
    class OfScript(Noisy):
        def __getitem__(self, index):
            raise KeyError(index)

    with pytest.raises(BrokenSample, match=r"sample 0 of OfScript.*KeyError.*line \d+ of the script, in __getitem__"):
        batches(OfScript(), shuffle=False, num_workers=1)


def test_a_broken_sample_ends_the_run_or_is_replaced() -> None:
    broken = Noisy(broken=(3, 7))
    with pytest.raises(BrokenSample, match=r"sample 3 of Noisy.*KeyError.*test_python_datasets.py:\d+.*--skip-broken"):
        batches(broken, shuffle=False, num_workers=0)
    found = batches(broken, shuffle=False, skip_broken_samples=True, num_workers=0, count=1)
    assert [each[0] for each in found] == [[0, 1, 2, 3], [4, 5, 6, 7]], "a replaced sample keeps its number"
    targets = torch.cat([each[2] for each in found])
    assert targets.tolist() == [0, 1, 2, 4, 4, 5, 6, 8]
    stage = batches(broken, BatchShare(8, 4, inputs=False), shuffle=False, skip_broken_samples=True, count=1)
    assert torch.cat([each[2] for each in stage]).tolist() == targets.tolist()


IMAGE = torch.zeros(1, 8, 8)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (IMAGE, r"is a Tensor: __getitem__ must return \(inputs, target\)"),
        ((IMAGE, 1, 2), r"is a tuple of 3"),
        ((IMAGE.byte(), 1), r"whole numbers \(uint8\) for 'images'.*normalised"),
        ((torch.zeros(8, 8), 1), r"images \[8, 8\], and the model takes \[1, 8, 8\]: change them in the data set's"),
        ((torch.zeros(3, 20, 20), 1), r"\[3, 20, 20\], .* \[1, 8, 8\]: set --in-channels 3 --image-size 20, or change"),
        ((torch.zeros(1, 8, 9), 1), r"\[1, 8, 9\], .* \[1, 8, 8\]: change them"),
        ((IMAGE, 10), r"label 10, outside 0..9: raise --num-classes"),
        ((IMAGE, 0.5), "label 0.5: give the number of its class"),
        (({"t": IMAGE, "x": IMAGE}, 1), "has a dict of t, x: give arrays of numbers; of events, frames"),
        ((np.zeros(5, [("x", "i2"), ("t", "i8")]), 1), "has an array of x, t: give arrays of numbers; of events"),
        ((torch.zeros(1, 8, 8, dtype=torch.complex64), 1), "complex64"),
        ((object(), 1), "object"),
    ],
)
def test_samples_that_do_not_fit_are_never_skipped(sample: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"sample 0 of Returns .*{message}") as caught:
        MapDataset(Returns(sample), value_format(MODEL)).sample(0)
    assert not isinstance(caught.value, BrokenSample)


def test_values_that_are_not_finite_are_broken() -> None:
    with pytest.raises(BrokenSample, match="nan or infinite"):
        MapDataset(Returns((IMAGE / 0, 1)), value_format(MODEL)).sample(0)


def test_counts_of_events_need_no_floating_point() -> None:
    events = value_format(Spikformer(image_size=8, in_channels=2, num_classes=10, time_steps=3, event_frames=True))
    frames = np.full((3, 2, 8, 8), 7, np.int16)
    found = MapDataset(Returns((frames, np.int64(4))), events).sample(0)
    assert found["images"].dtype == np.float32
    assert (found["images"] == frames).all()
    assert found["target"] == 4
    with pytest.raises(ValueError, match="event frames .*: set --time-steps 5 --image-size 16, or"):
        MapDataset(Returns((np.zeros((5, 2, 16, 16)), 1)), events).sample(0)


def test_a_generator_of_its_own_is_noticed() -> None:
    MapDataset(Noisy(), value_format(MODEL)).require_repeatable()
    with pytest.raises(ValueError, match="differs when it is read again.*torch, numpy or random"):
        MapDataset(Private(), value_format(MODEL)).require_repeatable()


def test_the_identity_is_length_class_name_and_choice() -> None:
    named = Noisy()
    named.name = "cleaned"
    sets = [Noisy(), named, Subset(Noisy(), range(5)), Subset(Noisy(), range(1, 6)), ConcatDataset([Noisy(), named])]
    found = [order_identity(MapDataset(each, value_format(MODEL)), 4, "continue") for each in sets]
    assert len({*found}) == len(sets)
    assert found[:2] == ["13 samples of Noisy", "13 samples of Noisy cleaned"]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Endless(), "Endless has no samples by index.*map-style"),
        (Noisy, "is a class: give an instance"),
        (torch.utils.data.DataLoader(Noisy()), "DataLoader: give its data set"),
        ([], "has no samples"),
        (iter([1]), "no samples by index"),
    ],
)
def test_other_data_sets_are_refused_by_name(dataset: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"dataset.*{message}"):
        require_map_style(dataset, "dataset")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--data-path train.tar", "--data-path: the samples come from Noisy in Python"),
        ("--augment cifar --normalize-images cifar10", "--augment, --normalize-images: for samples of files"),
        ("--eval-interval 3", r"needs pretrain\(..., valid_dataset"),
    ],
)
def test_flags_of_files_beside_a_data_set_are_refused(flags: str, message: str, capsys) -> None:
    assert pretrain("spikformer", ["--train-iters", "1", *flags.split()], dataset=Noisy()) == 2
    assert re.search(message, capsys.readouterr().err)


def test_mixing_works_on_batches_and_a_path_of_python_needs_the_data_set() -> None:
    mixed = DataConfig(mixup_alpha=0.2, last_batch="drop").with_datasets("Noisy", None)
    assert mixed.is_in_python
    assert mixed.with_datasets("Other", "Valid").valid_data_path == "dataset:Valid"
    with pytest.raises(ConfigError, match="--random-erasing"):
        DataConfig(random_erasing=0.5).with_datasets("Noisy", None)


LAYOUTS = {
    "one": (1, "--num-workers 2"),
    "dp2": (2, ""),
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "pp2": (2, "--pipeline-model-parallel-size 2 --pipeline-schedule zbv"),
    "cp2": (2, "--context-parallel-size 2"),
}


def trained(flags: str, folder: str) -> None:
    """On every rank: three steps with an evaluation, saved after two."""
    common = f"--precision fp64 --train-iters 3 --eval-interval 2 --eval-iters 1 --save {folder} --save-interval 2"
    given = GivenDatasets(Noisy(broken=(3,)), Noisy())
    with without_trial():
        train_model(
            "spikformer",
            [*TINY, *f"{common} --global-batch-size 8 --skip-broken-samples --log-interval 1 {flags}".split()],
            given=given,
        )


def test_every_layout_trains_alike_and_goes_on_from_another(ranks, tmp_path: Path) -> None:
    for name, (size, flags) in LAYOUTS.items():
        ranks(size, trained, flags, str(tmp_path / name))
    one = saved(tmp_path / "one")
    losses = [line["loss"] for line in log_of(tmp_path / "one", "iteration")]
    assert len(losses) == 3
    for name in LAYOUTS:
        assert close(saved(tmp_path / name), one), name
        assert [line["loss"] for line in log_of(tmp_path / name, "iteration")] == pytest.approx(losses, rel=1e-9)
    assert sum(line["skipped_samples"] for line in log_of(tmp_path / "dp2", "iteration")) > 0

    # From the middle of the run on one rank, another layout takes the last step.
    again = tmp_path / "again"
    ranks(2, trained, f"--load {tmp_path / 'one'} --ckpt-step 2", str(again))
    assert close(saved(again), one)
    ranks(1, trained, f"--load {tmp_path / 'one'} --ckpt-step 2", str(tmp_path / "same"))
    assert same(saved(tmp_path / "same"), one)
