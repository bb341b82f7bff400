"""The program megasnn-plan from a checkout: `python tools/plan.py`."""

from __future__ import annotations

import sys

from megasnn.commands.plan import main

if __name__ == "__main__":
    sys.exit(main())
