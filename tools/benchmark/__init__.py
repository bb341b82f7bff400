"""The benchmark, `python -m tools.benchmark`: MegaSNN beside other programs, side by side in one run."""
