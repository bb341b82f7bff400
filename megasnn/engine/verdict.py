"""Whether what was done counts: what the checks of all ranks have found makes it void, or ends the run."""

from __future__ import annotations

import sys

from megasnn.comm.agreement import gather
from megasnn.comm.group import Group
from megasnn.device_checks import DeviceChecks
from megasnn.pipeline.executor import PipelineError, PipelineExecutor


class Verdict:
    """
    Args:
        strict: whether values that do not fit the format of their boundary are an error.

    Attributes:
        checks: of this rank, to be collected around what is judged.
        went_dense: the tensors between stages that did not fit their format, and travel dense since; the same on every
            rank.
    """

    def __init__(self, executor: PipelineExecutor, world: Group, checks: DeviceChecks, strict: bool) -> None:
        self._executor, self._world, self._strict = executor, world, strict
        self.checks = checks
        self.went_dense: list[str] = []

    def accepts(self, found: float) -> bool:
        """Whether what was done counts. Otherwise it is to be done again: boundaries named here are dense then, and
        have held nothing of use before. Collective over the world where something was found.

        Args:
            found: how much the checks of all ranks have found, the same on every rank.
        Raises:
            PipelineError: on every rank, with the first finding of the first rank that has one.
        """
        if not found:
            return True
        findings = [each for of_rank in gather(self._world.handle, self.checks.findings()) for each in of_rank]
        unfit: dict[str, str] = {}
        for each in findings:
            if each.boundary is not None:
                unfit.setdefault(each.boundary, f"{each.place}: {each.text}")
        if unfit and not self._strict:
            # What else was found may come from what those boundaries gave the stages behind them.
            self._executor.go_dense(unfit)
            self.went_dense += unfit
            if self._world.rank == 0:
                for name, text in unfit.items():
                    sys.stderr.write(f"WARNING: {name} does not fit its format and travels dense from now on: {text}\n")
            return False
        first = findings[0]
        strictly = "" if first.boundary is None else " (--strict-wire; without it the tensor goes dense)"
        more = f"; and {len(findings) - 1} more" if len(findings) > 1 else ""
        cause = ValueError(f"{first.text}{strictly}{more}")
        raise PipelineError(first.place, cause) from cause
