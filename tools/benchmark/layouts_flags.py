"""The command line of the benchmark of layouts, and what follows from it for each row."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from megasnn.config.checks import above, at_least, flag, refusal
from megasnn.config.fields import name_in
from megasnn.config.parallel import ScheduleName
from megasnn.kernels import BACKENDS
from megasnn.models.spikformer.dimensions import Spikformer
from megasnn.models.vgg_dvs.dimensions import VggDvs
from megasnn.schedule.plan import chunks_of_schedule
from tools.benchmark.harness import Flags
from tools.benchmark.layouts_rows import CPU_ROWS, GPU_ROWS, MEGASNN, Row, parse_row
from tools.benchmark.models import IMAGE_SIZES, Dimensions, SpikingJellyName


@dataclass(frozen=True)
class LayoutBenchmark(Flags):
    """The same model, batch and optimizer in every row; `check` says whether they go together."""

    model: SpikingJellyName = "spikformer_cifar10"
    """Model of SpikingJelly to take the dimensions from; the flags up to --num-classes win over it."""
    embed_dim: int | None = None
    """Channels of the blocks."""
    depth: int | None = None
    """Number of blocks."""
    num_heads: int | None = None
    """Attention heads."""
    mlp_ratio: float = 4.0
    """Hidden channels of the MLP, in multiples of --embed-dim."""
    patch_size: Literal[4, 16] | None = None
    """Pixels per token and side."""
    image_size: int | None = None
    """Height and width; by default 64, 32 for spikformer_cifar10 and 48 for cifar10_dvs_vgg."""
    channels: str | None = None
    """Of cifar10_dvs_vgg, as pretrain_vgg_dvs.py takes them."""
    time_steps: int | None = None
    """Simulated time steps; by default 4, and 10 for cifar10_dvs_vgg."""
    num_classes: int = 10
    """Number of classes."""

    global_batch_size: int = 32
    """Samples of a step; with --regime weak, samples of a step for each rank."""
    micro_batches: int = 8
    """Micro-batches of a replica in rows with a pipeline; the others take their samples in one go. A row may say its
    own: pp2:16."""
    regime: Literal["strong", "weak"] = "strong"
    """strong: every row computes the same global batch. weak: it grows with the row's ranks, whatever the axes."""
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    """bf16: bfloat16 compute with fp32 parameters; autocast for SpikingJelly."""
    sparse_products: Literal["auto", "off"] = "auto"
    """As pretrain takes it, on a CPU."""
    neuron_backend: Annotated[str, name_in(BACKENDS)] = "auto"
    """Of MegaSNN's rows."""
    pipeline_schedule: ScheduleName = "auto"
    """Of rows with a pipeline; auto is what pretrain takes."""
    device: Literal["cpu", "cuda"] = "cpu"
    """cuda needs a GPU for each rank of a row."""

    rows: tuple[str, ...] = ()
    """spikingjelly, spikingjelly-compiled (under torch.compile), on a GPU also spikingjelly-torch, -triton or -cuda
    (with its neurons of that name), megasnn (one rank), or layouts like dp2, tp2, pp2, dp2tp2, cp2 and cp2tp2 (ranks
    share each micro-batch by samples) or cp2rows (by rows), where zero1 (the sharded optimizer), :MICRO_BATCHES and
    then @THREADS or @all may follow; by default spikingjelly megasnn dp2 tp2 pp2 cp2 cp2rows megasnn@all
    spikingjelly@all, and on a GPU spikingjelly megasnn."""
    threads_all: int | None = None
    """Threads that @all stands for; by default all cores."""
    rounds: int = 3
    """How often each row has its turn."""
    steps: int = 2
    """Timed steps of a turn; one untimed step comes before them."""
    warmup: int = 2
    """Untimed steps of each row before the first round."""
    timeout: float = 300.0
    """Seconds that a row may take for its preparation or for one turn before the benchmark gives up."""

    def dimensions(self) -> Dimensions:
        """Raises ValueError for a flag that is not of this model."""
        shared = self._given("num_classes", "image_size", "time_steps")
        if self.model == "cifar10_dvs_vgg":
            self._refuse("embed_dim", "depth", "num_heads", "mlp_ratio", "patch_size")
            return VggDvs(**shared, **self._given("channels"))
        self._refuse("channels")
        of_blocks = self._given("embed_dim", "depth", "num_heads", "mlp_ratio", "patch_size")
        return Spikformer(variant=self.model, **{"image_size": IMAGE_SIZES[self.model], **shared, **of_blocks})

    def _given(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def _refuse(self, *names: str) -> None:
        given = [name for name in names if getattr(self, name) != getattr(LayoutBenchmark, name)]
        if given:
            flags = ", ".join(f"{flag(name)} {getattr(self, name)}" for name in given)
            raise ValueError(f"{flags}: --model {self.model} has no such dimension")

    def table_rows(self) -> list[Row]:
        threads = self.threads_all or os.cpu_count() or 1
        names = self.rows or (GPU_ROWS if self.device == "cuda" else CPU_ROWS)
        return [parse_row(name, self.micro_batches, threads) for name in dict.fromkeys(names)]

    def samples(self, row: Row) -> int:
        """Samples of a step over all ranks."""
        return self.global_batch_size * (row.ranks if self.regime == "weak" else 1)

    def micro_batch_size(self, row: Row) -> int:
        return -(-self.samples(row) // self._pieces(row))

    def _pieces(self, row: Row) -> int:
        return row.data * row.micro_batches

    def identity(self, row: Row) -> dict[str, Any]:
        """Everything that the figures of a row may depend on, the machine aside: equal for comparable runs."""
        model = {name: value for name, value in asdict(self.dimensions()).items() if name != "variant"}
        identity = {
            "row": row.name,
            "threads": row.threads,
            "model": model,
            "samples": self.samples(row),
            "micro_batch_size": self.micro_batch_size(row),
            "regime": self.regime,
            "precision": self.precision,
            "device": self.device,
        }
        if row.library == MEGASNN:
            identity["neuron_backend"] = self.neuron_backend
            if self.device != "cuda":
                identity["sparse_products"] = self.sparse_products
        if row.pipeline > 1:
            identity["pipeline_schedule"] = self.pipeline_schedule
        return identity

    def problems(self) -> list[str]:
        sizes = ("global_batch_size", "micro_batches", "rounds", "steps", "warmup", "threads_all")
        wrong = at_least(self, 1, *sizes) + above(self, 0, "timeout") + refusal(self.table_rows)
        return wrong or self._row_problems()

    def _row_problems(self) -> list[str]:
        wrong = refusal(self.dimensions)
        if wrong:
            return wrong
        model = self.dimensions()
        wrong = model.problems(1) + refusal(chunks_of_schedule, self.pipeline_schedule)
        for row in self.table_rows():
            wrong += [f"row {row.name}: {problem}" for problem in model.problems(row.tensor) if problem not in wrong]
            samples, pieces = self.samples(row), self._pieces(row)
            if samples < pieces:
                wrong.append(
                    f"row {row.name}: {samples} samples cannot be cut into {pieces} micro-batches; "
                    f"raise --global-batch-size {self.global_batch_size} or lower --micro-batches"
                )
            size = self.micro_batch_size(row)
            if row.cut == "samples" and min(size, samples % size or size) < row.context:
                wrong.append(
                    f"row {row.name}: {samples} samples in micro-batches of {size} leave one that {row.context} ranks "
                    f"cannot share; change --global-batch-size {self.global_batch_size}"
                )
        return wrong
