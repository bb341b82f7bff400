"""`python tools/benchmark`, from any folder."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for the processes of ranks as well
    from megasnn.process.terminal import keep_going
    from tools.benchmark.program import main

    keep_going()
    sys.exit(main())
