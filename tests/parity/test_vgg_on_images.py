"""The VGG on images, against SpikingJelly's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import megasnn
from megasnn.models.vgg_dvs.model import VggDvs
from tests.parity.ranks import error
from tools.benchmark.steps import spikingjelly_model


def test_a_step_on_images_is_that_of_spikingjelly() -> None:
    """An image is shown at every time step; the first convolution and norm are computed once, theirs three times."""
    torch.manual_seed(0)
    sizes = dict(channels="4,P,8", image_size=8, in_channels=3, time_steps=3, num_classes=4, dropout=0.0)
    config = VggDvs(event_frames=False, **sizes)
    theirs = spikingjelly_model(config).double()
    images, labels = torch.randn(6, 3, 8, 8, dtype=torch.float64), torch.arange(6) % 4
    flags = dict(precision="fp64", optimizer="sgd", lr=0.1, lr_decay_style="constant", clip_grad=0.0, weight_decay=0.0)
    with megasnn.Engine(config, micro_batch_size=6, global_batch_size=6, train_iters=1, **flags) as engine:
        engine.load_state_dict(config.from_spikingjelly(theirs.state_dict()))
        found = engine.train_step(images, labels).loss
        after = engine.state_dict()
    loss = F.cross_entropy(theirs(images).mean(0), labels)
    loss.backward()
    torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9).step()
    assert found == pytest.approx(loss.item(), rel=1e-9)
    for name, value in config.from_spikingjelly(theirs.state_dict()).items():
        if "num_batches" not in name:
            assert error(after[name], value) < 1e-9, name
