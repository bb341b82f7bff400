#!/usr/bin/env bash
# torch 2.13, Gloo: some collectives take a tensor's memory for its elements, and report success.
# all_reduce of the view x[::2] sums the first half of x and leaves the second half alone. Two ranks whose tensors are
# equal but of different strides sum unlike elements; broadcast and all_to_all_single move memory, too. all_gather
# honours the strides of its input, and send refuses them: from one collective nothing follows for the next.

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
    rows = torch.arange(6.0).view(2, 3)
    turned = rows.t().contiguous().t()  # equal, in the other order of memory

    def tell(name, got, wanted):
        if rank == 1:
            print(f"{name}: {got.tolist()}, right: {torch.equal(got, wanted)}", flush=True)

    whole = torch.arange(8.0)
    dist.all_reduce(whole[::2])
    tell("all_reduce of x[::2], x = 0..7; x after it", whole, torch.tensor([0.0, 1, 4, 3, 8, 5, 12, 7]))

    mine = rows.clone() if rank == 0 else turned.clone(memory_format=torch.preserve_format)
    dist.all_reduce(mine)
    tell("all_reduce of equal matrices, rank 1's transposed in memory", mine, 2 * rows)

    mine = rows.clone() if rank == 0 else torch.zeros_like(turned)
    dist.broadcast(mine, src=0)
    tell("broadcast into a matrix transposed in memory", mine, rows)

    mine = torch.arange(8.0).view(2, 2, 1, 2).contiguous(memory_format=torch.channels_last)
    received = torch.zeros(2, 2, 1, 2)
    dist.all_to_all_single(received, mine)
    tell("all_to_all_single from channels_last, second half", received[1].flatten(), mine[1].flatten())

    lists = [torch.zeros(2, 3) for _ in range(2)]
    dist.all_gather(lists, turned)
    tell("all_gather from a matrix transposed in memory", lists[0], rows)

    try:
        dist.send(turned, 1 - rank)
    except (ValueError, RuntimeError) as error:
        if rank == 1:
            print("send of a matrix transposed in memory:", type(error).__name__, str(error).splitlines()[0], flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(run, nprocs=2)
PY
expected <<'OUT'
all_reduce of x[::2], x = 0..7; x after it: [0.0, 2.0, 4.0, 6.0, 4.0, 5.0, 6.0, 7.0], right: False
all_reduce of equal matrices, rank 1's transposed in memory: [[0.0, 3.0, 6.0], [4.0, 7.0, 10.0]], right: False
broadcast into a matrix transposed in memory: [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]], right: False
all_to_all_single from channels_last, second half: [4.0, 6.0, 5.0, 7.0], right: False
all_gather from a matrix transposed in memory: [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], right: True
send of a matrix transposed in memory: RuntimeError input tensor has to be contiguous
OUT
