"""The end of a step in which values were not what they should be: the same error on every rank."""

from __future__ import annotations

from megasnn.device_checks import DeviceChecks
from megasnn.parallel.agreement import gather
from megasnn.parallel_state import Group
from megasnn.pipeline.executor import PipelineError


def check_step(found: float, checks: DeviceChecks, world: Group) -> None:
    """Raises an error where the checks of any rank have found something. Collective over the world in that case.

    Args:
        found: how much the checks of all ranks have found, the same on every rank.
        checks: of this rank.
    Raises:
        PipelineError: on every rank, with the first finding of the first rank that has one.
    """
    if not found:
        return
    first, *others = [each for of_rank in gather(world.handle, checks.findings()) for each in of_rank]
    cause = ValueError(f"{first.text}; and {len(others)} more" if others else first.text)
    raise PipelineError(first.place, cause) from cause
