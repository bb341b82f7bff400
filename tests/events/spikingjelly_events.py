"""SpikingJelly's readers of recordings and its integration into frames, to compare with.

<<<<<<< HEAD
Importing `spikingjelly.datasets` needs torchvision and torchaudio, of which these readers use nothing, and whose builds
may not fit torch's: while it is imported, stubs stand for them.
=======
`spikingjelly.datasets` imports torchaudio and torchvision, which nothing else here needs, nor do these functions.
>>>>>>> main
"""

from __future__ import annotations

import sys
<<<<<<< HEAD
from importlib import import_module
from unittest import mock

NOT_NEEDED = (
    "torchvision",
    "torchvision.datasets",
    "torchvision.datasets.utils",
    "torchvision.transforms",
    "torchaudio",
)
STUBS = {name: mock.MagicMock(DatasetFolder=object) for name in NOT_NEEDED}

sys.modules.update(STUBS)
try:
    utils = import_module("spikingjelly.datasets.utils")
    cifar10_dvs = import_module("spikingjelly.datasets.cifar10_dvs")  # reads AEDAT 2.0
finally:
    for name in STUBS:  # not all that was imported meanwhile, which may be imported once only
        del sys.modules[name]
=======
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
>>>>>>> main
