"""SpikingJelly's own model under DDP, trained by a MegaSNN recipe with the same samples in the same order.

    torchrun --standalone --nproc-per-node 2 -m tools.benchmark.spikingjelly_run --config vgg_dvs/cifar10 \\
        --data-path "cifar10/train-{00000..00009}.tar" --valid-data-path "cifar10/test-{00000..00001}.tar"

Takes the flags of `python -m megasnn vgg_dvs`. `--exit-duration-in-mins 2` measures throughput only. `--compile` as the
first flag compiles the model. Loaders, learning rates and weight decay are MegaSNN's.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from spikingjelly.activation_based import functional
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from megasnn.config.optimizer import OPTIMIZERS
from megasnn.data import BatchLoader, BatchShare, MicroBatch, open_datasets
from megasnn.data.loader import epoch_samples
from megasnn.data.preprocess.sample import shards_of_sample
from megasnn.models.registry import MODELS
from megasnn.optim.rates import learning_rate
from megasnn.parallel.process_group import COMMUNICATION_BACKENDS, choose_device
from megasnn.pretraining import configuration
from tools.benchmark.steps import spikingjelly_model


class Run:
    """A training on this rank, with one micro-batch of each global batch."""

    def __init__(self, argv: Sequence[str], compiled: bool) -> None:
        config = configuration(MODELS["vgg_dvs"], argv)
        data = config.data
        training = config.training
        self.config = config
        self.device, _ = choose_device(config.parallel.device)
        distributed.init_process_group(COMMUNICATION_BACKENDS[self.device.type])
        self.rank = distributed.get_rank()
        ranks = distributed.get_world_size()
        sets = open_datasets(data, config.model.input_shape, config.model.num_classes, shards_of_sample)
        self.length = training.length(epoch_samples(len(sets.train), training.global_batch_size, data.last_batch))
        share = BatchShare(training.global_batch_size, training.micro_batch_size, ranks, self.rank)
        self.samples = BatchLoader(sets.train, share, data, training.seed)
        self.validation: BatchLoader | None = None
        if sets.valid:
            self.validation = BatchLoader(sets.valid, share, data, training.seed, training=False)
        torch.manual_seed(training.seed)
        self.net = spikingjelly_model(config.model, config.neuron).to(self.device)
        options = config.optimizer
        parameters = list(self.net.parameters())
        groups = [
            {"params": [each for each in parameters if each.ndim > 1], "weight_decay": options.weight_decay},
            {"params": [each for each in parameters if each.ndim <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = OPTIMIZERS[options.optimizer].build(groups, lr=options.lr, **options.build_options)
        shared = DistributedDataParallel(self.net, broadcast_buffers=False)
        self.forward = torch.compile(shared) if compiled else shared

    def step(self, batch: MicroBatch, iteration: int) -> float:
        """Takes a step and returns the mean loss of the micro-batch."""
        optimizer = self.config.optimizer
        smoothing = self.config.training.label_smoothing
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(optimizer, iteration, self.length.iterations, self.length.epoch)
        self.optimizer.zero_grad()
        images, labels = self._on_device(batch)
        loss = F.cross_entropy(self.forward(images).mean(0), labels, label_smoothing=smoothing)
        loss.backward()
        if optimizer.clip_grad:
            nn.utils.clip_grad_norm_(self.net.parameters(), optimizer.clip_grad)
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def accuracy(self) -> float:
        """Top-1 accuracy on the validation samples, with running statistics averaged over the ranks."""
        for each in self.net.buffers():
            if each.is_floating_point():
                distributed.all_reduce(each)
                each /= distributed.get_world_size()
        counts = torch.zeros(2, device=self.device)
        self.net.eval()
        batches = self.validation.batches() if self.validation else ()
        for batch in batches:
            for micro_batch in batch.micro_batches:
                images, labels = self._on_device(micro_batch)
                correct = self.net(images).mean(0).argmax(1) == labels
                counts += torch.stack([correct.sum(), torch.ones_like(labels).sum()])
        self.net.train()
        distributed.all_reduce(counts)
        return float(counts[0] / counts[1].clamp(min=1))

    def close(self) -> None:
        """Ends the loaders and leaves the process group."""
        self.samples.close()
        # The reducer goes first. Were it the group's last owner, it would join Gloo's threads while it holds the
        # interpreter's lock, and a thread that frees a tensor waits for that lock: the rank would never end.
        del self.forward
        gc.collect()
        distributed.destroy_process_group()

    def _on_device(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        assert isinstance(batch.inputs, Tensor) and batch.targets is not None
        functional.reset_net(self.net)
        return batch.inputs.to(self.device), batch.targets.to(self.device)


def main(argv: Sequence[str]) -> None:
    """Trains, and prints on rank 0."""
    compiled = list(argv[:1]) == ["--compile"]
    run = Run(argv[1:] if compiled else argv, compiled)
    logging = run.config.logging
    minutes = run.config.training.exit_duration_in_mins or float("inf")
    begin = since = time.perf_counter()
    for done, batch in enumerate(run.samples.batches(limit=run.length.iterations), 1):
        loss = run.step(batch.micro_batches[0], done - 1)
        text = ""
        last = torch.tensor(float(done == run.length.iterations), device=run.device)
        if done % logging.log_interval == 0:
            now = time.perf_counter()
            text = f" | loss {loss:.3f} | {logging.log_interval * batch.size / (now - since):.0f} samples/s"
            last += now - begin > 60 * minutes
            distributed.broadcast(last, 0)
            since = now
        if last or (logging.eval_interval and done % logging.eval_interval == 0):
            text += f" | top-1 {run.accuracy():.2%}"
            since = time.perf_counter()
        if text and run.rank == 0:
            print(f"iteration {done}{text} | {time.perf_counter() - begin:.0f} s", flush=True)
        if last:
            break
    run.close()


if __name__ == "__main__":
    main(sys.argv[1:])
