"""`analyze`: what of a model can be cut along which axis, and what its layers cost at each size; for a costs file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from megasnn.config import PretrainConfig
from megasnn.config.checks import ConfigError
from megasnn.kernels.spike_codec import Content
from megasnn.models.build import building_problems, describe
from megasnn.models.description import INPUT, ModelDescription
from megasnn.models.summary import LayerSummary, summarise
from megasnn.parallel_state import kind_of_device
from megasnn.planner.analysis import FORMAT, Analysis, Counted, LayerFacts, identity
from megasnn.planner.counting import counted, extrapolated, trial_sizes
from megasnn.planner.measuring import measured

TENSOR_SIZES = 1, 2, 3, 4, 6, 8, 12, 16
CONTEXT_SIZES = 2, 3, 4, 6, 8, 12, 16, 24, 32


def analyze(
    config: PretrainConfig,
    tensor_sizes: Iterable[int] = TENSOR_SIZES,
    context_sizes: Iterable[int] = CONTEXT_SIZES,
    measure: bool = False,
) -> Analysis:
    """What `plan` needs to know of a model.

    Whether a size can be is asked of the code that builds the layers. With `measure` it is called in a process by
    itself, or in each that torchrun has started: these measure together, and the result is the same on all of them.

    Args:
        tensor_sizes, context_sizes: that are asked for.
        measure: whether seconds of the layers are measured on this device, and its links where there are several ranks.
    Raises:
        ConfigError: one rank cannot build the model.
    """
    wrong = config.model.problems(1) or building_problems(config.model, config.neuron.spec, 1)
    if wrong:
        raise ConfigError(wrong)
    model = describe(config.model, config.neuron.spec)
    tensors, contexts = sorted({1, *tensor_sizes}), sorted({2, *context_sizes} - {1})
    is_first = int(os.environ.get("RANK", "0")) == 0
    on_cpu = measure and kind_of_device(config.parallel.device) == "cpu"
    known = counted_sizes(model, config, tensors, contexts, on_cpu) if is_first or not measure else None
    return measured(model, config, known) if measure else _there(known)


def _there(known: Analysis | None) -> Analysis:
    assert known is not None, "every process counts where none measures"
    return known


def counted_sizes(
    model: ModelDescription,
    config: PretrainConfig,
    tensor_sizes: Sequence[int],
    context_sizes: Sequence[int],
    on_cpu: bool = False,
) -> Analysis:
    """All that needs no clock. No process group may be there: other ranks are pretended.

    Args:
        on_cpu: whether bytes are those of a run on a CPU, which may form sums over spikes; otherwise of dense products.
    """
    summaries = summarise(config.model, config.neuron.spec, model, 1)
    layers = tuple(_facts(model, number, each) for number, each in enumerate(summaries))
    alone, *others = [counted(model, config, tensor, on_cpu=on_cpu) for tensor in tensor_sizes[:2]]
    pair = counted(model, config, 1, 2, on_cpu=on_cpu)
    by_rows = counted(model, config, 1, 2, "rows", on_cpu)
    sizes = [alone, *others, *_more(model, config, alone, others, tensor_sizes[2:], on_cpu)]
    # Whether samples can be shared does not depend on the number of ranks, and what is exchanged is proportional to it.
    sizes += [pair if size == 2 else Counted(1, size, "samples", pair.refused) for size in context_sizes]
    rows = [size for size in context_sizes if size != 2]
    sizes += [by_rows, *_more(model, config, alone, [by_rows], rows, on_cpu)]
    return Analysis(FORMAT, config.model.name, identity(config), layers, trial_sizes(config), tuple(sizes))


def _more(
    model: ModelDescription,
    config: PretrainConfig,
    alone: Counted,
    others: Sequence[Counted],
    sizes: Sequence[int],
    on_cpu: bool,
) -> list[Counted]:
    """Computes further sizes of an axis from one that could be counted; counts each where none could."""
    found: list[Counted] = []
    for size in sizes:
        some = next((each for each in (*others, *found) if each.refused is None), None)
        if some is not None:
            found.append(extrapolated(model, config, alone, some, size))
        elif others and others[0].context > 1:
            found.append(counted(model, config, 1, size, "rows", on_cpu))
        else:
            found.append(counted(model, config, size, on_cpu=on_cpu))
    return found


def _facts(model: ModelDescription, number: int, told: LayerSummary) -> LayerFacts:
    takes = [model.layers[source] for source in model.inputs[number] if source != INPUT]
    contents = [entry.content for layer in takes for entry in layer.entries.values()]
    spikes = bool(contents) and Content.DENSE not in contents
    rows = max((shape[3] for shape, _ in told.outputs if len(shape) == 5), default=1)
    return LayerFacts(told.name, told.unit, told.parameters, told.operations, told.output_bytes, spikes, rows)
