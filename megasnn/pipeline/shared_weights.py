"""What is gathered when, where replicas share weights by rows: from a model and its cut to what schedules are told."""

from __future__ import annotations

from collections.abc import Sequence

from megasnn.layers.context import BuildContext
from megasnn.models.description import ModelDescription
from megasnn.parallel.fsdp import gathered_bytes, travelling_bytes
from megasnn.schedule.weights import SharedWeights


def shared_weights(
    model: ModelDescription,
    units: Sequence[range],
    context: BuildContext,
    limit: float | None = None,
    scatters: bool = False,
) -> SharedWeights:
    """The weights of each unit; nothing gets memory for that.

    Args:
        units: the layers of each.
        limit: bytes of gathered weights that a rank may hold; None: of a unit and the one that is used behind it.
        scatters: whether gradients are scattered after every micro-batch.
    Raises:
        ValueError: a limit that the largest unit does not fit.
    """
    layers = model.build(context)
    unit_bytes = tuple(gathered_bytes([layers[number] for number in unit]) for unit in units)
    travelling = tuple(travelling_bytes([layers[number] for number in unit], context.weight) for unit in units)
    largest = max(range(len(units)), key=unit_bytes.__getitem__)
    if limit is not None and limit < unit_bytes[largest]:
        name, least = model.layers[units[largest].start].name, (unit_bytes[largest] // 1000 + 1) / 1000
        raise ValueError(
            f"--weight-memory-limit {1e-6 * limit:g}: the weights of {name} alone are {unit_bytes[largest]} bytes; "
            f"give {least:.3f} (MB) or more, or leave it out"
        )
    most = None if limit is None else int(min(limit, sum(unit_bytes)))
    scattered = frozenset(unit for unit, size in enumerate(unit_bytes) if size) if scatters else frozenset()
    return SharedWeights(unit_bytes, most, scattered=scattered, travelling=travelling)
