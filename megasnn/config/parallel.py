"""How the work is spread over ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from megasnn.config.checks import FOR_RUNS, above, at_least, refusal
from megasnn.config.names import name_in
from megasnn.grid import ContextCut
from megasnn.schedule.named import AUTO, SCHEDULES
from megasnn.schedule.partition import parse_layout
from megasnn.schedule.passes import NEVER, RECOMPUTE
from megasnn.schedule.plan import chunks_of_schedule

RecomputeName = Annotated[str, name_in(RECOMPUTE)]
ScheduleName = Annotated[str, name_in(SCHEDULES)]


@dataclass(frozen=True)
class ParallelConfig:
    """Ranks are divided by tensor, context and pipeline parallel sizes; the quotient is the number of data parallel
    replicas."""

    tensor_model_parallel_size: int = 1
    """Ranks that share every layer, by channels and heads."""
    pipeline_model_parallel_size: int = 1
    """Ranks that share the depth of the model."""
    context_parallel_size: int = 1
    """Ranks that share every micro-batch, each with all weights: norms use the statistics of the whole micro-batch."""
    context_parallel_cut: Literal["auto", "samples", "rows"] = "auto"
    """How they share it: each has some of its samples, or some rows of pixels of every sample. auto takes samples where
    there is one for each rank."""
    num_virtual_stages_per_pipeline_rank: int | None = None
    """Chunks of layers on each pipeline rank. By default what the schedule stands for: 2 for interleaved and the V
    schedules, 1 for the others; auto chooses 1 or 2."""
    pipeline_model_parallel_layout: str | None = None
    """Units (patch stem, each block, head) or single layers in each chunk, as "1|2|2|1". By default the
    cost of each layer is measured and balanced."""
    pipeline_schedule: ScheduleName = AUTO
    """Order of forwards and backwards; auto is the fastest found for the measured costs of the layers."""
    pipeline_memory_limit: float | None = None
    """Activations that a rank may hold, in micro-batches of its whole stage: auto keeps it, another schedule that
    needs more is refused."""
    recompute: RecomputeName = NEVER
    """Which forwards are computed again for their backward, layer by layer: between the two, only each layer's input is
    kept, spikes as bits. except-last: not those of a step's last micro-batch. No bit of the result changes."""
    memory_budget: float | None = None
    """MB (10^6 bytes) that a step may need on a rank above weights, gradients and optimizer state. Forwards are
    computed again so that it is kept, those first that save most for their time; the plan is printed and lies beside
    the run."""
    layer_costs: str | None = None
    """Costs file of a plan (tools/plan.py --measure --costs): cut and order of the pipeline follow it, as they were
    planned. By default layers are measured at the start of every run whose cut or order depends on them."""
    use_distributed_optimizer: bool = False
    """Each data parallel replica keeps the optimizer's state of some rows of each parameter only, updates these, and
    sends them to the others (ZeRO-1). It saves that memory, and every rank writes its part of a checkpoint."""
    weight_parallel_size: int = 1
    """Neighbouring data parallel replicas that share one copy of the weights: each keeps some rows of each parameter,
    the whole of a layer is gathered right before it is used, and freed after (FSDP). 1: every replica keeps all."""
    weight_memory_limit: float | None = None
    """MB (10^6 bytes) of gathered weights that a rank may hold. By default as few as let a layer's weights come while
    the layer before it is computed; with more, fewer are gathered twice."""
    weight_gradients: Literal["once", "scattered"] = "once"
    """When gradients go to those who keep the rows: once in a step, and a rank holds all of its layers' until then; or
    scattered after every micro-batch, and it holds those of its rows and of the layers under way."""
    strict_wire: bool = False
    """Stop where a value does not fit the packed format of its boundary; otherwise the step is done again and that
    tensor goes dense from then on."""
    pipeline_gradient_dtype: Literal["fp32", "bf16"] | None = None
    """Type in which gradients cross stages; by default that in which they are computed. bf16 halves the bytes and
    rounds: results then depend on where the model is cut."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Communication; auto takes nccl on GPUs, gloo on CPUs. With gloo, ranks may share a GPU, and messages go through
    the host."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes GPUs where there is one for each rank of a node."""
    distributed_timeout_minutes: float = 10.0
    """How long a rank waits for another before it gives up."""
    check_replicas_interval: int | None = field(default=None, metadata=FOR_RUNS)
    """Iterations between two comparisons of the ranks that hold the same weights, optimizer state and norm statistics,
    by checksums; they are also compared before each save. By default 200; 0 never compares."""
    replica_mismatch: Literal["stop", "majority"] = field(default="stop", metadata=FOR_RUNS)
    """When they differ: stop ends the run before it is saved; majority, with three replicas or more, gives the minority
    the values that most ranks hold, and ends the run only where there is no majority."""

    @property
    def replica_interval(self) -> int:
        """Iterations between two comparisons of replicas; 0 where there are none."""
        return 200 if self.check_replicas_interval is None else self.check_replicas_interval

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
        sizes = (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "num_virtual_stages_per_pipeline_rank",
            "weight_parallel_size",
            "context_parallel_size",
        )
        wrong = at_least(self, 1, *sizes, "pipeline_memory_limit") + above(self, 0, "distributed_timeout_minutes")
        wrong += at_least(self, 0, "check_replicas_interval")
        wrong += above(self, 0, "memory_budget", "weight_memory_limit")
        if self.weight_memory_limit is not None and self.weight_parallel_size == 1:
            wrong.append(
                f"--weight-memory-limit {self.weight_memory_limit:g} needs weights that are gathered: "
                "--weight-parallel-size 2 or more"
            )
        if self.memory_budget is not None and self.recompute != NEVER:
            wrong.append(
                f"--memory-budget {self.memory_budget:g} with --recompute {self.recompute}: the budget decides what is "
                "computed again; leave one of them out"
            )
        if self.memory_budget is not None and self.layer_costs is not None:
            wrong.append(
                f"--memory-budget {self.memory_budget:g} with --layer-costs {self.layer_costs}: a budget is kept by "
                "what is measured here; leave one of them out"
            )
        if self.weight_gradients != "once" and self.weight_parallel_size == 1:
            wrong.append(
                f"--weight-gradients {self.weight_gradients} needs weights that are kept by rows: "
                "--weight-parallel-size 2 or more"
            )
        if self.context_parallel_cut != "auto" and self.context_parallel_size == 1:
            wrong.append(
                f"--context-parallel-cut {self.context_parallel_cut} needs ranks that share a micro-batch: "
                "--context-parallel-size 2 or more"
            )
        if self.backend == "nccl" and self.device == "cpu":
            wrong.append("--backend nccl cannot serve --device cpu; use --backend gloo or auto")
        if self.check_replicas_interval == 0 and self.replica_mismatch == "majority":
            wrong.append("--replica-mismatch majority needs comparisons: --check-replicas-interval 1 or more")
        if self.pipeline_model_parallel_size == 1:
            needed = "needs stages that send to each other: --pipeline-model-parallel-size 2 or more"
            wrong += [f"--strict-wire {needed}"] * self.strict_wire
            if self.pipeline_gradient_dtype is not None:
                wrong.append(f"--pipeline-gradient-dtype {self.pipeline_gradient_dtype} {needed}")
        if not wrong:
            wrong += refusal(chunks_of_schedule, self.pipeline_schedule, self.num_virtual_stages_per_pipeline_rank)
        if self.pipeline_model_parallel_layout is not None:
            wrong += refusal(parse_layout, self.pipeline_model_parallel_layout)
        return wrong
