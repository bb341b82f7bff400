"""Tensors between two ranks arrive with all their bits or are refused; what a boundary carries is known before."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from megasnn import Engine
from megasnn.common import checks
from megasnn.common.checks import DeviceChecks, explained
from megasnn.common.grid import Grid
from megasnn.kernels import spike_codec as codec
from megasnn.kernels.layout import to_channels_last
from megasnn.kernels.spike_codec import Content, bits_of, remember_bits
from megasnn.layers import (
    BuildContext,
    ConvNormNeuron,
    ParallelNeuron,
    WholeImages,
)
from megasnn.layers.layer import Layer, layer
from megasnn.models.build import describe_model
from megasnn.models.description import Carried
from megasnn.models.model import Model
from megasnn.parallel_state import Group, ParallelState
from megasnn.pipeline.microbatch_state import without_graph
from megasnn.pipeline.p2p import Boundaries, Link, TensorSpec, linked
from tests.distributed.whole import everybody, random, spikes
from tests.models.networks import between
from tests.models.test_bundles import Meeting

CPU, PAIR = torch.device("cpu"), Group("pp", (0, 1), process_group=mock.Mock())
BITS = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bfloat16: torch.int16, torch.float16: torch.int16}
SIZE = {
    Content.DENSE: lambda t: t.nbytes,
    Content.SPIKES: lambda t: -(-t.numel() // 8),
    Content.TERNARY: lambda t: 2 * -(-t.numel() // 8),
    Content.COUNTS: torch.numel,
}


def spec_of(tensor: Tensor, content: Content = Content.DENSE) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), tensor.dtype, content, tensor.requires_grad)


# --- messages

values = st.sampled_from([0.0, 1.0, 0.0, 1.0, -0.0, float("nan"), float("inf"), 2.0, 0.5, 255.0, 256.0, -1.0])


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Of any memory order and content: few spikes among strangers and the other way round."""
    shape = draw(st.lists(st.integers(1, 4), min_size=0, max_size=5))
    count = torch.Size(shape).numel()
    dtype = draw(st.sampled_from(list(BITS)))
    kinds = [values, st.sampled_from([0.0, 1.0]), st.sampled_from([-1.0, 0.0, 1.0]), st.integers(0, 255).map(float)]
    kind = draw(st.sampled_from(kinds))
    content = torch.tensor(draw(st.lists(kind, min_size=count, max_size=count)), dtype=dtype).view(shape)
    return content.permute(draw(st.permutations(range(len(shape)))))


def fits(tensor: Tensor, content: Content) -> bool:
    largest = {Content.DENSE: math.inf, Content.SPIKES: 1, Content.TERNARY: 1, Content.COUNTS: 255}[content]
    lowest = -1 if content is Content.TERNARY else 0
    numbers = tensor.double().flatten().tolist()
    whole = (value.is_integer() and lowest <= value <= largest and str(value) != "-0.0" for value in numbers)
    return content is Content.DENSE or all(whole)


@settings(max_examples=80, deadline=None)
@given(tensors(), st.sampled_from(list(Content)))
def test_every_value_arrives_with_all_its_bits_or_is_refused(tensor: Tensor, content: Content) -> None:
    spec = spec_of(tensor, content)
    if not fits(tensor, content):
        with pytest.raises(ValueError, match="takes"):
            spec.pack(tensor)
        return
    message = spec.pack(tensor)
    buffer = spec.buffer(CPU)
    assert (message.shape, message.dtype) == (buffer.shape, buffer.dtype) and message.nbytes == SIZE[content](tensor)
    got = spec.unpack(message)
    assert got.dtype == tensor.dtype and got.shape == tensor.shape
    assert torch.equal(got.reshape(-1).view(BITS[tensor.dtype]), tensor.reshape(-1).view(BITS[tensor.dtype]))
    assert (got.movedim(2, -1) if got.ndim > 3 else got).is_contiguous()


