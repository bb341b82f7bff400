"""The name of the device that a rank computes on."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


def name_of(device: torch.device) -> str:
    """Of a GPU, or of the processor; costs that were measured are of the device with this name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()


def processor_name() -> str:
    """As the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    told = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(told, platform.processor() or platform.machine())
