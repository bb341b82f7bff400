"""The VGG on every layout computes what SpikingJelly's computes: one step in float64, to 1e-9 relative."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megasnn.layers import BuildContext
from megasnn.models.build import describe_model
from megasnn.models.vgg_dvs.model import VggDvs
from megasnn.pipeline.chunk import build_chunks
from tests.parity import vgg
from tests.parity.beside import Case, assert_equal_to_truth, assert_schedules_agree, truth
from tests.parity.ranks import Layout, assemble, name_of
from tests.parity.test_layouts import SHARED_SAMPLES, SHARED_WEIGHTS, SIZES, on, with_each_cut

LAYOUTS = [
    Layout(),
    Layout(1, 4, 1),
    Layout(1, 2, 3),
    Layout(2, 1, 3),
    Layout(1, 1, 4, "interleaved", 2),
    Layout(2, 2, 2, "zbv"),
    Layout(4, 1, 1, weight=2, scatters=True, recompute="always"),
    Layout(4, 1, 2, "zbv", weight=2, scatters=True),
    *with_each_cut([Layout(2, 2, 1, context=2), Layout(1, 1, 2, "zbv", context=4)]),
]


def require_equal(ranks: Any, layout: Layout, case: Case, **options: Any) -> None:
    steps = assert_equal_to_truth(case, ranks, layout, seed=vgg.SEED, **options)
    gradients = assemble([step for (step,) in steps], "gradients")
    biases = [value for name, value in gradients.items() if name.endswith("conv.bias")]
    assert len(biases) == 5 and not any(value.any() for value in biases), "they cancel against the norms' means"


@on(LAYOUTS, [*SHARED_WEIGHTS, *SHARED_SAMPLES])
def test_layout_equals_spikingjelly_with_dropout(ranks, layout: Layout) -> None:
    require_equal(ranks, layout, replace(vgg.DROPOUT, sizes=SIZES[layout.context]))


def test_a_full_grid_equals_spikingjelly_without_dropout(ranks) -> None:
    require_equal(ranks, Layout(2, 2, 2), vgg.PLAIN)
    assert abs(truth(vgg.DROPOUT)[0].loss - truth(vgg.PLAIN)[0].loss) > 1e-3


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2), Layout(2, 1, 2), Layout(1, 2, 2, "zbv")], ids=name_of)
def test_drop_path_leaves_out_the_same_samples(ranks, layout: Layout) -> None:
    assert abs(truth(vgg.DROP_PATH)[0].loss - truth(vgg.DROPOUT)[0].loss) > 1e-3
    require_equal(ranks, layout, vgg.DROP_PATH)


@pytest.mark.parametrize("loss", vgg.LOSSES)
@pytest.mark.parametrize("layout", [Layout(), Layout(2, 2, 2)], ids=name_of)
def test_losses(ranks, layout: Layout, loss: str) -> None:
    require_equal(ranks, layout, vgg.LOSSES[loss])


def test_pipeline_sizes_agree_bit_for_bit_in_float32(ranks) -> None:
    schedules = [Layout(pipeline=stages, schedule=name) for stages, name in ((2, "zbv"), (2, "zb1p"), (3, "v-min"))]
    layouts = [Layout(pipeline=2), Layout(pipeline=4, schedule="gpipe"), Layout(pipeline=6), *schedules]
    assert_schedules_agree(ranks, vgg.DROPOUT, layouts)


@pytest.mark.parametrize("shape", [(4, 2, 16, 16), (3, 4, 2, 16, 16), (4, 3, 2, 16, 8), (4, 3, 2, 16)])
def test_frames_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    """FEATURES 0.21."""
    config = VggDvs(channels="4,P,8", image_size=16, time_steps=3)
    model = describe_model(config)
    chunk = build_chunks(model, [range(3)], [0], BuildContext(), torch.device("cpu"), seed=0)[0]
    with pytest.raises(ValueError, match=r"\[N, 3, 2, 16, 16\]"):
        chunk(torch.zeros(shape), range(shape[0]))
