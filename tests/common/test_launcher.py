"""Processes that Slurm or MPI has started, without torchrun."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megasnn import Engine
from megasnn.common.launcher import take_ranks
from tests.engine.test_engine import MODEL, SIZES

MEETING = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
SRUN = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
MPIEXEC = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"}
# One process: a batch script, an allocation, a step of one task.
ALONE = [
    {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"},
    {"SLURM_NTASKS": "8"},
    {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
    {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
    {},
]
TORCHRUN = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1"}


def ranks(environment: dict[str, str]) -> dict[str, str]:
    found = dict(environment)
    take_ranks(found)
    return {name: found[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in found}


def test_ranks_of_a_launcher_are_taken() -> None:
    assert ranks(SRUN | MEETING) == {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    assert ranks(MPIRUN | MEETING) == {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3"}
    assert ranks(MPIEXEC | MEETING) == {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    helpers = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}  # of mpirun, one for each host
    assert ranks(MPIRUN | helpers | MEETING) == ranks(MPIRUN | MEETING)
    by_hand = {"RANK": "5", "WORLD_SIZE": "8"}  # as many scripts export them
    assert ranks(SRUN | by_hand | MEETING) == {**by_hand, "LOCAL_RANK": "1"}


def test_one_process_and_those_of_torchrun_stay_as_they_are() -> None:
    for environment in ALONE:
        assert ranks(environment) == {}
    for launcher in (SRUN, MPIRUN, MPIEXEC):
        assert ranks(launcher | TORCHRUN | MEETING) == TORCHRUN


@pytest.mark.parametrize("launcher", [SRUN, MPIRUN, MPIEXEC])
def test_several_processes_that_cannot_meet_are_refused(
    launcher: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    for name in (*TORCHRUN, *MEETING):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=r"has started \d processes .* export .*, or let the step start one torchrun"):
        Engine(MODEL, **SIZES)
    assert not TORCHRUN.keys() & os.environ.keys()


PROGRAM = """
from megasnn.parallel.process_group import start_process_group
import torch.distributed as dist
start_process_group("cpu", 0.5)
for file in ("/proc/net/tcp", "/proc/net/tcp6"):
    for line in open(file).readlines()[1:]:
        _, address, _, state, *_ = line.split()
        if state == "0A" and int(address.split(":")[1], 16) == {port}:
            print(address.split(":")[0])
dist.destroy_process_group()
start_process_group("cpu", 0.5)
dist.destroy_process_group()
"""


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_ranks_of_one_host_meet_where_no_other_host_can_come(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": host, "MASTER_PORT": str(port)}
    command = [sys.executable, "-c", PROGRAM.format(port=port)]
    ended = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120)
    assert ended.stdout.split() == ["0100007F"], ended.stderr
