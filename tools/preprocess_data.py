"""The program megasnn-preprocess-data from a checkout: `python tools/preprocess_data.py`."""

from __future__ import annotations

import sys

from megasnn.commands.preprocess_data import main

if __name__ == "__main__":
    sys.exit(main())
