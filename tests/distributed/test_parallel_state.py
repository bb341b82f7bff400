"""The grid on real ranks: made, read, used, freed, and made again in another shape."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from megasnn import parallel_state
from megasnn.parallel import world
from megasnn.parallel.group import TASKS
from megasnn.parallel_state import (
    destroy_model_parallel,
    get_parallel_state,
    initialize_model_parallel,
    model_parallel_is_initialized,
)
from megasnn.training import startup_log as introduction

AXES = ("tensor", "data", "pipeline", "downward", "model", "world")


def _describe(grids: list[tuple[int, int]]) -> list[dict]:
    """For each (tensor, pipeline): the groups of this rank, and the sum of all members' ranks through each of them."""
    found = []
    for tensor, pipeline in grids:
        state = initialize_model_parallel(tensor, pipeline)
        view: dict = {"coordinates": state.coordinates, "rank": state.rank}
        for axis in AXES:
            group = getattr(state, axis)
            total = torch.tensor([float(state.rank)])
            if group.size > 1:
                dist.all_reduce(total, group=group.handle)
                assert dist.get_rank(group.handle) == group.rank
            assert (group.handle is None) == (group.size == 1) and group.ranks[group.rank] == state.rank
            view[axis] = (list(group.ranks), total.item())
        found.append(view)
        destroy_model_parallel()
    return found


# rank 5 of 8 on each grid (tensor, pipeline): coordinates are (pipeline, data, tensor)
EXPECTED_OF_RANK_5 = {
    (2, 2): ((1, 0, 1), {"tensor": [4, 5], "data": [5, 7], "pipeline": [1, 5], "model": [0, 1, 4, 5]}),
    (4, 1): ((0, 1, 1), {"tensor": [4, 5, 6, 7], "data": [1, 5], "pipeline": [5], "model": [4, 5, 6, 7]}),
    (1, 4): ((2, 1, 0), {"tensor": [5], "data": [4, 5], "pipeline": [1, 3, 5, 7], "model": [1, 3, 5, 7]}),
    (1, 1): ((0, 5, 0), {"tensor": [5], "data": list(range(8)), "pipeline": [5], "model": [5]}),
    (8, 1): ((0, 0, 5), {"tensor": list(range(8)), "data": [5], "pipeline": [5], "model": list(range(8))}),
    (1, 8): ((5, 0, 0), {"tensor": [5], "data": [5], "pipeline": list(range(8)), "model": list(range(8))}),
    (2, 4): ((2, 0, 1), {"tensor": [4, 5], "data": [5], "pipeline": [1, 3, 5, 7], "model": list(range(8))}),
}


def test_grids_one_after_another_in_megatrons_order(ranks) -> None:
    everyone = ranks(8, _describe, list(EXPECTED_OF_RANK_5))
    for index, (place, groups) in enumerate(EXPECTED_OF_RANK_5.values()):
        view = everyone[5][index]
        where = view["coordinates"]
        assert (where.pipeline, where.data, where.tensor) == place
        for axis, members in {**groups, "downward": groups["pipeline"], "world": list(range(8))}.items():
            assert view[axis][0] == members
        for rank, views in enumerate(everyone):
            assert views[index]["rank"] == rank
            for axis in AXES:
                members, total = views[index][axis]
                assert rank in members and total == sum(members)
                assert all(everyone[other][index][axis][0] == members for other in members)


def _resources() -> tuple[int, int]:
    """Process groups that torch knows of, and open files (sockets among them)."""
    return len(dist.distributed_c10d._world.pg_map), len(os.listdir("/proc/self/fd"))


def _resources_over_many_grids() -> list[tuple[int, int]]:
    counts = []
    for _ in range(4):
        for tensor, pipeline in ((2, 2), (1, 1), (4, 1), (2, 1)):
            initialize_model_parallel(tensor, pipeline)
            destroy_model_parallel()
        # A socket closes when its peer has closed too.
        dist.barrier()
        counts.append(_resources())
    return counts


def test_destroy_frees_the_groups(ranks) -> None:
    for counts in ranks(4, _resources_over_many_grids):
        assert [groups for groups, _ in counts] == [1] * 4  # the world's
        assert counts[-1][1] <= counts[0][1] + 8


def _accessors() -> dict[str, object]:
    state = initialize_model_parallel(2, 2)
    assert get_parallel_state() is state and model_parallel_is_initialized()
    names = [name for name in dir(parallel_state) if name.startswith(("get_", "is_pipeline"))]
    found = {name: getattr(parallel_state, name)() for name in names}
    for axis, group in (("tensor_model", state.tensor), ("pipeline_model", state.pipeline), ("data", state.data)):
        assert found[f"get_{axis}_parallel_group"] is group
    assert found["get_model_parallel_group"] is state.model
    destroy_model_parallel()
    destroy_model_parallel()  # does nothing
    assert not model_parallel_is_initialized()
    return {name: value for name, value in found.items() if isinstance(value, (int, bool))}


