"""Wrong answers seen in other systems and the tutorials of this field, each shown to be absent here or there:

- micro-batches out of order, a loss that is not the mean over samples: schedule/test_grid.py, test_layouts.py
- labels [N, 1] read as class 0, labels that do not fit: test_losses.py
- momentum None, running statistics once a micro-batch: distributed/test_norms.py
- reset by subtraction and no decay of the input, on cut layers: kernels/test_neuron.py
- stages cut by each rank's own timings: pipeline/test_plan.py
- statistics that depend on evaluation or on a search for nan: engine/test_predict.py, engine/test_step.py
- initial values that depend on the layout: `assert_equal_to_one`; not on the name: models/test_replicated.py
"""

from __future__ import annotations

import pytest

from megasnn.kernels import NeuronSpec
from tests.parity import spikingjelly_reference as reference
from tests.parity.ranks import IMAGE_CUTS, Layout, assemble, assert_equal_to_one, model_config

PLIF = {
    "torch": [Layout(tensor=4), Layout(2, 2, 2)],
    "auto": [
        *(Layout(2, 2, 2, "zbv", weight=2, scatters=scatters) for scatters in (False, True)),
        *(Layout(1, 2, 2, "zbv", context=2, cut=cut) for cut in IMAGE_CUTS),
    ],
}


@pytest.mark.parametrize("backend", PLIF)
def test_a_learned_time_constant_sums_its_gradient_over_tensor_ranks(ranks, backend: str) -> None:
    """The scalar of a PLIF layer sees one rank's channels only. Its first owner keeps it."""
    options = {"micro_batch_size": 3, "backend": backend, "spec": NeuronSpec(kind="plif")}
    one = assemble(
        [assert_equal_to_one(ranks, model_config(), PLIF[backend], reference.data(), **options)], "gradients"
    )
    scalars = [name for name in one if name.endswith("neuron.w")]
    assert len(scalars) == 15 and any(one[name].abs() > 0 for name in scalars)