@pytest.mark.parametrize("runs_ahead", [False, True], ids=["as-on-a-cpu", "as-on-a-gpu"])
@pytest.mark.parametrize("value", [-0.0, float("nan"), 2.0, 0.5, 256.0, -1.0])
def test_in_a_step_what_does_not_fit_is_noted_and_its_message_keeps_its_size(value: float, runs_ahead: bool) -> None:
    good, content = torch.ones(4, 20), Content.COUNTS if value in (0.5, 256.0) else Content.SPIKES
    bad = good.clone()
    bad[2, 3] = value
    collected, spec = DeviceChecks(CPU), spec_of(good, content)
    with (
        mock.patch.object(checks, "runs_ahead", lambda device: runs_ahead),
        mock.patch.object(codec, "_by_numpy", return_value=not runs_ahead),
        collected.collecting(),
    ):
        for number, tensor in enumerate((good, bad, good)):
            with explained(f"number {number}: {{}}".format):
                message = spec.pack(tensor)
            got = spec.unpack(message)
            assert message.shape == spec.buffer(CPU).shape
            assert torch.equal(got.view(torch.int32), tensor.view(torch.int32)) is (tensor is good)
    assert collected.count().item() == 1
    assert collected.findings()[0].text.startswith("number 1: pack_")


def test_spikes_that_know_their_bits_travel_as_these_in_the_order_of_the_wire() -> None:
    last = spikes(2, 3, 5, 4, 4).movedim(2, -1).contiguous().movedim(-1, 2)
    spec = spec_of(last, Content.SPIKES)
    bits = codec.pack_bits(last)
    assert spec.pack(remember_bits(last, bits)) is bits
    first = remember_bits(last.contiguous(), codec.pack_bits(last.contiguous()))
    assert torch.equal(spec.pack(first), bits), "packed anew"
    given = without_graph(remember_bits(last.requires_grad_() * 1, bits))
    assert given.is_leaf and given.requires_grad and bits_of(given) is bits
    assert not without_graph(last.detach()).requires_grad


def test_layers_hand_on_tensors_and_get_gradients_with_their_channels_last() -> None:
    x, seen = torch.rand(2, 3, 4, 5, 6, requires_grad=True), list[Tensor]()
    y = 2 * x
    y.register_hook(lambda gradient: seen.append(gradient))
    given = to_channels_last(y)
    assert torch.equal(given, y) and given.movedim(2, -1).is_contiguous() and not y.movedim(2, -1).is_contiguous()
    assert to_channels_last(given) is given
    to_channels_last(given * 1).backward(gradient := torch.rand(2, 3, 4, 5, 6))
    assert torch.equal(seen[0], gradient) and seen[0].movedim(2, -1).is_contiguous()
    repeated = torch.ones(1, 1, 1, 1, 1).expand(2, 3, 4, 5, 6)
    assert to_channels_last(repeated) is repeated, "takes no memory"


# --- links


def _both_ways() -> None:
    """Both ranks send to each other before they receive."""
    group = everybody("pp")
    sent = [(spikes(2, 3, 5, 4, seed=s), Content.SPIKES) for s in range(3)] + [(random(7, seed=4), Content.DENSE)]
    link, gone = Link(group, group, 1 - group.rank, CPU), list[int]()
    link.post(spec_of(*sent[0]))
    for tensor, content in sent:
        link.transfers += 1
        link.send(spec_of(tensor, content).pack(tensor))
    for number, (tensor, content) in enumerate(sent):
        if number:
            link.post(spec_of(tensor, content))
        assert torch.equal(link.receive(spec_of(tensor, content), partial(gone.append, 1)), tensor)
    link.free_received(2)
    assert len(link._in_flight) <= 2 and len(gone) == len(sent)
    link.finish()
    assert not link._in_flight and link.transfers == 0


def test_messages_arrive_over_a_link(ranks) -> None:
    ranks(2, _both_ways)


def test_links_are_those_of_the_placement() -> None:
    assert linked([(0, 1), (2, 1)]) == [(0, 1), (1, 2)]
    assert linked([(0, 1), (1, 2), (2, 0), (0, 1)]) == [(0, 1), (0, 2), (1, 2)]
    assert linked([(0, 1), (1, 1), (1, 0)]) == [(0, 1)]


# --- what boundaries carry


class CutOff(nn.Module):
    """Its second half has no history; what it gives is neither channels-last in memory nor contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = ConvNormNeuron(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.unit(x)
        return (0.5 * y).transpose(3, 4).contiguous().transpose(3, 4), y.detach()


class Doubled(nn.Module):
    """Has no weights, and gives whole numbers beside what it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.neuron = ParallelNeuron()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.neuron(x).mul_(2), torch.ones(2, x.shape[1], 1, 1, 1, dtype=torch.int64, device=x.device)


