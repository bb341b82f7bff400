"""The grid on real ranks: made, read, used, freed, and made again in another shape; and the devices of ranks."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megasnn.parallel import process_group
from megasnn.parallel.process_group import choose_device, start_process_group
from megasnn.parallel_state import (
    TASKS,
    ParallelState,
    destroy_model_parallel,
    get_parallel_state,
    initialize_model_parallel,
    model_parallel_is_initialized,
)

GROUPS = [each.name for each in fields(ParallelState) if each.type == "Group"]
EVERYBODY = list(range(8))
# Of rank 5 of 8: sizes, the index along (pp, dp_replicate, tp), and its groups, in Megatron's order.
LAYOUTS: list[tuple[dict[str, int], tuple[int, int, int], dict[str, list[int]]]] = [
    ({"tp": 2, "pp": 2}, (1, 0, 1), {"tp": [4, 5], "dp": [5, 7], "pp": [1, 5], "pp_down": [1, 5]}),
    ({"tp": 4}, (0, 1, 1), {"tp": [4, 5, 6, 7], "dp": [1, 5], "pp": [5]}),
    ({"pp": 4}, (2, 1, 0), {"tp": [5], "dp": [4, 5], "pp": [1, 3, 5, 7]}),
    ({}, (0, 5, 0), {"tp": [5], "dp": EVERYBODY, "pp": [5], "cp": [5], "dp_cp": EVERYBODY}),
    ({"tp": 2, "pp": 4}, (2, 0, 1), {"tp": [4, 5], "dp": [5], "pp": [1, 3, 5, 7], "world": EVERYBODY}),
    (
        {"dp_shard": 2, "cp": 2},
        (0, 1, 0),
        {
            **{"dp_shard": [5, 7], "dp_shard_grad": [5, 7], "cp": [4, 5], "dp": [1, 3, 5, 7]},
            **{"dp_replicate": [1, 5], "dp_replicate_cp": [0, 1, 4, 5], "dp_cp": EVERYBODY},
        },
    ),
]


def grids() -> tuple[int, int]:
    """Groups of each layout, and the sum of all members' ranks through each of them; and what is left behind: process
    groups that torch knows of, and open files (sockets among them)."""
    for sizes, (pp, dp_replicate, tp), expected in LAYOUTS:
        state = initialize_model_parallel(**sizes)
        at, groups = state.place, {name: getattr(state, name) for name in GROUPS}
        assert get_parallel_state() is state and at.pp == state.pp.rank
        if state.rank == 5:
            assert (at.pp, at.dp_replicate, at.tp) == (pp, dp_replicate, tp)
            assert {name: list(groups[name].ranks) for name in expected} == expected
        for group in groups.values():
            total = torch.tensor([float(state.rank)])
            if group.size > 1:
                dist.all_reduce(total, group=group.handle)
                assert dist.get_rank(group.handle) == group.rank
            assert total == sum(group.ranks) and group.ranks[group.rank] == state.rank
            assert (group.handle is None) == (group.size == 1)
        assert state.dp_shard.size == 1 or state.dp_shard_grad.handle is not state.dp_shard.handle
        assert state.pp.size == 1 or state.pp_down.handle is not state.pp.handle
        destroy_model_parallel()
        destroy_model_parallel()  # does nothing
        assert not model_parallel_is_initialized()
        assert all(
            group.size == 1 or pytest.raises(RuntimeError, getattr, group, "handle") for group in groups.values()
        )
    dist.barrier()  # a socket closes when its peer has closed too
    return len(dist.distributed_c10d._world.pg_map), len(os.listdir("/proc/self/fd"))


def test_grids_one_after_another_leave_nothing_behind(ranks) -> None:
    first = ranks(8, grids)
    for (_, before), (groups, files) in zip(first, ranks(8, grids), strict=True):
        assert groups == 1 and files <= before + 8  # the world's


def refusals() -> None:
    for tensor, pipeline, named in ((3, 1, "tensor-.* 3"), (2, 4, "multiple of 8"), (0, 1, "--tensor"), (1, -1, "-1")):
        with pytest.raises(ValueError, match=named):
            initialize_model_parallel(tp=tensor, pp=pipeline)
        assert not model_parallel_is_initialized()
    initialize_model_parallel(tp=2)
    with pytest.raises(RuntimeError, match="pp 1 x dp_replicate 2 x tp 2.*destroy_model_parallel"):
        initialize_model_parallel(pp=2)
    destroy_model_parallel()
    world: Any = dist.group.WORLD
    world.bound_device_id = torch.device("cpu", 0)
    with pytest.raises(ValueError, match="device_id"):
        initialize_model_parallel(pp=2)
    world.bound_device_id = None
    assert not model_parallel_is_initialized()


def test_what_does_not_fit_is_refused(ranks) -> None:
    ranks(4, refusals)


def test_without_ranks_every_group_is_this_process() -> None:
    with pytest.raises(RuntimeError, match="initialize_model_parallel"):
        get_parallel_state()
    state = initialize_model_parallel()
    try:
        assert all(getattr(state, name).size == 1 and getattr(state, name).handle is None for name in GROUPS)
        assert state.rank == 0
    finally:
        destroy_model_parallel()
    with pytest.raises(ValueError, match="world size 1 .*--tensor-model-parallel-size 2"):
        initialize_model_parallel(tp=2)


@pytest.fixture
def machine(monkeypatch):
    """A machine with some GPUs that `sharing` ranks see, of which this is the one with a local rank."""

    def made(gpus: int, cuda: str | None = "13.0", hip: str | None = None, local_rank: int = 0, sharing: int = 2):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(process_group, "_place", (local_rank, sharing))

    return made


@pytest.mark.parametrize(
    ("backend", "device", "gpus", "named"),
    [("nccl", "cpu", 1, r"2 rank.*1 GPU"), ("auto", "cuda", 1, r"2 rank.*1 GPU"), ("auto", "cuda", 0, "--device cpu")],
)
def test_devices_that_are_not_there(machine, backend, device, gpus, named) -> None:
    machine(gpus, cuda=None)
    with pytest.raises(ValueError, match=named):
        start_process_group(backend, device)


@pytest.mark.parametrize(
    ("asked", "gpus", "cuda", "named"),
    [
        ("auto", 1, "13.0", "--backend gloo --device cuda"),
        ("auto", 0, "13.0", "CUDA 13.0"),
        ("auto", 0, None, ""),
        ("cpu", 1, "13.0", ""),
    ],
)
def test_a_run_that_falls_back_to_the_cpu_says_why(machine, asked, gpus, cuda, named) -> None:
    machine(gpus, cuda)
    device, why = choose_device("auto", asked)
    assert device.type == "cpu" and named in why and bool(why) == bool(named)


@pytest.mark.parametrize("local_rank, gpu", [(0, 0), (1, 1), (2, 0)])
def test_ranks_share_a_gpu_with_gloo(machine, monkeypatch, local_rank, gpu) -> None:
    machine(2, local_rank=local_rank, sharing=3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert start_process_group("gloo", "cuda") == torch.device("cuda", gpu)


SLURM = {"each its own": ["a", "b", "c", "d"], "two by two": ["a", "a", "b", "b"], "all the same": ["a"] * 4}


def devices_where_each_sees_one(seen: list[str]) -> list[str]:
    """Devices by `--device auto` and `--device cuda` of a rank of four on one machine, each of which sees one GPU."""
    rank, found = dist.get_rank(), []
    local = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "4"}
    with (
        mock.patch.dict(os.environ, local),
        mock.patch.object(process_group, "visible_gpus", lambda: [seen[rank]]),
        mock.patch.object(torch.cuda, "device_count", lambda: 1),
        mock.patch.object(process_group, "_place", None),
    ):
        store = dist.PrefixStore(" ".join(seen), _get_default_store())
        process_group._find_place(store, "auto")
        for asked in ("auto", "cuda"):
            try:
                found.append(str(choose_device("auto", asked)[0]))
            except ValueError as error:
                found.append(str(error))
    return found


@pytest.mark.parametrize("name", SLURM)
def test_ranks_that_see_one_gpu_each_take_it(ranks, name: str) -> None:
    for auto, cuda in ranks(4, devices_where_each_sees_one, SLURM[name]):
        if name == "each its own":
            assert auto == cuda == "cuda:0"
        else:
            assert auto == "cpu" and f"{4 if name == 'all the same' else 2} ranks" in cuda


def test_rocm_is_refused_by_name(machine) -> None:
    machine(8, cuda=None, hip="6.4")
    with pytest.raises(ValueError, match="ROCm 6.4"):
        choose_device("auto", "cuda")
    device, why = choose_device("auto", "auto")
    assert device.type == "cpu" and "ROCm 6.4" in why


def policies() -> list[int]:
    initialize_model_parallel(pp=2)
    tasks = [task for task in TASKS.iterdir() if (task / "comm").read_text().startswith("gloo")]
    found = [os.sched_getscheduler(int(task.name)) for task in tasks]
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    destroy_model_parallel()
    return found


@pytest.mark.skipif(not TASKS.is_dir(), reason="needs Linux's /proc")
@pytest.mark.skipif(torch.__version__ < (2, 13), reason="Gloo's threads have no name before torch 2.13")
def test_transport_does_not_interrupt_computing(ranks) -> None:
    for found in ranks(2, policies):
        assert found and set(found) == {os.SCHED_BATCH}


def test_kernels_of_a_pipeline_are_loaded_with_their_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is loaded at its first launch waits for all that the GPU does, a posted receive included."""
    monkeypatch.setenv("CUDA_MODULE_LOADING", "")
    monkeypatch.delenv("CUDA_MODULE_LOADING")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    start_process_group(device="cpu")
    assert "CUDA_MODULE_LOADING" not in os.environ
    start_process_group(device="cpu", stages=2)
    assert os.environ["CUDA_MODULE_LOADING"] == "EAGER"
