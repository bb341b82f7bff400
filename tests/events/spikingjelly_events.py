"""SpikingJelly's readers of recordings and its integration into frames, to compare with.

Importing `spikingjelly.datasets` needs torchvision and torchaudio, of which these readers use nothing, and whose builds
may not fit torch's: while it is imported, stubs stand for them.
"""

from __future__ import annotations

import sys
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
