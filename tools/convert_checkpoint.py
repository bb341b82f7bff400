"""The program megasnn-convert-checkpoint from a checkout: `python tools/convert_checkpoint.py`."""

from __future__ import annotations

import sys

from megasnn.commands.convert_checkpoint import main

if __name__ == "__main__":
    sys.exit(main())
