"""How ranks divide the work."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from megasnn.common.files import STRICT
from megasnn.common.grid import Grid
from megasnn.config.checks import Count, Positive, Size, refusal
from megasnn.schedule.named import AUTO_SCHEDULE, SCHEDULES
from megasnn.schedule.partition import parse_layout
from megasnn.schedule.passes import NEVER, RECOMPUTE
from megasnn.schedule.plan import chunks_of_schedule


@dataclass(frozen=True, config=STRICT)
class ParallelConfig:
    """The data-parallel size is the number of ranks divided by tensor, context and pipeline sizes."""

    tensor_model_parallel_size: Size = 1
    """Ranks that share every layer, by channels and heads."""
    pipeline_model_parallel_size: Size = 1
    """Ranks that share the depth of the model."""
    context_parallel_size: Size = 1
    """Ranks that share every micro-batch; norms use statistics over the whole micro-batch."""
    context_parallel_cut: Literal["auto", "samples", "rows", "tokens"] = "auto"
    """Share by samples, by pixel rows of every image, or by tokens of every sequence; auto takes samples if every rank
    gets one, otherwise rows."""
    num_virtual_stages_per_pipeline_rank: Size | None = None
    """Chunks of layers on each pipeline rank; by default the schedule's number."""
    pipeline_model_parallel_layout: str | None = None
    """Layer groups or single layers in each chunk, "1|2|2|1"; by default measured costs are balanced."""
    pipeline_schedule: Annotated[str, SCHEDULES] = AUTO_SCHEDULE
    """Order of forwards and backwards; auto searches the fastest for the measured costs of the layers."""
    recompute: Annotated[str, RECOMPUTE] = NEVER
    """Recompute forwards in the backward to save memory; results keep the same bits."""
    memory_budget: Positive | None = None
    """Limit for the activations of a step on a rank, in MB (10^6 bytes), kept by recomputing forwards."""
    use_distributed_optimizer: bool = False
    """Shard optimizer state over data-parallel replicas (ZeRO-1)."""
    weight_parallel_size: Size = 1
    """Neighbouring data-parallel replicas that share one copy of the weights, gathered before use (FSDP)."""
    reshard_after_forward: bool = True
    """With --weight-parallel-size: free gathered weights between a layer's uses; off: only after its last in a step."""
    weight_gradients: Literal["once", "scattered"] = "once"
    """With --weight-parallel-size: reduce-scatter gradients once a step, or after every micro-batch."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes GPUs if the node has one for each rank. Ranks use NCCL on GPUs and Gloo on CPUs."""
    distributed_timeout_minutes: Annotated[float, Field(gt=0, le=1e6)] = 10.0
    """Minutes a rank waits for another one before it gives up."""
    check_replicas_interval: Count = 200
    """Iterations between two checksum comparisons of replicas; saves compare, too; 0 never compares."""

    @property
    def grid(self) -> Grid:
        """The ranks of one replica. The number of ranks gives the replicas: `Grid.over_ranks`."""
        return Grid(
            pp=self.pipeline_model_parallel_size,
            dp_shard=self.weight_parallel_size,
            cp=self.context_parallel_size,
            tp=self.tensor_model_parallel_size,
        )

    @property
    def chunks_per_rank(self) -> int | None:
        """Chunks of layers on each rank; None if auto may choose. Raises ValueError for a number the schedule lacks."""
        stages = self.pipeline_model_parallel_size
        chunks = self.num_virtual_stages_per_pipeline_rank
        if chunks is None and self.pipeline_schedule == AUTO_SCHEDULE:
            # Without other stages no chunk ever waits.
            if stages == 1:
                chunks = 1
            elif self.layout is not None:
                # A layout has an entry for each chunk of every rank.
                chunks = max(1, len(self.layout) // stages)
        return chunks_of_schedule(self.pipeline_schedule, chunks)

    @property
    def chunks(self) -> int:
        """Smallest number of chunks over all pipeline ranks. Raises ValueError as `chunks_per_rank` does."""
        return self.pipeline_model_parallel_size * (self.chunks_per_rank or 1)

    @property
    def layout(self) -> tuple[int, ...] | None:
        """`pipeline_model_parallel_layout` as numbers; None without one. Raises ValueError if malformed."""
        text = self.pipeline_model_parallel_layout
        return None if text is None else parse_layout(text)

    def problems(self) -> list[str]:
        """Contradictions, with values and flags."""
        wrong = []
        if self.memory_budget is not None and self.recompute != NEVER:
            budget = f"--memory-budget {self.memory_budget}"
            wrong.append(f"{budget} decides which forwards are recomputed; leave out --recompute {self.recompute}")
        if self.weight_gradients != "once" and self.weight_parallel_size == 1:
            wrong.append(f"--weight-gradients {self.weight_gradients} needs --weight-parallel-size 2 or more")
        if not self.reshard_after_forward and self.weight_parallel_size == 1:
            wrong.append("--no-reshard-after-forward needs --weight-parallel-size 2 or more")
        if self.context_parallel_cut != "auto" and self.context_parallel_size == 1:
            wrong.append(f"--context-parallel-cut {self.context_parallel_cut} needs --context-parallel-size 2 or more")
        wrong += refusal(chunks_of_schedule, self.pipeline_schedule, self.num_virtual_stages_per_pipeline_rank)
        if self.pipeline_model_parallel_layout is not None:
            wrong += refusal(parse_layout, self.pipeline_model_parallel_layout)
        return wrong
