#!/usr/bin/env bash
# torch 2.13, Gloo: a receive into a tensor that autograd has saved gives a wrong gradient without an error.
# All other writes raise the tensor's version counter, and backward refuses a changed tensor. recv, broadcast and
# all_reduce write their results without raising it. all_gather_single and reduce_scatter_single raise it.

source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
packages torch==2.13.0 numpy==2.4.6
program <<'PY'
import datetime
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank):
    store = f"file://{os.getcwd()}/store"
    dist.init_process_group("gloo", store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))

    def receive(buffer):
        dist.send(torch.full((2,), 7.0), 1) if rank == 0 else dist.recv(buffer, 0)

    writes = {
        "fill_": lambda buffer: buffer.fill_(7.0),
        "recv": receive,
        "broadcast": lambda buffer: dist.broadcast(buffer if rank else torch.full((2,), 7.0), 0),
        "all_reduce": dist.all_reduce,
        "all_gather_single": lambda buffer: dist.all_gather_single(buffer, torch.ones(1)),
        "reduce_scatter_single": lambda buffer: dist.reduce_scatter_single(buffer, torch.ones(4)),
    }
    for name, write in writes.items():
        weight = torch.tensor([2.0, 2.0], requires_grad=True)
        buffer = torch.tensor([3.0, 3.0])
        loss = (weight * buffer).sum()
        write(buffer)
        try:
            loss.backward()
            result = f"gradient {weight.grad.tolist()} in place of [3.0, 3.0]"
        except RuntimeError:
            result = "backward refuses the changed tensor"
        if rank == 1:
            print(f"{name}: {result}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(run, nprocs=2)
PY
expected <<'OUT'
fill_: backward refuses the changed tensor
recv: gradient [7.0, 7.0] in place of [3.0, 3.0]
broadcast: gradient [7.0, 7.0] in place of [3.0, 3.0]
all_reduce: gradient [6.0, 6.0] in place of [3.0, 3.0]
all_gather_single: backward refuses the changed tensor
reduce_scatter_single: backward refuses the changed tensor
OUT
