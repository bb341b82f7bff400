"""Setup, step and loop of a training run: the only file that sees everything."""

from __future__ import annotations

import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megasnn import checkpoint
from megasnn.batching import micro_batches_of
from megasnn.comm.statistics import statistics
from megasnn.config import PretrainConfig, describe, to_dict, to_json
from megasnn.data import BatchLoader, Datasets, GlobalBatch, open_datasets
from megasnn.engine import Engine
from megasnn.fault import FaultWatch, explain_sigterm
from megasnn.kernels import NeuronSpec
from megasnn.layers import BuildContext
from megasnn.losses import cross_entropy_sum
from megasnn.models.description import ModelDescription
from megasnn.non_finite import earliest, first_non_finite
from megasnn.optim import build_optimizer, learning_rate
from megasnn.parallel_state import (
    ParallelState,
    destroy_model_parallel,
    initialize_model_parallel,
    start_process_group,
)
from megasnn.partition import balanced_bounds, layout_to_bounds
from megasnn.pipeline.costs import agreed_layer_costs, layers_per_chunk
from megasnn.pipeline.executor import MicroBatchInput, PipelineError
from megasnn.telemetry.logline import EvaluationRecord
from megasnn.telemetry.memory import gather_peak_memory_mb
from megasnn.telemetry.reporter import Reporter
from megasnn.telemetry.spikes import SpikeRecorder, spike_scalars
from megasnn.telemetry.timers import Timers

DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}
ImportWeights = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


@dataclass(frozen=True)
class ModelProvider:
    """What a pretrain script hands to `pretrain`.

    Attributes:
        description: the layers.
        unit_of_layer: for each layer its unit, for explicit layouts.
        from_spikingjelly: a state_dict of SpikingJelly's model -> global tensors by name.
    """

    description: ModelDescription
    unit_of_layer: Sequence[str]
    from_spikingjelly: ImportWeights


def neuron_spec(config: PretrainConfig) -> NeuronSpec:
    """The neuron that the configuration describes."""
    n = config.neuron
    return NeuronSpec(
        n.neuron, n.tau, n.v_threshold, n.v_reset, n.decay_input, n.detach_reset, n.surrogate, n.surrogate_alpha
    )


def run(config: PretrainConfig, model_config: object, provider: ModelProvider) -> int:
    """`pretrain` as a program: the exit status, 0 or 1, with the error named on this rank's standard error.

    Mistakes in flags, data and checkpoints are told in a line; anything else with its traceback.
    """
    try:
        pretrain(config, model_config, provider)
        return 0
    except (Exception, KeyboardInterrupt) as error:
        cause = error.__cause__ if isinstance(error, PipelineError) else error
        mistake = isinstance(cause, (ValueError, OSError, checkpoint.CheckpointError))
        text = f"{type(error).__name__}: {error}" if mistake else traceback.format_exc()
        if isinstance(error, KeyboardInterrupt):
            text = "interrupted; what was saved before stays"
        sys.stderr.write(f"[rank {os.environ.get('RANK', '0')}] {text}\n")
    if torch.distributed.is_initialized():
        # The other ranks may be gone: nothing that waits for them may run any more.
        sys.stdout.flush()
        os._exit(1)
    return 1


def pretrain(config: PretrainConfig, model_config: object, provider: ModelProvider) -> None:
    """A whole run: joins the ranks, builds, loads, trains, evaluates, saves.

    Args:
        config: validated (megasnn.config.validate).
        model_config: the model's part of the configuration, kept with checkpoints.
    Raises:
        whatever goes wrong on this rank, after the other ranks have been told; see megasnn.fault.
    """
    parallel = config.parallel
    if "WORLD_SIZE" in os.environ:
        explain_sigterm(int(os.environ["RANK"]))
    device = start_process_group(parallel.backend, parallel.device, parallel.distributed_timeout_minutes)
    with FaultWatch():
        state = initialize_model_parallel(
            parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size, device
        )
        run = TrainingRun(config, model_config, provider, state)
        run.load()
        run.train()
        run.close()
        destroy_model_parallel()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


