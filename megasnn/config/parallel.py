"""How the work is spread over ranks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from megasnn.config.checks import refusal
from megasnn.config.fields import Count, Positive, Size
from megasnn.config.names import name_in
from megasnn.files import STRICT
from megasnn.grid import ContextCut
from megasnn.schedule.named import AUTO, SCHEDULES
from megasnn.schedule.partition import parse_layout
from megasnn.schedule.passes import NEVER, RECOMPUTE
from megasnn.schedule.plan import chunks_of_schedule

RecomputeName = Annotated[str, RECOMPUTE, name_in(RECOMPUTE)]
ScheduleName = Annotated[str, SCHEDULES, name_in(SCHEDULES)]


@dataclass(frozen=True, config=STRICT)
class ParallelConfig:
    """Ranks are divided by tensor, context and pipeline parallel sizes; the quotient is the number of data parallel
    replicas."""

    tensor_model_parallel_size: Size = 1
    """Ranks that share every layer, by channels and heads."""
    pipeline_model_parallel_size: Size = 1
    """Ranks that share the depth of the model."""
    context_parallel_size: Size = 1
    """Ranks that share every micro-batch, each with all weights: norms use the statistics of the whole micro-batch."""
    context_parallel_cut: Literal["auto", "samples", "rows"] = "auto"
    """How they share it: each has some of its samples, or some rows of pixels of every sample. auto takes samples where
    there is one for each rank."""
    num_virtual_stages_per_pipeline_rank: Size | None = None
    """Chunks of layers on each pipeline rank. By default those of the schedule: 2 for interleaved and the V schedules,
    1 for the others; auto chooses 1 or 2."""
    pipeline_model_parallel_layout: str | None = None
    """Units (patch stem, each block, head) or single layers in each chunk, as "1|2|2|1". By default the
    cost of each layer is measured and balanced."""
    pipeline_schedule: ScheduleName = AUTO
    """Order of forwards and backwards; auto is the fastest found for the measured costs of the layers."""
    recompute: RecomputeName = NEVER
    """Forwards that are computed again for their backward, layer by layer: between the two, only each layer's input is
    kept, spikes as bits. except-last: not those of a step's last micro-batch. No bit of the result changes."""
    memory_budget: Positive | None = None
    """MB (10^6 bytes) that a step may need on a rank above weights, gradients and optimizer state. Forwards are
    computed again so that it is kept, those first that save most for their time; the plan is printed and lies beside
    the run."""
    use_distributed_optimizer: bool = False
    """Shard optimizer state over data parallel replicas (ZeRO-1): each updates some rows of each parameter, and sends
    them to the others."""
    weight_parallel_size: Size = 1
    """Neighbouring data parallel replicas that share one copy of the weights: each keeps some rows of each parameter;
    a layer's are gathered right before they are used, and freed after (FSDP). 1: every replica keeps all."""
    weight_gradients: Literal["once", "scattered"] = "once"
    """With --weight-parallel-size: gradients go to those who keep the rows once in a step, or scattered after every
    micro-batch, which holds only those of the layers under way."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Communication; auto takes nccl on GPUs, gloo on CPUs. With gloo, ranks may share a GPU, and messages go through
    the host."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes GPUs where there is one for each rank of a node."""
    distributed_timeout_minutes: Annotated[float, Field(gt=0, le=1e6)] = 10.0
    """How long a rank waits for another before it gives up."""
    check_replicas_interval: Count = 200
    """Iterations between two comparisons of the ranks that hold the same weights, optimizer state and norm statistics,
    by checksums; they are also compared before each save, and a difference ends the run. 0 never compares."""

    def context_cut(self, micro_batch_size: int) -> ContextCut:
        """How ranks share micro-batches of so many samples."""
        if self.context_parallel_cut != "auto":
            return self.context_parallel_cut
        return "samples" if micro_batch_size >= self.context_parallel_size else "rows"

    @property
    def chunks_per_rank(self) -> int | None:
        """None where auto may choose. Raises ValueError for what the schedule cannot place."""
        asked, stages = self.num_virtual_stages_per_pipeline_rank, self.pipeline_model_parallel_size
        if asked is None and self.pipeline_schedule == AUTO:
            if stages == 1:
                asked = 1
            elif self.layout is not None:
                asked = max(1, len(self.layout) // stages)
        return chunks_of_schedule(self.pipeline_schedule, asked)

    @property
    def chunks(self) -> int:
        """Chunks of the whole pipeline, at least. Raises ValueError as `chunks_per_rank` does."""
        return self.pipeline_model_parallel_size * (self.chunks_per_rank or 1)

    @property
    def layout(self) -> tuple[int, ...] | None:
        """The explicit layout; None where costs are to be balanced. Raises ValueError if malformed."""
        text = self.pipeline_model_parallel_layout
        return None if text is None else parse_layout(text)

    def problems(self) -> list[str]:
        """What contradicts itself, with values and flags."""
        wrong = []
        if self.memory_budget is not None and self.recompute != NEVER:
            wrong.append(
                f"--memory-budget {self.memory_budget:g} with --recompute {self.recompute}: the budget decides what is "
                "computed again; leave one of them out"
            )
        if self.weight_gradients != "once" and self.weight_parallel_size == 1:
            wrong.append(f"--weight-gradients {self.weight_gradients} needs --weight-parallel-size 2 or more")
        if self.context_parallel_cut != "auto" and self.context_parallel_size == 1:
            wrong.append(f"--context-parallel-cut {self.context_parallel_cut} needs --context-parallel-size 2 or more")
        if self.backend == "nccl" and self.device == "cpu":
            wrong.append("--backend nccl cannot serve --device cpu; use --backend gloo or auto")
        wrong += refusal(chunks_of_schedule, self.pipeline_schedule, self.num_virtual_stages_per_pipeline_rank)
        if self.pipeline_model_parallel_layout is not None:
            wrong += refusal(parse_layout, self.pipeline_model_parallel_layout)
        return wrong
