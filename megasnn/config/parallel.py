"""Distribution of the work over ranks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from megasnn.common.files import STRICT
from megasnn.common.grid import ContextCut
from megasnn.config.checks import Count, Positive, Size, refusal
from megasnn.schedule.named import AUTO_SCHEDULE, SCHEDULES
from megasnn.schedule.partition import parse_layout
from megasnn.schedule.passes import NEVER, RECOMPUTE
from megasnn.schedule.plan import chunks_of_schedule


@dataclass(frozen=True, config=STRICT)
class ParallelConfig:
    """Ranks are divided by tensor, context and pipeline parallel sizes; the quotient is the number of data parallel
    replicas."""

    tensor_model_parallel_size: Size = 1
    """Ranks that share every layer, by channels and heads."""
    pipeline_model_parallel_size: Size = 1
    """Ranks that share the depth of the model."""
    context_parallel_size: Size = 1
    """Ranks that share every micro-batch; norms use the statistics of all of it."""
    context_parallel_cut: Literal["auto", "samples", "rows"] = "auto"
    """Share by samples, or by rows of pixels of every sample; auto takes samples where there is one for each rank."""
    num_virtual_stages_per_pipeline_rank: Size | None = None
    """Chunks of layers on each pipeline rank; by default those of the schedule."""
    pipeline_model_parallel_layout: str | None = None
    """Layer groups or single layers in each chunk, as "1|2|2|1"; by default measured costs are balanced."""
    pipeline_schedule: Annotated[str, SCHEDULES] = AUTO_SCHEDULE
    """Order of forwards and backwards; auto is the fastest found for the measured costs of the layers."""
    recompute: Annotated[str, RECOMPUTE] = NEVER
    """Forwards that are computed again for their backward; the bits of the result stay the same."""
    memory_budget: Positive | None = None
    """MB (10^6 bytes) of activations that a step may need on a rank; forwards are computed again to keep it."""
    use_distributed_optimizer: bool = False
    """Shard optimizer state over data parallel replicas (ZeRO-1)."""
    weight_parallel_size: Size = 1
    """Neighbouring data parallel replicas that share one copy of the weights, gathered before use (FSDP)."""
    weight_gradients: Literal["once", "scattered"] = "once"
    """With --weight-parallel-size: scatter gradients once in a step, or after every micro-batch."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes GPUs where there is one for each rank of a node. Ranks talk by NCCL on GPUs, by Gloo on CPUs."""
    distributed_timeout_minutes: Annotated[float, Field(gt=0, le=1e6)] = 10.0
    """Minutes that a rank waits for another before it gives up."""
    check_replicas_interval: Count = 200
    """Iterations between two comparisons of replicas by checksums, also made before each save; 0 never compares."""

    def context_cut(self, micro_batch_size: int) -> ContextCut:
        """Cut of micro-batches of so many samples."""
        if self.context_parallel_cut != "auto":
            return self.context_parallel_cut
        return "samples" if micro_batch_size >= self.context_parallel_size else "rows"

    @property
    def chunks_per_rank(self) -> int | None:
        """Chunks of layers on each rank; None where auto may choose. Raises ValueError for what the schedule cannot
        place."""
        asked, stages = self.num_virtual_stages_per_pipeline_rank, self.pipeline_model_parallel_size
        if asked is None and self.pipeline_schedule == AUTO_SCHEDULE:
            if stages == 1:
                asked = 1
            elif self.layout is not None:
                asked = max(1, len(self.layout) // stages)
        return chunks_of_schedule(self.pipeline_schedule, asked)

    @property
    def chunks(self) -> int:
        """Chunks of the pipeline over all ranks, at least. Raises ValueError as `chunks_per_rank` does."""
        return self.pipeline_model_parallel_size * (self.chunks_per_rank or 1)

    @property
    def layout(self) -> tuple[int, ...] | None:
        """The explicit layout; None where costs are to be balanced. Raises ValueError if malformed."""
        text = self.pipeline_model_parallel_layout
        return None if text is None else parse_layout(text)

    def problems(self) -> list[str]:
        """Contradictions, with values and flags."""
        wrong, budget = [], f"--memory-budget {self.memory_budget}"
        if self.memory_budget is not None and self.recompute != NEVER:
            wrong.append(f"{budget} decides what is computed again; leave --recompute {self.recompute} out")
        if self.weight_gradients != "once" and self.weight_parallel_size == 1:
            wrong.append(f"--weight-gradients {self.weight_gradients} needs --weight-parallel-size 2 or more")
        if self.context_parallel_cut != "auto" and self.context_parallel_size == 1:
            wrong.append(f"--context-parallel-cut {self.context_parallel_cut} needs --context-parallel-size 2 or more")
        wrong += refusal(chunks_of_schedule, self.pipeline_schedule, self.num_virtual_stages_per_pipeline_rank)
        if self.pipeline_model_parallel_layout is not None:
            wrong += refusal(parse_layout, self.pipeline_model_parallel_layout)
        return wrong