class InPairs(nn.Module):
    """Compares samples, in training."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = ConvNormNeuron(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and x.shape[1] < 2:
            raise ValueError("two samples at least")
        return self.unit(x)


def _carried(model: Model, stop: int, samples: int = 3, context: BuildContext | None = None) -> list[TensorSpec]:
    described = describe_model(model)
    context = context or BuildContext()
    boundaries = Boundaries(described, context, described.build(context))
    return [boundaries.spec(each, samples) for each in described.carried(stop)]


def test_what_is_planned_follows_from_the_description_for_any_number_of_samples() -> None:
    model = between(lambda: [layer("two", CutOff()), layer("one", Meeting())])
    for samples in (1, 3, 7):
        dense, cut_off = _carried(model, 2, samples)
        assert dense == TensorSpec((2, samples, 4, 4, 4), torch.float32, Content.DENSE, learns=True)
        assert cut_off.learns and cut_off.shape == dense.shape, "that it is cut off is not seen, and costs zeros"
    doubled, ones = _carried(between(lambda: [layer("two", Doubled()), layer("one", Meeting())]), 2)
    assert doubled.learns and not ones.learns and ones.shape == (2, 3, 1, 1, 1) and ones.dtype == torch.int64
    plain = between(lambda: [layer("plain", nn.Conv2d(4, 4, 1)), layer("own", ConvNormNeuron(4, 4))])
    assert [each.shape for each in _carried(plain, 2)] == [(2, 3, 4, 4, 4)]
    assert _carried(between(lambda: [layer("mine", InPairs()), layer("own", ConvNormNeuron(4, 4))]), 2, samples=1)


def test_ranks_that_share_out_rows_have_some_of_them_up_to_where_images_are_whole() -> None:
    model = between(lambda: [layer("whole", WholeImages()), layer("own", ConvNormNeuron(4, 4))], image_size=5)
    context = BuildContext(ParallelState.without_process_groups(Grid(cp=2)), context_cut="rows")
    assert [each.shape for each in _carried(model, 1, context=context)] == [(2, 3, 4, 3, 5)]
    with pytest.raises(ValueError, match="whole, .*--pipeline-model-parallel-layout"):
        _carried(model, 2, context=context)
    described = describe_model(model)
    boundaries = Boundaries(described, context, described.build(context))
    images = boundaries.spec(Carried(-1, None, Content.DENSE, "the model's input"), 3)
    assert images.shape == (1, 3, model.in_channels, 3, 5) and not images.learns


class Stop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unit = ConvNormNeuron(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.unit(x).detach()


class Shrinking(nn.Module):
    """Gives fewer rows on each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += not x.is_meta
        return x[..., : x.shape[-1] - self.calls]


ENDS = {
    "detached": Stop,
    "plain": lambda: nn.Conv2d(4, 4, 1),
    "in pairs": InPairs,
}


def _losses(kinds: list[str], flags: dict[str, object]) -> list[list[float]]:
    """Of two steps, and of an evaluation that leaves one sample over."""
    found = []
    for kind in kinds:

        def layers(kind: str = kind) -> Iterable[Layer]:
            yield layer("cut", ENDS[kind]())
            yield layer("behind", ConvNormNeuron(4, 4))

        with Engine(between(layers), micro_batch_size=2, global_batch_size=4, train_iters=2, **flags) as engine:
            images = torch.rand(5, *engine.config.model.input_shape, generator=torch.Generator().manual_seed(0))
            losses = [float(engine.train_step(images[:4], torch.arange(4)).loss) for _ in range(2)]
            found.append([*losses, engine.evaluate(images, torch.arange(5) % 4).loss])
    return found


PAIR_OF_STAGES = {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "2|2"}


def test_any_layer_may_end_a_stage_and_changes_no_bit(ranks) -> None:
    """One that cuts the graph off, one with an order of its own, or one that takes more than a sample in training."""
    assert ranks(2, _losses, list(ENDS), PAIR_OF_STAGES)[0] == ranks(1, _losses, list(ENDS), {})[0]


def test_what_is_not_as_the_dry_run_has_shown_is_refused(ranks) -> None:
    with pytest.raises(Exception, match=r"shape \[2, 2, 4, 4, 3\] .*\[2, 2, 4, 4, 4\] .*the output of cut"):
        ranks(2, _losses_of_shrinking)


def _losses_of_shrinking() -> None:
    with mock.patch.dict(ENDS, {"shrinking": Shrinking}):
        _losses(["shrinking"], {**PAIR_OF_STAGES, "pipeline_schedule": "1f1b"})
