"""Wrong answers seen in other systems and the tutorials of this field, each shown to be absent here or there:

- micro-batches out of order, a loss that is not the mean over samples: schedule/test_grid.py, test_layouts.py
- labels [N, 1] read as class 0, labels that do not fit: test_losses.py
- momentum None, running statistics once a micro-batch: distributed/test_norms.py
- reset by subtraction and no decay of the input, on cut layers: kernels/test_neuron.py
"""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from megasnn.grid import ContextCut
from megasnn.kernels import NeuronSpec
from megasnn.layers import BuildContext
from megasnn.models.build import describe
from megasnn.parallel_state import destroy_model_parallel, initialize_model_parallel
from megasnn.pipeline import profile_layers
from megasnn.pipeline.cost_model import LayerCost, PipelineCosts
from megasnn.pipeline.profile_layers import profile_pipeline
from tests.parity import spikingjelly_reference as reference
from tests.parity.ranks import (
    Layout,
    assemble,
    assert_equal_to_one,
    built,
    evaluated,
    forward_backward,
    inputs_of,
    model_config,
)
from tests.parts import Part, parts
from tests.parts import assemble as whole_of

PLIF = {
    "torch": [Layout(tensor=4), Layout(2, 2, 2)],
    "auto": [
        *(Layout(2, 2, 2, "zbv", weight=2, scatters=scatters) for scatters in (False, True)),
        *(Layout(1, 2, 2, "zbv", context=2, cut=cut) for cut in get_args(ContextCut)),
    ],
}


@pytest.mark.parametrize("backend", PLIF)
def test_a_learned_time_constant_sums_its_gradient_over_tensor_ranks(ranks, backend: str) -> None:
    """Trap 2: the scalar of a PLIF layer sees one rank's channels only. Its first owner keeps it."""
    options = {"micro_batch_size": 3, "backend": backend, "spec": NeuronSpec(kind="plif")}
    one = assemble(
        [assert_equal_to_one(ranks, model_config(), PLIF[backend], reference.data(), **options)], "gradients"
    )
    scalars = [name for name in one if name.endswith("neuron.w")]
    assert len(scalars) == 15 and any(one[name].abs() > 0 for name in scalars)


def _initial_values(layout: Layout) -> list[Part]:
    with built(describe(model_config()), layout, seed=5) as engine:
        return parts(engine.tensors)


def test_initial_values_depend_on_the_name_and_not_on_the_layout(ranks) -> None:
    """Trap 10: the same seed on every stage makes layer 2 equal layer 0; values that depend on the layout."""
    layouts = Layout(), Layout(tensor=2), Layout(pipeline=4), Layout(1, 4, 2)
    full, *others = (whole_of(ranks(each.world_size, _initial_values, each)) for each in layouts)
    for found in others:
        assert found.keys() == full.keys() and all(torch.equal(found[name], value) for name, value in full.items())
    kernels = [v.flatten()[:64] for n, v in full.items() if n.endswith("conv.weight")]
    assert all(not torch.equal(a, b) for i, a in enumerate(kernels) for b in kernels[:i])


def _costs_with_one_slow_rank() -> PipelineCosts:
    monkeypatch = pytest.MonkeyPatch()
    state = initialize_model_parallel(pp=2)
    try:
        if state.rank == 1:
            # A rank that would measure something else if it were asked.
            monkeypatch.setattr(profile_layers, "profile_layers", lambda *_: [LayerCost(1000, 1000, 1000)] * 10)
        model = describe(model_config(), NeuronSpec())
        return profile_pipeline(model, 2, BuildContext(state.tp), state)
    finally:
        monkeypatch.undo()
        destroy_model_parallel()


def test_ranks_agree_on_measured_costs(ranks) -> None:
    """Trap 5: stage splits from rank-local timings."""
    first, second = ranks(2, _costs_with_one_slow_rank)
    assert first == second and len(first.layers) == 10 and all(0 < layer.seconds < 100 for layer in first.layers)
    assert first.link.per_byte > 0


def test_evaluation_and_search_for_nan_leave_running_statistics_alone(ranks) -> None:
    """Trap 4: statistics that depend on evaluation or profiling."""
    assert all(ranks(2, _statistics_before_and_after_evaluation))


def _statistics_before_and_after_evaluation() -> bool:
    with built(describe(model_config()), Layout(pipeline=2)) as engine:
        batches = inputs_of(engine, *reference.data(6), 3)
        forward_backward(engine, batches, 6)
        engine.merge_statistics(2)
        before = [e.tensor.clone() for e in engine.tensors]
        evaluated(engine, batches)
        engine.run_again(batches)
        return all(torch.equal(a, e.tensor) for a, e in zip(before, engine.tensors, strict=True)) and not any(
            norm.pending for norm in engine.norms
        )
