"""Check MegaSNN on the GPUs of this machine: every kernel, a step of both models, SpikingJelly beside them.

    python tools/check_gpu.py
    python tools/check_gpu.py --parts kernels speeds

Takes less than ten minutes on one GPU. Each part, of each model, is a process: what fails, dies or hangs is a row of
its own. Prints a table and one JSON line, which is also appended to --output. The exit status is 0 where all targets
are met, 1 where one is missed or a part has failed, 2 where nothing was checked: without a GPU, or with flags that are
wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

if __name__ == "__main__":  # `python tools/check_gpu.py`, from any folder; ranks are started with the same path
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from megasnn.comm.world import why_no_gpu
from megasnn.config.cli import command_line
from megasnn.kernels.triton.available import refuses
from megasnn.process.terminal import keep_going
from tools.benchmark import (
    gpu_kernels,
    gpu_models,
    gpu_parity,
    gpu_products,
    gpu_ranks,
    gpu_speeds,
    gpu_step,
)
from tools.benchmark.gpu import NO_GPU, Figure, Part, Setting
from tools.benchmark.gpu_ranks import TWO_GPUS, numbers_of_ranks, numbers_of_stages
from tools.benchmark.gpu_step import model_names
from tools.benchmark.gpu_units import check


def versions(setting: Setting, case: str = "") -> Iterator[Figure]:
    """Of torch, CUDA and cuDNN as numbers; and whether the kernels can be used."""
    for name, version in (("torch", torch.__version__), ("CUDA", torch.version.cuda or "0")):
        yield Figure(name, float(".".join(version.split(".")[:2])), note=version)
    yield Figure("cuDNN", torch.backends.cudnn.version() or 0)
    if setting.is_gpu:
        major, minor = torch.cuda.get_device_capability(setting.device)
        yield Figure("GPUs", torch.cuda.device_count(), note=torch.cuda.get_device_name(setting.device))
        yield Figure("compute capability", major + minor / 10, least=8.0)
        why = refuses(torch.zeros(2, 2, device=setting.device))
        yield Figure("kernels refused", why is not None, most=0, note=why or "")


PARTS: dict[str, Part] = {
    "versions": Part(versions, 60.0),
    "kernels": Part(gpu_kernels.errors, 180.0),
    "exactness": Part(gpu_products.exactness, 90.0),
    "speeds": Part(gpu_speeds.speeds, 60.0),
    "parity": Part(gpu_parity.parity, 120.0),
    "step": Part(gpu_step.waits_and_launches, 60.0, model_names),
    "memory": Part(gpu_step.memory, 60.0, model_names),
    "graphs": Part(gpu_step.graphs, 90.0, model_names),
    "spikingjelly": Part(gpu_models.beside_spikingjelly, 180.0, model_names),
    "elsewhere": Part(gpu_models.elsewhere, 60.0, model_names),
    "fp32": Part(gpu_models.of_fp32, 120.0, model_names),
    "layouts": Part(gpu_ranks.layouts, 120.0, numbers_of_ranks, TWO_GPUS),
    "schedules": Part(gpu_ranks.schedules, 200.0, numbers_of_stages, TWO_GPUS),
}


@dataclass(frozen=True)
class Options:
    """Check MegaSNN on the GPUs of this machine."""

    parts: tuple[str, ...] = tuple(PARTS)
    """Which parts, in this order; layouts and schedules need two GPUs or more."""
    output: Path = Path("check_gpu.jsonl")
    """File to append the JSON line to."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = command_line(Options, arguments, description=__doc__)
    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        print(f"--parts: {', '.join(unknown)} is none of {', '.join(PARTS)}", file=sys.stderr)
        return NO_GPU
    if not options.output.absolute().parent.is_dir():
        print(f"--output {options.output}: there is no such folder; make it, or name another", file=sys.stderr)
        return NO_GPU
    if not torch.cuda.is_available():
        print(f"there is no GPU that torch can use, so nothing was checked: {why_no_gpu()}", file=sys.stderr)
        return NO_GPU
    return check({name: PARTS[name] for name in options.parts}, Setting(torch.device("cuda", 0)), options.output)


if __name__ == "__main__":
    keep_going()
    sys.exit(main())
