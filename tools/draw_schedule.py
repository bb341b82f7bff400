"""The program megasnn-draw-schedule from a checkout: `python tools/draw_schedule.py`."""

from __future__ import annotations

import sys

from megasnn.commands.draw_schedule import main

if __name__ == "__main__":
    sys.exit(main())
