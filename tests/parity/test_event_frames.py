"""The VGG on event frames `[N, T, C, H, W]` as they are loaded, against SpikingJelly's, where no rank matters."""

from __future__ import annotations

import pytest
import torch
from spikingjelly.activation_based.examples.memopt.models import CIFAR10DVSVGG
from torch import nn

from megasnn.checkpoint.load import load_globals_into
from megasnn.files import CheckpointError
from megasnn.layers import BuildContext
from megasnn.models.build import describe
from megasnn.models.vgg_dvs.model import VggDvs
from megasnn.models.vgg_dvs.weight_names import SPIKINGJELLY
from megasnn.models.weight_names import values_of
from megasnn.pipeline.chunk import build_chunks
from tests.parity.ranks import error


def test_the_default_is_the_vgg_of_spikingjelly() -> None:
    """In evaluation, where the running statistics and the convolutions' biases count."""
    torch.manual_seed(0)
    theirs = CIFAR10DVSVGG().double().eval()
    for module in theirs.modules():  # norms as after some training
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.2, 0.2)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    config = VggDvs(time_steps=2)
    weights, model = config.from_spikingjelly(theirs.state_dict()), describe(config)
    context = BuildContext(dtype=torch.float64, compute_dtype=torch.float64)
    ours = build_chunks(model, [range(len(model.layers))], [0], context, torch.device("cpu"), seed=0)[0].eval()
    load_globals_into(ours.sharded_tensors(), weights)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters()) == 9_271_498
    counts = torch.full((1, 2, 2, 48, 48), 0.7, dtype=torch.float64)
    x = torch.poisson(counts, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = ours(x)
        assert logits.std() > 0 and error(logits, theirs(x)) < 1e-9
    back = values_of(SPIKINGJELLY.from_ours(weights), weights)
    theirs.load_state_dict(back, strict=True)
    assert "classifier.0.bias" in SPIKINGJELLY.from_ours(weights, {"channels": config.channels, "dropout": 0.0})
    with pytest.raises(CheckpointError, match=r"features\.5\.proj_bn\.0\.weight: unexpected"):
        VggDvs(channels=config.channels.replace("P,512,512,P", "P,512,P,512")).from_spikingjelly(theirs.state_dict())


@pytest.mark.parametrize("shape", [(4, 2, 16, 16), (3, 4, 2, 16, 16), (4, 3, 2, 16, 8), (4, 3, 2, 16)])
def test_frames_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    """FEATURES 0.21."""
    config = VggDvs(channels="4,P,8", image_size=16, time_steps=3)
    model = describe(config)
    chunk = build_chunks(model, [range(3)], [0], BuildContext(), torch.device("cpu"), seed=0)[0]
    with pytest.raises(ValueError, match=r"\[N, 3, 2, 16, 16\]"):
        chunk(torch.zeros(shape), range(shape[0]))
