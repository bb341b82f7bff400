"""SpikingJelly's readers of recordings and its integration into frames, to compare with.

`spikingjelly.datasets` imports torchaudio and torchvision, which nothing else here needs, nor do these functions.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import spikingjelly

_NAMES = {"DatasetFolder": object} | dict.fromkeys(("transforms", "check_integrity", "download_url", "extract_archive"))


@cache
def spikingjelly_module(name: str) -> ModuleType:
    """Module of `spikingjelly.datasets`: utils, or cifar10_dvs, which reads AEDAT 2.0."""
    package, torchvision = ModuleType("spikingjelly.datasets"), SimpleNamespace(**_NAMES)
    package.__path__ = [str(Path(spikingjelly.__file__).parent / "datasets")]
    places = ["torchvision", "torchvision.datasets", "torchvision.datasets.utils"]
    with patch.dict(sys.modules, {"spikingjelly.datasets": package, **dict.fromkeys(places, torchvision)}):
        return import_module(f"spikingjelly.datasets.{name}")
