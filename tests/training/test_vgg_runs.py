"""TensorBoard shows the input and the spikes of a run of the VGG."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megasnn.data.formats import encode_frames
from tests.data.shard_files import write_shard
from tests.training.runs import train_vgg

TP2_PP2 = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2")


@pytest.fixture(scope="module")
def shard(tmp_path_factory) -> tuple[str, str]:
    """Flags for a shard of event counts: a bright square, whose place says the class."""
    random, samples = np.random.default_rng(0), {}
    for number in range(30):
        frames = random.poisson(0.2, (3, 2, 16, 16))
        frames[:, :, number % 10 : number % 10 + 4, 4:8] += 3
        samples[f"s{number}"] = {"frames.npz": encode_frames(frames), "cls": str(number % 10).encode()}
    return "--data-path", str(write_shard(tmp_path_factory.mktemp("data") / "a.tar", samples))


def test_what_tensorboard_shows(ranks, shard, tmp_path) -> None:
    flags = (*shard, "--train-iters", "10", "--log-interval", "1", "--tensorboard-dir", str(tmp_path))
    ranks(4, train_vgg, *flags, *TP2_PP2)
    events = EventAccumulator(str(tmp_path), size_guidance={"images": 0}).Reload()
    assert [event.step for event in events.Images("samples")] == [0]
    # Pooling comes after the transfer, so that one bit of 32 travels.
    sent, dense = (events.Scalars(f"7_communication/pp_mb{form}")[-1].value for form in ("", "_if_dense"))
    assert 0 < sent <= dense / 30
    rasters = events.Images("spikes/raster")
    assert [event.step for event in rasters] == [10]
    picture = np.asarray(Image.open(io.BytesIO(rasters[-1].encoded_image_string)))
    assert (picture == 0).all(axis=2).any() and (picture == 160).all(axis=2).any(), "spikes, and borders of samples"
