"""The grid on real ranks: made, read, used, freed, and made again in another shape; and the devices of ranks."""

from __future__ import annotations

import os
import re
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megasnn.common.grid import Grid
from megasnn.parallel.process_group import choose_device, start_process_group
from megasnn.parallel_state import (
    TASKS,
    Group,
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
        at, groups = state.coordinates, {name: getattr(state, name) for name in GROUPS}
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
    with pytest.raises(ValueError, match="multiple of 8"):
        initialize_model_parallel(tp=2, pp=4)
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


BUILDS: dict[str, tuple[str | None, str | None]] = {"cuda": ("13.0", None), "cpu": (None, None), "rocm": (None, "6.4")}


@pytest.mark.parametrize(
    ("gpus", "build", "shown", "chosen", "why"),
    [
        (4, "cuda", None, "cuda:3", ""),
        (1, "cuda", "0", "cuda:0", ""),
        (1, "cuda", None, "cpu", r"1 GPU.*4 ranks"),
        (0, "cuda", None, "cpu", "CUDA 13.0"),
        (0, "cpu", None, "cpu", "without CUDA"),
        (8, "rocm", None, "cpu", "ROCm 6.4"),
    ],
)
def test_the_last_of_four_ranks_takes_the_gpu_of_its_number_or_the_one_it_is_shown(
    monkeypatch: pytest.MonkeyPatch, gpus: int, build: str, shown: str | None, chosen: str, why: str
) -> None:
    cuda, hip = BUILDS[build]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "CUDA_VISIBLE_DEVICES": shown}.items():
        if value is not None:
            monkeypatch.setenv(name, value)
    device, told = choose_device("auto")
    assert str(device) == chosen and (re.search(why, told) if build != "cpu" else not told)
    assert choose_device("cpu") == (torch.device("cpu"), "")
    if why:
        with pytest.raises(ValueError, match=f"{why}.*--device cpu"):
            choose_device("cuda")


def test_ranks_that_do_not_know_their_number_on_a_host_do_not_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for asked in ("auto", "cuda"):
        with pytest.raises(ValueError, match="LOCAL_RANK is not set"):
            choose_device(asked)
    assert choose_device("cpu") == (torch.device("cpu"), "")


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


def test_a_rank_without_process_groups_has_its_groups_and_cannot_communicate() -> None:
    state = ParallelState.without_process_groups(Grid(pp=2, dp_replicate=2, tp=2), rank=6)
    assert (state.rank, state.coordinates.pp, state.coordinates.dp_replicate, state.coordinates.tp) == (6, 1, 1, 0)
    found = {name: (group.ranks, group.rank) for name, group in vars(state).items() if isinstance(group, Group)}
    assert found["tp"] == ((6, 7), 0) and found["dp"] == ((4, 6), 1) and found["pp"] == ((2, 6), 1)
    assert found["cp"] == ((6,), 0) and state.cp.handle is None
    with pytest.raises(RuntimeError, match="group tp of 2 ranks has no process group"):
        _ = state.tp.handle
