"""Parts of a check that go wrong, each in its own way, in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tools.benchmark.gpu import Figure, Setting


def gives(setting: Setting, case: str) -> Iterator[Figure]:
    yield Figure("process", os.getpid())
    yield Figure("share", 0.9, "x", least=0.8, note=f"of a copy, {case}")


def is_slow(setting: Setting, case: str) -> Iterator[Figure]:
    yield Figure("share", 0.79, "x", least=0.8)


def raises(setting: Setting, case: str) -> Iterator[Figure]:
    yield Figure("first", 1.0, least=0.5)
    raise RuntimeError(
        "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported at another call\n"
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
    )


def is_killed(setting: Setting, case: str) -> Iterator[Figure]:
    yield Figure("first", 1.0, least=0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def ends(setting: Setting, case: str) -> Iterator[Figure]:
    yield Figure("first", 1.0)
    os._exit(3)


def hangs(setting: Setting, folder: str) -> Iterator[Figure]:
    """With a process that it has started, whose number is left in the folder."""
    program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(folder, "started").write_text(str(program.pid))
    yield Figure("first", 1.0, least=0.5)
    time.sleep(600)
