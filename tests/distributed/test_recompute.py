"""What is kept where forwards are computed again, and what cannot be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from megasnn.config import parse
from megasnn.engine import Engine
from megasnn.engine.model import DistributedModel
from megasnn.kernels.spike_codec import Content, bits_of
from megasnn.layers import ConvNormNeuron, MeanLinear
from megasnn.layers.layer import Layer, layer
from megasnn.models.build import describe_model
from megasnn.models.description import Carried
from megasnn.models.model import Model, run_config
from megasnn.models.spikformer.model import Spikformer
from megasnn.pipeline.microbatch_state import MicroBatchInput, PackedInput
from tests.parity.ranks import Layout, built, forward_backward, inputs_of

SAMPLES = 2


@contextmanager
def _built(model: Model, recompute: str) -> Iterator[tuple[DistributedModel, list[MicroBatchInput]]]:
    """A model, and two micro-batches."""
    with built(describe_model(model), Layout(recompute=recompute), torch.float32) as engine:
        x = 2 * torch.randn(2 * SAMPLES, *model.input_shape, generator=torch.Generator().manual_seed(3))
        yield engine, inputs_of(engine, x, torch.arange(2 * SAMPLES) % model.num_classes, SAMPLES)


def test_an_input_is_kept_in_its_format() -> None:
    spikes = (torch.rand(2, 3, 5, 5, 8) < 0.3).float().movedim(-1, 2)
    counts = torch.randint(0, 9, (2, 3, 8, 5, 5)).double().transpose(3, 4).requires_grad_()
    whole = torch.arange(6)
    formats = [Content.SPIKES, Content.COUNTS, Content.DENSE]
    carried = [Carried(0, None, content, f"tensor {index}") for index, content in enumerate(formats)]
    kept = PackedInput([spikes, counts, whole], carried)
    packed = bits_of(spikes)
    assert packed is not None and packed.nbytes == spikes.numel() // 8, "layers need not pack it again"
    for given, restored in zip((spikes, counts, whole), kept.restored(), strict=True):
        assert torch.equal(given, restored) and given.dtype == restored.dtype
        assert given.stride() == restored.stride() and given.requires_grad == restored.requires_grad
    assert kept.restored() == []
    with pytest.raises(ValueError, match="tensor 0: pack_bits takes 0 and 1"):
        PackedInput([spikes / 2], carried[:1])


class _Forgets(nn.Module):
    """Computes something else from its second call on."""

    def __init__(self) -> None:
        super().__init__()
        self.segment, self.calls = ConvNormNeuron(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        if x.is_meta:
            return self.segment(x)
        self.calls += 1
        return self.segment(x) if self.calls == 1 else x


@dataclass(frozen=True, kw_only=True)
class _Between(Model):
    image_size: int = 4
    time_steps: int = 2
    num_classes: int = 4

    def layers(self) -> Iterable[Layer]:
        yield layer("stem", ConvNormNeuron(3, 8))
        yield layer("between", _Forgets())
        yield layer("head", MeanLinear(8, 4))


def _refusal() -> str:
    with _built(_Between(), "always") as (engine, batches), pytest.raises(Exception, match="1R0") as caught:
        forward_backward(engine, batches, 2 * SAMPLES)
    return str(caught.value)


def test_a_forward_that_cannot_be_computed_again_is_an_error_with_the_place(ranks) -> None:
    (text,) = ranks(1, _refusal)
    assert "computed again did something else than the first time" in text and "--recompute never" in text


def test_a_run_that_only_evaluates_computes_nothing_again_and_needs_no_plan_for_it() -> None:
    """Whatever the configuration of the run says that it evaluates the weights of."""
    sizes = ["--image-size", "8", "--embed-dim", "16", "--depth", "1", "--num-heads", "2", "--train-iters", "1"]
    for flags in (["--memory-budget", "0.000001"], ["--recompute", "always"]):
        config = parse(run_config(Spikformer), [*sizes, "--evaluate-only", "--load", "x", "--device", "cpu", *flags])
        with Engine(config) as engine:
            assert engine.plan.schedules.segments_per_chunk is None and engine.plan.costs is None
