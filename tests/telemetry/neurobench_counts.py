"""Synaptic operations of two small networks of SpikingJelly's, as NeuroBench counts them.

The counts are kept in neurobench_counts.json. `python -m tests.telemetry.neurobench_counts` writes it anew, in an
environment with `neurobench` and what MegaSNN's tests need.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from spikingjelly.activation_based import functional
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from tests.parity import vgg
from tests.parity.beside import SPIKFORMER, Case

TABLE = Path(__file__).with_suffix(".json")
CASES = {"vgg on event frames": vgg.PLAIN, "spikformer on images": SPIKFORMER}


def network(case: Case) -> tuple[nn.Module, Tensor]:
    """A network in evaluation mode, in float64, whose norms have the statistics of the samples; and these samples."""
    net = case.network()
    x, _ = case.data()
    norms = [each for each in net.modules() if isinstance(each, _BatchNorm)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the running statistics become those of the one forward
    with torch.no_grad():
        net.train()(x)
    functional.reset_net(net)
    return net.eval(), x


def counts(case: Case) -> dict[str, Any]:
    """NeuroBench's counts for a sample, in all and layer by layer. The samples are one batch of all time steps."""
    from neurobench.metrics.utils.layers import single_layer_MACs
    from neurobench.metrics.workload import SynapticOperations
    from neurobench.models import TorchModel

    net, x = network(case)
    model = TorchModel(net)
    model.register_hooks()
    with torch.no_grad():
        model(x)
        totals = SynapticOperations()(model, None, (x, None))
    names = {module: name for name, module in net.named_modules()}
    layers = {}
    for hook in model.connection_hooks:
        hook.hook.remove()
        operations, is_spiking = single_layer_MACs(hook.inputs[0][0], hook.layer)
        kind = "Effective_ACs" if is_spiking else "Effective_MACs"
        layers[names[hook.layer]] = {kind: operations / len(x)}
    return {**totals, "layers": layers}


def main() -> None:
    found = {name: counts(case) for name, case in CASES.items()}
    table = {"neurobench": version("neurobench"), "networks": found}
    TABLE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
