"""A layout that might be taken: the sizes of all axes, and what a run is told besides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from megasnn.batching import micro_batches_of
from megasnn.config import PretrainConfig
from megasnn.config.parallel import ParallelConfig
from megasnn.grid import AXES, ContextCut, Grid
from megasnn.schedule.named import SCHEDULES, looks_at_costs
from megasnn.schedule.partition import layout_text
from megasnn.schedule.passes import NEVER

MOST_CHUNKS = 3  # on a rank, of schedules that take any number


@dataclass(frozen=True)
class Layout:
    """
    Attributes:
        grid: the sizes of the axes.
        cut: how ranks share a micro-batch.
        schedule: its name. chunks: on each pipeline rank.
        recompute: a name in `RECOMPUTE`. shards_optimizer: whether replicas own rows (ZeRO-1).
    """

    grid: Grid
    cut: ContextCut = "samples"
    schedule: str = "1f1b"
    chunks: int = 1
    recompute: str = NEVER
    shards_optimizer: bool = False

    @property
    def ranks(self) -> int:
        return self.grid.world_size

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The pipeline rank of each chunk."""
        if self.grid.pipeline == 1:
            return (0,) * self.chunks
        return SCHEDULES[self.schedule].placement(self.grid.pipeline, self.chunks)

    @property
    def parts(self) -> int:
        """How much there is to it: what a rank shares with others besides the batch, and all that is no default."""
        shared = sum(self.grid.size(axis) > 1 for axis in AXES if axis != "data")
        return shared + (self.chunks > 1) + (self.recompute != NEVER) + self.shards_optimizer

    def chunks_of(self, rank: int) -> list[int]:
        """The chunks of a pipeline rank."""
        return [chunk for chunk, place in enumerate(self.placement) if place == rank]

    def micro_batches(self, count: int) -> int:
        """Of a global batch of so many, those of the replica that has the most."""
        return len(micro_batches_of(count, self.grid.replicas, 0))

    def own_samples(self, size: int) -> int:
        """Of a micro-batch of so many samples, those that a rank has at most."""
        return -(-size // self.grid.context) if self.cut == "samples" else size

    def parallel(
        self, given: ParallelConfig, bounds: tuple[range, ...] | None = None, costs: Path | None = None
    ) -> ParallelConfig:
        """As flags.

        Args:
            given: all that a layout does not say. bounds: the layers of each chunk, where they are known.
            costs: the costs file, where its layers were measured on the device that runs: an order of actions that
                follows from seconds is then the planned one.
        """
        pipeline = self.grid.pipeline > 1
        follows = pipeline and looks_at_costs(self.schedule)
        sizes = None if bounds is None or not pipeline else layout_text([len(span) for span in bounds]).strip('"')
        return replace(
            given,
            tensor_model_parallel_size=self.grid.tensor,
            pipeline_model_parallel_size=self.grid.pipeline,
            context_parallel_size=self.grid.context,
            context_parallel_cut=self.cut if self.grid.context > 1 else "auto",
            weight_parallel_size=self.grid.weight,
            pipeline_schedule=self.schedule if pipeline else "auto",
            num_virtual_stages_per_pipeline_rank=self.chunks if pipeline else None,
            pipeline_model_parallel_layout=sizes,
            recompute=self.recompute,
            layer_costs=str(costs.absolute()) if costs is not None and follows else given.layer_costs,
            use_distributed_optimizer=self.shards_optimizer,
        )

    def __str__(self) -> str:
        sizes = [f"{axis} {self.grid.size(axis)}" for axis in AXES if self.grid.size(axis) > 1]
        words = [" x ".join(sizes) or "one rank"]
        if self.grid.context > 1:
            words.append(f"by {self.cut}")
        if self.grid.pipeline > 1:
            words.append(self.schedule + (f" with {self.chunks} chunks a rank" if self.chunks > 1 else ""))
        words += [f"recompute {self.recompute}"] * (self.recompute != NEVER)
        words += ["sharded optimizer"] * self.shards_optimizer
        return ", ".join(words)


def grids(ranks: int, tensor: list[int], context: list[int], layers: int) -> Iterator[Grid]:
    """Every grid of so many ranks with these sizes of tensor and context, in which a stage has a layer at least."""
    for t in tensor:
        for c in context:
            for p in range(1, layers + 1):
                if ranks % (t * c * p) == 0:
                    replicas = ranks // (t * c * p)
                    for w in (w for w in range(1, replicas + 1) if replicas % w == 0):
                        yield Grid(pipeline=p, data=replicas // w, tensor=t, weight=w, context=c)


def schedules(stages: int) -> Iterator[tuple[str, int]]:
    """Names of schedules with the numbers of chunks that each may have on a rank."""
    if stages == 1:
        yield "1f1b", 1
        return
    for name, named in SCHEDULES.items():
        most = MOST_CHUNKS if named.any_chunks else named.chunks
        yield from ((name, count) for count in range(named.chunks, most + 1) if named.can_place(count))


def with_layout(
    config: PretrainConfig, layout: Layout, bounds: tuple[range, ...] | None = None, costs: Path | None = None
) -> PretrainConfig:
    """The configuration of a run on a layout. Args: bounds, costs: as in `Layout.parallel`."""
    return replace(config, parallel=layout.parallel(config.parallel, bounds, costs))
