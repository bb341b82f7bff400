"""The program megasnn-show-data from a checkout: `python tools/show_data.py`."""

from __future__ import annotations

import sys

from megasnn.commands.show_data import main

if __name__ == "__main__":
    sys.exit(main())
