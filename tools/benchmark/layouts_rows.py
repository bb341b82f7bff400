"""A row of the table: which library, on which layout, in how many micro-batches, with how many threads a rank."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megasnn.grid import ContextCut

SPIKINGJELLY, MEGASNN = "spikingjelly", "megasnn"
COMPILED = f"{SPIKINGJELLY}-compiled"
SPIKINGJELLY_NEURONS = "SJ_LIF_CUDA_IMPLEMENTATION"
WITH_NEURONS = {f"{SPIKINGJELLY}-{name}": name for name in ("torch", "triton", "cuda")}
CPU_ROWS = (SPIKINGJELLY, MEGASNN, "dp2", "tp2", "pp2", "cp2", "cp2rows", f"{MEGASNN}@all", f"{SPIKINGJELLY}@all")
GPU_ROWS = (SPIKINGJELLY, MEGASNN)

_LIBRARY = "|".join([SPIKINGJELLY, COMPILED, *WITH_NEURONS, MEGASNN])
_NAME = re.compile(
    rf"({_LIBRARY}|(?:(?:dp|tp|pp)[1-9]\d*|cp[1-9]\d*(?:rows)?)+(?:zero1)?)(?::([1-9]\d*))?(?:@(all|[1-9]\d*))?"
)
_AXIS = re.compile(r"(dp|tp|pp|cp)(\d+)")


@dataclass(frozen=True)
class Row:
    """
    Attributes:
        name: as on the command line: "spikingjelly", "spikingjelly-triton" and so on with the neurons of that name,
            "spikingjelly-compiled" with the model under torch.compile, "megasnn" (one rank), "dp2", "tp2pp2", "cp2" for
            ranks that share each micro-batch by samples, "cp2rows" for those that do by rows of pixels, ...; behind it
            "zero1" for the sharded optimizer, ":8" for the micro-batches of a replica and "@2" or "@all" for the
            threads of a rank, otherwise 1.
        data, tensor, pipeline, context: ranks along each axis.
        zero1: whether each row of the optimizer's state belongs to one of the replicas.
    """

    name: str
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    micro_batches: int = 1
    threads: int = 1
    context: int = 1
    cut: ContextCut = "samples"
    zero1: bool = False

    @property
    def library(self) -> str:
        return SPIKINGJELLY if self.name.startswith(SPIKINGJELLY) else MEGASNN

    @property
    def compiled(self) -> bool:
        """Whether the model is under torch.compile."""
        return self._without_threads == COMPILED

    @property
    def variables(self) -> dict[str, str]:
        """Of the environment: which of its neurons SpikingJelly takes on a GPU; without them the first that it can."""
        neurons = WITH_NEURONS.get(self._without_threads)
        return {SPIKINGJELLY_NEURONS: neurons} if neurons else {}

    @property
    def _without_threads(self) -> str:
        return self.name.split("@")[0]

    @property
    def ranks(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context


def parse_row(name: str, pipeline_micro_batches: int, all_threads: int) -> Row:
    """
    Args:
        pipeline_micro_batches: of a replica, in rows with a pipeline that do not say it themselves.
        all_threads: what "@all" stands for.
    Raises:
         ValueError: a name that is none, one that gives an axis twice, or micro-batches for SpikingJelly.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(
            f"--rows: {name!r} is no row; rows are {', '.join([SPIKINGJELLY, COMPILED, *WITH_NEURONS])}, {MEGASNN} "
            "(one rank) or a layout like dp2, tp2, pp2, cp2, cp2rows, dp2tp2, dp2zero1, each with :MICRO_BATCHES and "
            "then @THREADS or @all behind it, where there is more than one"
        )
    layout, micro_batches, threads = match.groups()
    axes = _AXIS.findall(layout)
    sizes = {axis: int(size) for axis, size in axes}
    if len(sizes) < len(axes):
        raise ValueError(f"--rows: {name!r} gives an axis twice")
    if layout.startswith(SPIKINGJELLY) and micro_batches:
        raise ValueError(f"--rows: {name!r}: SpikingJelly takes the whole batch in one go")
    data, tensor, pipeline, context = (sizes.get(axis, 1) for axis in ("dp", "tp", "pp", "cp"))
    if "zero1" in layout and data * context == 1:
        raise ValueError(f"--rows: {name!r}: rows of the optimizer are shared out to dp or cp ranks, and there is one")
    cut: ContextCut = "rows" if "rows" in layout else "samples"
    pieces = int(micro_batches or (pipeline_micro_batches if pipeline > 1 else 1))
    of_rank = all_threads if threads == "all" else int(threads or 1)
    return Row(name, data, tensor, pipeline, pieces, of_rank, context, cut, "zero1" in layout)
