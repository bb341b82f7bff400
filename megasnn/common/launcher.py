"""Programs that start ranks: Slurm's srun and MPI without torchrun, and the error file of torchrun."""

from __future__ import annotations

import json
import os
import time
from collections.abc import MutableMapping
from pathlib import Path

# Variables of rank, number of ranks, rank on this host. MPI comes before srun: mpirun starts its helpers by srun, whose
# variables then count the helpers. Batch scripts and salloc set most of Slurm's variables in one process, too, but not
# the size of a step.
_LAUNCHERS = {
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
}
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def take_ranks(environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets RANK, WORLD_SIZE and LOCAL_RANK from the launcher's variables, unless torchrun has.

    Raises ValueError if MASTER_ADDR or MASTER_PORT is missing.
    """
    for launcher, names in _LAUNCHERS.items():
        size = environment.get(names[1], "1")
        if not size.isdecimal() or int(size) < 2 or names[0] not in environment:
            continue
        if environment.get("WORLD_SIZE", size) != size:
            # The launcher has started torchruns, and WORLD_SIZE counts their ranks.
            return
        if not {"MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
            raise ValueError(
                f"{launcher} has started {size} processes ({names[1]}), and MASTER_ADDR and MASTER_PORT, where they "
                "meet, are not set: export the first host's name and a free port, or let the step start one torchrun "
                f"on each host (docs/clusters.md); for {size} runs of one process each, unset {names[1]}"
            )
        for ours, theirs in zip(_NAMES, names, strict=True):
            if theirs in environment:
                environment.setdefault(ours, environment[theirs])
        return


def torchrun_reports() -> bool:
    """Whether torchrun prints this rank's error, from a file."""
    return bool(os.environ.get(_ERROR_FILE))


def report_to_torchrun(sentence: str) -> None:
    """Writes an error for torchrun, which prints it below "Root Cause" without a traceback."""
    # In a message of text alone torchrun misses a place for the exit status, and warns of that.
    message = {"message": sentence, "extraInfo": {"timestamp": str(int(time.time()))}}
    Path(os.environ[_ERROR_FILE]).write_text(json.dumps({"message": message}))
