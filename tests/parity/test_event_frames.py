"""Models on event frames `[N, T, C, H, W]` as they are loaded, against SpikingJelly's, where no rank matters."""

from __future__ import annotations

import pytest
import torch
from spikingjelly.activation_based import functional
from spikingjelly.activation_based.examples.memopt.models import CIFAR10DVSVGG
from spikingjelly.activation_based.model.spikformer import Spikformer
from torch import Tensor, nn

from megasnn.checkpoint.load import load_globals_into
from megasnn.files import CheckpointError
from megasnn.kernels import NeuronSpec
from megasnn.layers import BuildContext
from megasnn.models.build import describe
from megasnn.models.description import ModelDescription
from megasnn.models.spikformer.model import Spikformer as Ours
from megasnn.models.vgg_dvs.model import VggDvs
from megasnn.models.vgg_dvs.weight_names import SPIKINGJELLY
from megasnn.models.weight_names import values_of
from megasnn.pipeline.chunk import PipelineChunk, build_chunks
from tests.parity.test_layouts import error
from tests.parity.vgg import NEURON


def whole_model(model: ModelDescription, weights: dict[str, Tensor]) -> PipelineChunk:
    context, bounds = BuildContext(dtype=torch.float64, compute_dtype=torch.float64), [range(len(model.layers))]
    chunk = build_chunks(model, bounds, [0], context, torch.device("cpu"), seed=0)[0]
    load_globals_into(chunk.sharded_tensors(), weights)
    return chunk


def frames(samples: int, steps: int, size: int) -> Tensor:
    counts = torch.full((samples, steps, 2, size, size), 0.7, dtype=torch.float64)
    return torch.poisson(counts, generator=torch.Generator().manual_seed(0))


def unsettle(model: nn.Module) -> None:
    """Norms as after some training."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.2, 0.2)
            nn.init.uniform_(module.running_var, 0.5, 1.5)


def test_the_default_is_the_vgg_of_spikingjelly() -> None:
    """In evaluation, where the running statistics and the convolutions' biases count."""
    torch.manual_seed(0)
    theirs = CIFAR10DVSVGG().double().eval()
    unsettle(theirs)
    config = VggDvs(time_steps=2)
    weights = config.from_spikingjelly(theirs.state_dict())
    ours = whole_model(describe(config, NEURON), weights).eval()
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters()) == 9_271_498
    x = frames(1, 2, 48)
    with torch.no_grad():
        logits = ours(x)
        assert logits.std() > 0 and error(logits, theirs(x)) < 1e-9
    back = values_of(SPIKINGJELLY.from_ours(weights), weights)
    theirs.load_state_dict(back, strict=True)
    assert "classifier.0.bias" in SPIKINGJELLY.from_ours(weights, {"channels": config.channels, "dropout": 0.0})
    with pytest.raises(CheckpointError, match=r"features\.5\.proj_bn\.0\.weight: unexpected"):
        VggDvs(channels=config.channels.replace("P,512,512,P", "P,512,P,512")).from_spikingjelly(theirs.state_dict())


def test_spikformer_on_event_frames() -> None:
    torch.manual_seed(0)
    dims = dict(embed_dims=32, num_heads=4, depths=1, mlp_ratio=2.0, T=3, patch_size=4, in_channels=2, num_classes=5)
    theirs = Spikformer(img_size_h=16, img_size_w=16, **dims).double()
    config = Ours(
        embed_dim=32,
        num_heads=4,
        depth=1,
        mlp_ratio=2.0,
        time_steps=3,
        in_channels=2,
        num_classes=5,
        image_size=16,
        event_frames=True,
    )
    ours = whole_model(describe(config, NeuronSpec()), config.from_spikingjelly(theirs.state_dict()))
    x = frames(4, 3, 16)
    logits = ours(x)
    functional.reset_net(theirs)
    expected = theirs(x.transpose(0, 1))
    assert logits.std() > 0 and error(logits.detach(), expected.detach()) < 1e-9


@pytest.mark.parametrize("shape", [(4, 2, 16, 16), (3, 4, 2, 16, 16), (4, 3, 2, 16, 8), (4, 3, 2, 16)])
def test_frames_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    """FEATURES 0.21."""
    config = VggDvs(channels="4,P,8", image_size=16, time_steps=3)
    model = describe(config, NEURON)
    chunk = build_chunks(model, [range(3)], [0], BuildContext(), torch.device("cpu"), seed=0)[0]
    with pytest.raises(ValueError, match=r"expected event frames \[N, 3, 2, 16, 16\]"):
        chunk(torch.zeros(shape), range(shape[0]))
