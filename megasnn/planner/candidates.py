"""Layouts that might be taken: the sizes of all axes, and what a run is told besides."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from itertools import product
from typing import Literal

from megasnn.common.grid import AXES, ContextCut, Grid
from megasnn.config import PretrainConfig
from megasnn.config.parallel import ParallelConfig
from megasnn.config.validate import cut_problems, layout_problems
from megasnn.planner.costs import Analysis
from megasnn.schedule.named import SCHEDULES
from megasnn.schedule.partition import layout_text
from megasnn.schedule.passes import NEVER

Prefer = Literal["speed", "memory", "capacity"]
MOST_CHUNKS = 3  # on a rank, of schedules that take any number


@dataclass(frozen=True)
class Layout:
    """
    Attributes:
        grid: sizes of the axes. micro_batch_size: samples of a micro-batch.
        cut: how context parallel ranks share a micro-batch.
        schedule: its name. chunks: on each pipeline rank.
        recompute: a name in `RECOMPUTE`. shards_optimizer: replicas own rows (ZeRO-1).
    """

    grid: Grid
    micro_batch_size: int
    cut: ContextCut = "samples"
    schedule: str = "1f1b"
    chunks: int = 1
    recompute: str = NEVER
    shards_optimizer: bool = False

    @property
    def ranks(self) -> int:
        return self.grid.world_size

    @property
    def copies(self) -> int:
        """Ranks that hold the same rows of weights."""
        return self.grid.dp_replicate * self.grid.cp

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The pipeline rank of each chunk."""
        if self.grid.pp == 1:
            return (0,) * self.chunks
        return SCHEDULES[self.schedule].placement(self.grid.pp, self.chunks)

    @property
    def parts(self) -> int:
        """Number of parts of a layout: axes besides data, and what is no default. Simpler layouts have fewer."""
        shared = sum(self.grid.size(axis) > 1 for axis in AXES if axis != "dp_replicate")
        return shared + (self.chunks > 1) + (self.recompute != NEVER) + self.shards_optimizer

    @property
    def own_samples(self) -> int:
        """Samples of a micro-batch that a rank has at most."""
        return -(-self.micro_batch_size // self.grid.cp) if self.cut == "samples" else self.micro_batch_size

    def parallel(self, base: ParallelConfig, bounds: tuple[range, ...] | None = None) -> ParallelConfig:
        """As flags.

        Args:
            base: all that a layout does not say. bounds: layers of each chunk, where they are known.
        """
        pipeline = self.grid.pp > 1
        sizes = None if bounds is None or not pipeline else layout_text([len(span) for span in bounds]).strip('"')
        return replace(
            base,
            tensor_model_parallel_size=self.grid.tp,
            pipeline_model_parallel_size=self.grid.pp,
            context_parallel_size=self.grid.cp,
            context_parallel_cut=self.cut if self.grid.cp > 1 else "auto",
            weight_parallel_size=self.grid.dp_shard,
            pipeline_schedule=self.schedule if pipeline else "auto",
            num_virtual_stages_per_pipeline_rank=self.chunks if pipeline else None,
            pipeline_model_parallel_layout=sizes,
            recompute=self.recompute,
            use_distributed_optimizer=self.shards_optimizer,
        )

    def __str__(self) -> str:
        sizes = [f"{axis} {self.grid.size(axis)}" for axis in AXES if self.grid.size(axis) > 1]
        words = [" x ".join(sizes) or "one rank"]
        if self.grid.cp > 1:
            words.append(f"by {self.cut}")
        if self.grid.pp > 1:
            words.append(self.schedule + (f" with {self.chunks} chunks a rank" if self.chunks > 1 else ""))
        words += [f"recompute {self.recompute}"] * (self.recompute != NEVER)
        words += ["sharded optimizer"] * self.shards_optimizer
        return ", ".join([*words, f"micro-batches of {self.micro_batch_size}"])


@dataclass(frozen=True)
class Candidate:
    """A layout that was looked at.

    Attributes:
        seconds, bytes: of a step, and that the largest rank needs; estimated, or simulated. Infinite: it cannot be.
        reason: why it was not taken; "" of the one that was.
    """

    layout: Layout
    seconds: float = math.inf
    bytes: float = math.inf
    simulated: bool = False
    reason: str = ""


def with_layout(config: PretrainConfig, layout: Layout, bounds: tuple[range, ...] | None = None) -> PretrainConfig:
    """Configuration of a run on a layout. Args: bounds: as in `Layout.parallel`."""
    training = replace(config.training, micro_batch_size=layout.micro_batch_size)
    return replace(config, training=training, parallel=layout.parallel(config.parallel, bounds))


def layouts(
    analysis: Analysis,
    config: PretrainConfig,
    counts: list[int],
    sizes: Sequence[int],
    may_be_best: Callable[[Layout], bool] = lambda _: True,
) -> Iterator[tuple[Layout, str]]:
    """Yields every layout with the reason why it cannot be, "" where it can; most devices first.

    Args:
        counts: numbers of devices. sizes: of micro-batches.
        may_be_best: asked of a grid's plain layout (1F1B); the others of the grid are left out where it says no.
    """
    tensors, contexts = analysis.possible["tensor"], sorted({1, *analysis.possible["samples"]})
    for size, count in product(sizes, reversed(counts)):
        for grid in _grids(count, list(tensors), contexts, len(analysis.layers)):
            cuts: tuple[ContextCut, ...] = ("samples", "rows") if grid.cp > 1 else ("samples",)
            for cut in cuts:
                yield from _of_grid(analysis, config, Layout(grid, size, cut), may_be_best)


def _grids(ranks: int, tensor: list[int], context: list[int], layers: int) -> Iterator[Grid]:
    """Every grid of so many ranks with these sizes of tensor and context, in which a stage has a layer at least."""
    for t in tensor:
        for c in context:
            for p in range(1, layers + 1):
                if ranks % (t * c * p) == 0:
                    replicas = ranks // (t * c * p)
                    for w in (w for w in range(1, replicas + 1) if replicas % w == 0):
                        yield Grid(pp=p, dp_replicate=replicas // w, tp=t, dp_shard=w, cp=c)


def _of_grid(
    analysis: Analysis, config: PretrainConfig, plain: Layout, may_be_best: Callable[[Layout], bool]
) -> Iterator[tuple[Layout, str]]:
    grid = plain.grid
    if not _is_asked(config, plain, whole=False):
        return
    refused = analysis.possible["tensor"][grid.tp]
    if refused is None and grid.cp > 1:
        refused = analysis.possible[plain.cut].get(grid.cp, "was not asked for by analyze")
    if refused is None and (problems := layout_problems(with_layout(config, plain), grid.world_size)):
        refused = problems[0]
    if refused is not None or not may_be_best(plain):
        yield plain, refused or ""
        return
    for name, chunks in _schedules(grid.pp, len(analysis.layers)):
        for recompute in (NEVER, "always"):
            for shards in (False, True)[: 1 + (plain.copies > 1)]:
                layout = Layout(grid, plain.micro_batch_size, plain.cut, name, chunks, recompute, shards)
                if not _is_asked(config, layout, whole=True):
                    continue
                chosen = with_layout(config, layout)
                problems = layout_problems(chosen, grid.world_size)
                problems = problems or cut_problems(chosen.parallel, analysis.layer_groups)
                yield layout, problems[0] if problems else ""


def _schedules(stages: int, layers: int) -> Iterator[tuple[str, int]]:
    """Names of schedules with the numbers of chunks that each may have on a rank, each of which has a layer."""
    if stages == 1:
        yield "1f1b", 1
        return
    for name, named in SCHEDULES.items():
        most = min(MOST_CHUNKS if named.any_chunks else named.chunks, layers // stages)
        yield from ((name, count) for count in range(named.chunks, most + 1) if named.can_place(count))


def _is_asked(config: PretrainConfig, layout: Layout, whole: bool) -> bool:
    """True for a layout with the flags that were given. Args: whole: those beside the sizes, too."""
    parallel = config.parallel
    names = [name for name in set_flags(parallel) if name in _SIZES or (whole and name in _OF_LAYOUTS)]
    if not names:
        return True
    mine = layout.parallel(ParallelConfig())
    return all(getattr(parallel, name) == getattr(mine, name) for name in names)


@cache
def set_flags(parallel: ParallelConfig) -> tuple[str, ...]:
    """Fields that have not their defaults."""
    default = ParallelConfig()
    return tuple(each.name for each in fields(parallel) if getattr(parallel, each.name) != getattr(default, each.name))


_SIZES = {"context_parallel_cut", *(each.name for each in fields(ParallelConfig) if each.name.endswith("_size"))}
_OF_LAYOUTS = {
    *("pipeline_schedule", "num_virtual_stages_per_pipeline_rank", "recompute", "use_distributed_optimizer"),
}