def test_megatrons_accessors(ranks) -> None:
    everyone = ranks(4, _accessors)
    for rank, found in enumerate(everyone):
        assert found == {
            "get_tensor_model_parallel_world_size": 2,
            "get_tensor_model_parallel_rank": rank % 2,
            "get_pipeline_model_parallel_world_size": 2,
            "get_pipeline_model_parallel_rank": rank // 2,
            "get_context_parallel_world_size": 1,
            "get_context_parallel_rank": 0,
            "get_data_parallel_world_size": 1,
            "get_data_parallel_rank": 0,
            "is_pipeline_first_stage": rank < 2,
            "is_pipeline_last_stage": rank >= 2,
        }


def _refusals() -> list[str]:
    messages = []
    for tensor, pipeline in ((3, 1), (2, 4), (0, 1), (1, -1)):
        with pytest.raises(ValueError) as raised:
            initialize_model_parallel(tensor, pipeline)
        messages.append(str(raised.value))
        assert not model_parallel_is_initialized()
    initialize_model_parallel(2, 1)
    with pytest.raises(RuntimeError, match="a grid exists already .*destroy_model_parallel") as twice:
        initialize_model_parallel(1, 2)
    destroy_model_parallel()
    return [*messages, str(twice.value)]


def test_sizes_that_do_not_fit_are_refused_with_every_factor(ranks) -> None:
    for three, eight, zero, negative, twice in ranks(4, _refusals):
        assert "world size 4" in three and "tensor 3 x pipeline 1" in three
        assert "world size 4" in eight and "tensor 2 x pipeline 4" in eight and "multiple of 8" in eight
        assert "tensor" in zero and "got 0" in zero and "pipeline" in negative and "got -1" in negative
        assert "pipeline 1 x data 2 x tensor 2" in twice


def test_without_ranks_every_group_is_this_process() -> None:
    with pytest.raises(RuntimeError, match="call initialize_model_parallel first"):
        get_parallel_state()
    state = initialize_model_parallel()
    try:
        assert all(getattr(state, axis).size == 1 and getattr(state, axis).handle is None for axis in AXES)
        assert state.is_first_stage and state.is_last_stage and state.rank == 0
        with pytest.raises(ValueError, match="world size 1 is not tensor 2"):
            destroy_model_parallel()
            initialize_model_parallel(2)
    finally:
        destroy_model_parallel()


@pytest.mark.parametrize("backend, device", [("nccl", "cpu"), ("auto", "cuda")])
def test_devices_that_are_not_there(monkeypatch, backend, device) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"2 rank.*1 GPU\(s\)"):
        world.start_process_group(backend, device)


@pytest.mark.parametrize(
    ("asked", "gpus", "cuda", "why"),
    [
        ("auto", 1, "13.0", "2 ranks on this machine and 1 GPU(s); they share with --backend gloo --device cuda"),
        ("auto", 0, "13.0", f"torch {torch.__version__} is built for CUDA 13.0 and finds none; see whether nvidia-smi"),
        ("auto", 0, None, None),
        ("auto", 2, "13.0", None),
        ("cpu", 1, "13.0", None),
    ],
)
def test_a_run_that_falls_back_to_the_cpu_says_why(monkeypatch, asked, gpus, cuda, why) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    found = world.why_not_on_gpus(asked)
    assert found is None if why is None else found is not None and found.startswith(why)
    in_log = introduction._device(torch.device("cpu"), asked)
    assert in_log.endswith("a rank" if why is None else f"a rank ({found})")


def test_without_a_gpu_it_says_why(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ValueError, match="finds no GPU: torch .* is built without CUDA; .*; or use --device cpu$"):
        world.start_process_group("auto", "cuda")


def _refused_on_gpus(backend: str) -> str:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError) as raised:
        patch.setattr(dist, "get_backend", lambda: backend)
        initialize_model_parallel(1, 2, torch.device("cuda"))
    assert not model_parallel_is_initialized()
    return str(raised.value)


def test_a_transport_for_gpus_alone_is_refused(ranks) -> None:
    assert all("or give 'cpu:gloo,cuda:nccl'" in text for text in ranks(2, _refused_on_gpus, "nccl"))


@pytest.mark.parametrize("local_rank, gpu", [(0, 0), (1, 1), (2, 0)])
def test_ranks_share_a_gpu_with_gloo(monkeypatch, local_rank, gpu) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert world.start_process_group("gloo", "cuda") == torch.device("cuda", gpu)


def _policies() -> list[int]:
    state = initialize_model_parallel(1, 2)
    tasks = [task for task in TASKS.iterdir() if (task / "comm").read_text().startswith("gloo")]
    policies = [os.sched_getscheduler(int(task.name)) for task in tasks]
    assert os.sched_getscheduler(0) == os.SCHED_OTHER and state.pipeline.size == 2
    destroy_model_parallel()
    return policies


@pytest.mark.skipif(not TASKS.is_dir(), reason="needs Linux's /proc")
@pytest.mark.skipif(torch.__version__ < (2, 13), reason="Gloo's threads have no name before torch 2.13")
def test_transport_does_not_interrupt_computing(ranks) -> None:
    for policies in ranks(2, _policies):
        assert policies and set(policies) == {os.SCHED_BATCH}
