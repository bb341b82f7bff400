"""Layouts to choose from: sizes of all axes, schedule, recompute and optimizer sharding."""

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
from megasnn.planner.costs_file import Analysis
from megasnn.schedule.named import SCHEDULES
from megasnn.schedule.partition import layout_text
from megasnn.schedule.passes import NEVER

Prefer = Literal["speed", "memory", "capacity"]
MOST_CHUNKS = 3  # on a rank, of schedules that take any number
_SIZES = {"context_parallel_cut"}
_SIZES |= {each.name for each in fields(ParallelConfig) if each.name.endswith("_size")}
_BESIDE_SIZES = {
    "pipeline_schedule",
    "num_virtual_stages_per_pipeline_rank",
    "recompute",
    "use_distributed_optimizer",
}


@dataclass(frozen=True)
class Layout:
    """A training step's layout over ranks.

    Attributes:
        cut: how context parallel ranks share a micro-batch.
        chunks: on each pipeline rank.
        recompute: a name in `RECOMPUTE`.
        shards_optimizer: True for ZeRO-1.
    """

    grid: Grid
    micro_batch_size: int
    cut: ContextCut = "samples"
    schedule: str = "1f1b"
    chunks: int = 1
    recompute: str = NEVER
    shards_optimizer: bool = False
    has_graphs: bool = False

    @property
    def ranks(self) -> int:
        return self.grid.world_size

    @property
    def copies(self) -> int:
        """Ranks with the same weight shards."""
        return self.grid.dp_replicate * self.grid.cp

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """Pipeline rank by chunk."""
        if self.grid.pp == 1:
            return (0,) * self.chunks
        return SCHEDULES[self.schedule].placement(self.grid.pp, self.chunks)

    @property
    def parts(self) -> int:
        """Number of axes besides data, and of settings besides the defaults: smaller is simpler."""
        shared = sum(self.grid.size(axis) > 1 for axis in AXES if axis != "dp_replicate")
        return shared + (self.chunks > 1) + (self.recompute != NEVER) + self.shards_optimizer + self.has_graphs

    @property
    def own_samples(self) -> int:
        """Largest number from a micro-batch on a rank."""
        if self.cut != "samples":
            return self.micro_batch_size
        return -(-self.micro_batch_size // self.grid.cp)

    def parallel(self, base: ParallelConfig, bounds: tuple[range, ...] | None = None) -> ParallelConfig:
        """A run's flags on this layout.

        Args:
            base: all other flags.
            bounds: layers by chunk; None leaves the choice to the run.
        """
        cut: Literal["auto", "samples", "rows", "tokens"] = "auto"
        if self.grid.cp > 1:
            cut = self.cut
        schedule = "auto"
        chunks = None
        sizes = None
        if self.grid.pp > 1:
            schedule = self.schedule
            chunks = self.chunks
            if bounds is not None:
                sizes = layout_text([len(span) for span in bounds]).strip('"')
        return replace(
            base,
            tensor_model_parallel_size=self.grid.tp,
            pipeline_model_parallel_size=self.grid.pp,
            context_parallel_size=self.grid.cp,
            context_parallel_cut=cut,
            weight_parallel_size=self.grid.dp_shard,
            # A run refuses the flag where no weights are shared.
            reshard_after_forward=base.reshard_after_forward or self.grid.dp_shard == 1,
            pipeline_schedule=schedule,
            num_virtual_stages_per_pipeline_rank=chunks,
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
            chunks = f" with {self.chunks} chunks a rank" if self.chunks > 1 else ""
            words.append(self.schedule + chunks)
        if self.recompute != NEVER:
            words.append(f"recompute {self.recompute}")
        if self.shards_optimizer:
            words.append("sharded optimizer")
        if self.has_graphs:
            words.append("CUDA graphs")
        words.append(f"micro-batches of {self.micro_batch_size}")
        return ", ".join(words)


@dataclass(frozen=True)
class Candidate:
    """A layout with its figures.

    Attributes:
        seconds: a step's time; infinite for an impossible layout.
        bytes: the largest rank's memory; infinite for an impossible layout.
        reason: why the plan is another one; "" for the chosen layout.
    """

    layout: Layout
    seconds: float = math.inf
    bytes: float = math.inf
    simulated: bool = False
    reason: str = ""


def with_layout(config: PretrainConfig, layout: Layout, bounds: tuple[range, ...] | None = None) -> PretrainConfig:
    """A run's configuration on a layout. `bounds` as in `Layout.parallel`."""
    graphs: Literal["off", "on"] = "on" if layout.has_graphs else "off"
    training = replace(config.training, micro_batch_size=layout.micro_batch_size, cuda_graphs=graphs)
    return replace(config, training=training, parallel=layout.parallel(config.parallel, bounds))


def layouts(
    analysis: Analysis,
    config: PretrainConfig,
    counts: list[int],
    sizes: Sequence[int],
    may_be_best: Callable[[Layout], bool] = lambda _: True,
    knows_graphs: bool = False,
) -> Iterator[tuple[Layout, str]]:
    """Yields every layout with the reason against it, "" for possible ones; most devices first.

    Args:
        counts: numbers of devices, ascending.
        may_be_best: tests a grid's plain layout (1F1B). False leaves out the grid's other layouts.
        knows_graphs: the devices have figures for CUDA graphs.
    """
    graphs = [False]
    if config.training.cuda_graphs == "on":
        graphs = [True]
    elif knows_graphs:
        # First, so that the search soon knows a fast step.
        graphs = [True, False]
    tensors = list(analysis.possible["tensor"])
    contexts = sorted({1, *analysis.possible["samples"]})
    for size, count in product(sizes, reversed(counts)):
        for grid in _grids(count, tensors, contexts, len(analysis.layers)):
            cuts = _cuts(analysis) if grid.cp > 1 else ("samples",)
            for cut, has_graphs in product(cuts, graphs):
                plain = Layout(grid, size, cut, has_graphs=has_graphs)
                yield from _of_grid(analysis, config, plain, may_be_best)


def _cuts(analysis: Analysis) -> tuple[ContextCut, ...]:
    return ("samples", "rows", "tokens") if "tokens" in analysis.possible else ("samples", "rows")


def _grids(ranks: int, tensor: list[int], context: list[int], layers: int) -> Iterator[Grid]:
    """Every grid with at least one layer a stage. `tensor`, `context`: possible sizes."""
    for tp, cp, pp in product(tensor, context, range(1, layers + 1)):
        replicas, rest = divmod(ranks, tp * cp * pp)
        if rest:
            continue
        for dp_shard in range(1, replicas + 1):
            if replicas % dp_shard == 0:
                yield Grid(pp=pp, dp_replicate=replicas // dp_shard, tp=tp, dp_shard=dp_shard, cp=cp)


def _of_grid(
    analysis: Analysis, config: PretrainConfig, plain: Layout, may_be_best: Callable[[Layout], bool]
) -> Iterator[tuple[Layout, str]]:
    grid = plain.grid
    if not _has_given_flags(config, plain, _SIZES):
        return
    # Without graphs the same layout follows, so that a refusal of graphs is no news.
    may_be_dropped = plain.has_graphs and config.training.cuda_graphs == "off"
    refused = _size_refusal(analysis, config, plain)
    if refused and may_be_dropped:
        return
    if refused or not may_be_best(plain):
        yield plain, refused
        return
    # The optimizer is sharded over ranks with the same weights.
    shardings = (False, True) if plain.copies > 1 else (False,)
    for name, chunks in _schedules(grid.pp, len(analysis.layers)):
        for recompute, shards in product((NEVER, "always"), shardings):
            layout = replace(plain, schedule=name, chunks=chunks, recompute=recompute, shards_optimizer=shards)
            if not _has_given_flags(config, layout, _SIZES | _BESIDE_SIZES):
                continue
            chosen = with_layout(config, layout)
            problems = layout_problems(chosen, grid.world_size)
            problems = problems or cut_problems(chosen.parallel, analysis.layer_groups)
            if problems and may_be_dropped:
                continue
            yield layout, problems[0] if problems else ""


def _size_refusal(analysis: Analysis, config: PretrainConfig, plain: Layout) -> str:
    """Why a model cannot be cut to a grid's sizes; "" if it can."""
    grid = plain.grid
    refused = analysis.possible["tensor"][grid.tp]
    if refused is None and grid.cp > 1:
        refused = analysis.possible[plain.cut].get(grid.cp, "was not asked for by analyze")
    if refused is not None:
        return refused
    problems = layout_problems(with_layout(config, plain), grid.world_size)
    return problems[0] if problems else ""


def _schedules(stages: int, layers: int) -> Iterator[tuple[str, int]]:
    """Schedules with their possible chunks a rank. Each chunk has a layer."""
    if stages == 1:
        # A single stage never waits, so that all schedules are equal.
        yield "1f1b", 1
        return
    for name, named in SCHEDULES.items():
        most = min(MOST_CHUNKS if named.any_chunks else named.chunks, layers // stages)
        for count in range(named.chunks, most + 1):
            if named.can_place(count):
                yield name, count


def _has_given_flags(config: PretrainConfig, layout: Layout, names: set[str]) -> bool:
    """True if the layout has the user's values for these flags."""
    # A flag at its default leaves the choice to the planner.
    given = [name for name in set_flags(config.parallel) if name in names]
    if not given:
        return True
    mine = layout.parallel(ParallelConfig())
    return all(getattr(config.parallel, name) == getattr(mine, name) for name in given)


@cache
def set_flags(parallel: ParallelConfig) -> tuple[str, ...]:
    """Fields that differ from their defaults."""
    default = ParallelConfig()
    return tuple(each.name for each in fields(parallel) if getattr(parallel, each.name) != getattr(default, each.name))
