#!/usr/bin/env bash
# torch 2.13: Schedule1F1B shows a list of actions that its loop does not run. The list of the last stage begins with
# micro-batch 1, never forwards micro-batch 0, and ends with a micro-batch that does not exist. The loop runs the right
# order, which is written once more in its own code. torch's own check of schedules refuses the list.

source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
packages torch==2.13.0 numpy==2.4.6
program <<'PY'
import datetime
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.schedules import _validate_schedule

MICRO_BATCHES = 4


class Recorded(nn.Linear):
    """Notes forwards and backwards in the order in which they run."""

    def __init__(self):
        super().__init__(3, 3)
        self.order = []

    def forward(self, x):
        y = super().forward(x)
        if torch.is_grad_enabled() and not x.is_meta:
            number = sum(each.startswith("F") for each in self.order)
            self.order.append(f"F{number}")
            y.register_hook(lambda grad: self.order.append(f"B{number}"))
        return y


def run(rank):
    store = f"file://{os.getcwd()}/store"
    dist.init_process_group("gloo", store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))
    torch.manual_seed(0)
    module = Recorded()
    x = torch.randn(1, 3, requires_grad=rank > 0)
    y = torch.randn(1, 3, requires_grad=True)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"), input_args=(x,), output_args=(y,))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=lambda y, target: (y - target).square().sum())
    batch = torch.randn(MICRO_BATCHES, 3)
    schedule.step(batch) if rank == 0 else schedule.step(target=batch)
    for shown in range(2):
        dist.barrier()
        if shown == rank:
            actions = [str(each)[1:] for each in schedule.pipeline_order[rank] if each and "GRAD" not in str(each)]
            print(f"stage {rank} shows: {' '.join(actions)}\nstage {rank} runs:  {' '.join(module.order)}", flush=True)
    dist.barrier()
    if rank == 0:
        try:
            _validate_schedule(schedule.pipeline_order, 2, 2, MICRO_BATCHES)
        except AssertionError as error:
            print("torch's check of the list:", str(error).splitlines()[0], flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(run, nprocs=2)
PY
expected <<'OUT'
stage 0 shows: F0 F1 B0 F2 B1 F3 B2 B3
stage 0 runs:  F0 F1 B0 F2 B1 F3 B2 B3
stage 1 shows: F1 B0 F2 B1 F3 B2 F4 B3
stage 1 runs:  F0 B0 F1 B1 F2 B2 F3 B3
torch's check of the list: Rank 1, step 1: Running Full Backward for stage 1, microbatch 0 without first running Forward
OUT