class TrainingRun:
    """One rank's side of a run.

    Attributes:
        iteration: optimizer steps done, over all runs that this one continues.
        consumed_samples: training samples used; the place in the data.
    """

    def __init__(
        self, config: PretrainConfig, model_config: object, provider: ModelProvider, state: ParallelState
    ) -> None:
        self.config, self.provider, self.state = config, provider, state
        self.iteration = self.consumed_samples = 0
        self._started = time.monotonic()
        model = provider.description
        _, image_size, _ = model.input_shape
        self.datasets: Datasets = open_datasets(config.data, image_size, model.input_shape[0], model.num_classes)
        self._identity = _identity(config, model_config)
        self.context = self._build_context()
        self.bounds = self._partition()
        loss = partial(cross_entropy_sum, label_smoothing=config.training.label_smoothing)
        schedule, seed = config.parallel.pipeline_schedule, config.training.seed
        self.engine = Engine(model, state, self.context, self.bounds, schedule, seed, loss)
        self.optimizer = build_optimizer(self.engine.tensors, config.optimizer)
        self.spikes = SpikeRecorder()
        for name, neuron in self.engine.neurons():
            neuron.observer = partial(self.spikes.observe, name)
        self.timers = Timers(partial(torch.cuda.synchronize, state.device) if state.device.type == "cuda" else None)
        self.reporter: Reporter | None = None
        self._saved_at: int | None = None
        self._started_anew: str | None = None
        self._skipped_samples = 0
        self._counted_from = 0
        statistics.enable()

    # --- setup

    def _build_context(self) -> BuildContext:
        precision = self.config.training.precision
        dtype = DTYPES[precision]
        compute = torch.bfloat16 if precision == "bf16" else dtype
        return BuildContext(self.state.tensor, dtype, compute, self.config.neuron.neuron_backend)

    def _partition(self) -> list[range]:
        model, parallel = self.provider.description, self.config.parallel
        if parallel.layout is not None:
            return layout_to_bounds(parallel.layout, self.provider.unit_of_layer)
        if parallel.chunks == 1:
            return [range(len(model.layers))]
        samples = self.config.training.micro_batch_size
        costs = agreed_layer_costs(model, samples, self.context, self.state.device, self.state.world)
        return balanced_bounds(costs, parallel.chunks)

    def load(self) -> None:
        """What the run starts from: a checkpoint, SpikingJelly's weights, or keyed initial values."""
        options = self.config.checkpoint
        if options.load_spikingjelly:
            weights = self.provider.from_spikingjelly(checkpoint.read_state_dict(options.load_spikingjelly))
            checkpoint.load_globals_into(self.engine.tensors, weights, self.state.world.handle)
        elif options.load:
            self._load_checkpoint(options.load)
        resumed = (self.iteration, self.consumed_samples) if self.iteration else None
        logging = self.config.logging
        self.reporter = Reporter(
            logging.tensorboard_dir, self.iterations, self.state.rank == 0, logging.log_throughput, resumed
        )
        self._introduce(self.reporter)

    def _load_checkpoint(self, folder: str) -> None:
        options, world = self.config.checkpoint, self.state.world.handle
        saved = checkpoint.saved_metadata(folder, options.ckpt_step, world, may_be_missing=self._may_begin_anew())
        if saved is None:
            self._started_anew = f"no checkpoint in {folder}: starting from the beginning"
            return
        if not options.finetune:
            self._require_same_data(folder, saved.extra)
        loaded = checkpoint.load_checkpoint(
            folder,
            tensors=self.engine.tensors,
            optimizer=None if options.finetune or options.no_load_optim else self.optimizer,
            config=None if options.finetune else self._identity,
            step=saved.iteration,
            process_group=world,
        )
        if not options.finetune:
            self.iteration, self.consumed_samples = loaded.iteration, loaded.consumed_samples

    def _may_begin_anew(self) -> bool:
        """A job that saves where it loads finds nothing there the first time; a folder named by mistake is refused."""
        options = self.config.checkpoint
        explicit = options.exit_on_missing_checkpoint or options.finetune or options.ckpt_step is not None
        return not explicit and options.load == options.save

    def _require_same_data(self, folder: str, saved: Mapping[str, object]) -> None:
        differing = [
            f"  {name}: {saved.get(name)} when it was saved, {value} now"
            for name, value in self._data_identity().items()
            if saved.get(name) != value
        ]
        if differing:
            raise checkpoint.CheckpointError(
                f"{folder} was trained on other data or in another order, where its place in the data means nothing "
                "(--finetune takes its weights only):",
                *differing,
            )

    def _data_identity(self) -> dict[str, object]:
        return {
            "dataset": self.datasets.train.fingerprint(),
            "seed": self.config.training.seed,
            "shuffle": self.config.data.shuffle,
        }

    def _introduce(self, reporter: Reporter) -> None:
        config, engine = self.config, self.engine
        table = describe(config)
        reporter.line(table)
        reporter.text("configuration", "    " + table.replace("\n", "\n    "))
        layers = [layer.name for layer in self.provider.description.layers]
        chunks = [f"{layers[span.start]} .. {layers[span.stop - 1]}" if span else "nothing" for span in self.bounds]
        reporter.line(
            f"{engine.parameters:,} parameters on {self.state.grid}; "
            f"pipeline layout {layers_per_chunk(self.bounds)}: " + "; ".join(chunks)
        )
        if self._started_anew:
            reporter.line(self._started_anew)
        if self.iteration >= self.iterations:
            reporter.line(f"iteration {self.iteration} of {self.iterations} is reached already: evaluating only")
        if self.iteration:
            reporter.line(f"continuing at iteration {self.iteration}, {self.consumed_samples} samples consumed")
        folder = config.checkpoint.save or config.logging.tensorboard_dir
        if folder is not None and self.state.rank == 0:
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / "config.json").write_text(to_json(config))

    # --- the loop

    @property
    def iterations(self) -> int:
        return self.config.training.iterations

    def train(self) -> None:
        """Until the last iteration, or until one of the exit conditions."""
        with closing(self._loader().batches(self.consumed_samples)) as batches:
            while self.iteration < self.iterations:
                with self.timers("data"):
                    batch = next(batches)
                self._iterate(batch)
                if self._should_exit():
                    break
        self._evaluate_if(self.config.logging.eval_iters != 0)
        self._save_if(self.config.checkpoint.save is not None)

    def _iterate(self, batch: GlobalBatch) -> None:
        logging, options = self.config.logging, self.config.checkpoint
        number = self.iteration + 1
        ends = number == self.iterations or _due(number, self.config.training.exit_interval)
        logs = number % logging.log_interval == 0 or ends
        self.spikes.enabled = logs
        loss, norm, rate = self._step(batch)
        self.spikes.enabled = False
        self.iteration += 1
        self.consumed_samples = batch.consumed_samples
        self._skipped_samples += sum(len(micro.skipped) for micro in batch.micro_batches)
        assert self.reporter is not None
        self.reporter.step(loss, skipped=not (math.isfinite(norm) and math.isfinite(loss)))
        if logs:
            more = self._statistics()
            skipped = self._count_skipped_samples()
            self.reporter.log(self.iteration, self.consumed_samples, rate, batch.size, norm, more, skipped)
        last = self.iteration == self.iterations
        self._evaluate_if(_due(self.iteration, logging.eval_interval) and logging.eval_iters != 0 and not last)
        self._save_if(_due(self.iteration, options.save_interval) and not last)

    def _step(self, batch: GlobalBatch) -> tuple[float, float, float]:
        """(loss, gradient norm, learning rate) of one optimizer step."""
        optimizer = self.config.optimizer
        rate = learning_rate(optimizer, self.iteration, self.iterations)
        micro_batches = self._inputs(batch)
        with self.timers("forward_backward"):
            loss = self.engine.forward_backward(micro_batches, batch.size)
        with self.timers("optimizer"):
            norm = self.engine.gradient_norm()
            # A skipped step leaves everything as it was: weights, optimizer state and running statistics.
            if math.isfinite(norm) and math.isfinite(loss):
                self.engine.merge_statistics(self._most_micro_batches(batch.size))
                self.engine.gradient_norm.clip(norm, optimizer.clip_grad)
                for group in self.optimizer.param_groups:
                    group["lr"] = rate
                self.optimizer.step()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._explain_non_finite(micro_batches)
        return loss, norm, rate

    def _explain_non_finite(self, micro_batches: Sequence[MicroBatchInput]) -> None:
        """Says where a nan or infinity appeared first: in which layer's output, otherwise in which gradient."""
        assert self.reporter is not None
        found = self.engine.first_non_finite_output(micro_batches)
        where = earliest(found, self.state.pipeline.rank, self.state.world.handle)
        if where is not None:
            self.reporter.line(f"not finite in forward, first in {where}")
            return
        gradients = [(e.name, e.tensor.grad) for e in reversed(self.engine.tensors) if e.tensor.grad is not None]
        found = first_non_finite(gradients)
        # Backward runs from the last stage to the first.
        where = earliest(found, -self.state.pipeline.rank, self.state.world.handle)
        if where is not None:
            self.reporter.line(f"not finite in backward, first in the gradient of {where}; the step is skipped")

    def _inputs(self, batch: GlobalBatch) -> list[MicroBatchInput]:
        device, dtype = self.state.device, self.context.dtype
        return [
            MicroBatchInput(
                None if micro.images is None else micro.images.to(device, dtype),
                None if micro.labels is None else micro.labels.to(device),
                micro.size,
            )
            for micro in batch.micro_batches
        ]

    def _most_micro_batches(self, batch_size: int) -> int:
        count = -(-batch_size // self.config.training.micro_batch_size)
        return len(micro_batches_of(count, self.state.data.size, 0))

    def _loader(self, training: bool = True) -> BatchLoader:
        config, state = self.config, self.state
        dataset = self.datasets.train if training else self.datasets.valid
        assert dataset is not None
        return BatchLoader(
            dataset,
            seed=config.training.seed,
            shuffle=config.data.shuffle,
            augment=config.data.augment,
            global_batch_size=config.training.global_batch_size,
            micro_batch_size=config.training.micro_batch_size,
            dp_size=state.data.size,
            dp_rank=state.data.rank,
            need_images=state.is_first_stage,
            need_labels=state.is_last_stage,
            num_workers=config.data.num_workers,
            skip_broken=config.data.skip_broken_samples,
            training=training,
        )

    def _should_exit(self) -> bool:
        training = self.config.training
        if _due(self.iteration, training.exit_interval):
            return True
        if training.exit_duration_in_mins is None:
            return False
        minutes = (time.monotonic() - self._started) / 60
        # The clocks of the ranks differ: the first one decides.
        late = [float(minutes > training.exit_duration_in_mins) if self.state.rank == 0 else 0.0]
        return self.engine.sum_over_ranks(late)[0] > 0

    # --- what a run leaves behind

    def _statistics(self) -> dict[str, float]:
        """Spikes, memory, and per iteration time and traffic, since the last log line; collective."""
        state = self.state
        layers = self.spikes.reduce(state.data.handle, state.tensor.handle, state.pipeline.handle)
        peaks = gather_peak_memory_mb(state.device, state.world.handle)
        return {
            **spike_scalars(layers),
            **{f"memory/peak_mb/rank{rank}": peak for rank, peak in enumerate(peaks)},
            **{f"time/{name}_ms": mean for name, mean in self.timers.mean_ms().items()},
            **self._traffic(),
        }

    def _traffic(self) -> dict[str, float]:
        """MB that all ranks together sent per iteration, by group, and what they were unpacked; collective."""
        groups = ("tensor", "data", "pipeline", "backward")
        mine = [statistics.total(group) for group in groups]
        iterations = 1e6 * max(self.iteration - self._counted_from, 1)
        self._counted_from = self.iteration
        statistics.reset()
        sums = self.engine.sum_over_ranks([t.bytes for t in mine] + [t.dense_bytes for t in mine])
        names = [f"communication/{group}_mb{form}" for form in ("", "_if_dense") for group in groups]
        return {name: value / iterations for name, value in zip(names, sums, strict=True)}

    def _count_skipped_samples(self) -> int | None:
        """Broken training samples replaced since this run began, over all replicas; None where that is not allowed."""
        if not self.config.data.skip_broken_samples:
            return None
        # All ranks of a replica that read images come to the same choice.
        mine = self._skipped_samples if self.state.is_first_stage and self.state.tensor.rank == 0 else 0
        return int(self.engine.sum_over_ranks([float(mine)])[0])

    def _evaluate_if(self, due: bool) -> None:
        if not due or self.datasets.valid is None:
            return
        assert self.reporter is not None
        totals = [0.0, 0.0, 0.0, 0.0]
        statistics.enable(False)  # what is logged is the traffic of training
        limit = self.config.logging.eval_iters
        with self.reporter.pause(), closing(self._loader(training=False).batches(limit=limit)) as batches:
            for batch in batches:
                totals = [a + b for a, b in zip(totals, self.engine.evaluate(self._inputs(batch)), strict=True)]
            loss, samples, top1, top5 = self.engine.total(totals)
        statistics.enable()
        self.reporter.evaluation(
            EvaluationRecord(
                self.iteration, self.consumed_samples, int(samples), loss / samples, top1 / samples, top5 / samples
            )
        )

    def _save_if(self, due: bool) -> None:
        folder = self.config.checkpoint.save
        if not due or folder is None or self._saved_at == self.iteration:
            return
        assert self.reporter is not None
        with self.reporter.pause():
            grid = self.state.grid
            path = checkpoint.save_checkpoint(
                folder,
                iteration=self.iteration,
                consumed_samples=self.consumed_samples,
                tensors=self.engine.tensors,
                optimizer=self.optimizer,
                extra=self._data_identity(),
                config=self._identity,
                layout={
                    "tensor": grid.tensor,
                    "pipeline": grid.pipeline,
                    "data": grid.data,
                    "bounds": layers_per_chunk(self.bounds),
                },
                is_writer=self.state.data.rank == 0,
                process_group=self.state.world.handle,
            )
        self._saved_at = self.iteration
        self.reporter.line(f"saved {path}")

    def close(self) -> None:
        assert self.reporter is not None
        self.reporter.close()


def _due(iteration: int, interval: int | None) -> bool:
    return interval is not None and iteration % interval == 0


def _identity(config: PretrainConfig, model_config: object) -> dict[str, dict[str, object]]:
    """What makes two models the same: dimensions, whatever the variant is called, and neuron, whatever its backend."""
    model, neuron = dict(to_dict(model_config)), dict(to_dict(config.neuron))
    model.pop("variant", None)
    neuron.pop("neuron_backend")
    return {"model": model, "neuron": neuron}

