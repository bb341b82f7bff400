"""`python tools/benchmark`, from any folder."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # The repository in place of this folder, whose files have names like `log`; ranks are started with the same path.
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from tools.benchmark.program import main

    sys.exit(main())
