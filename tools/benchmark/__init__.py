"""The benchmark: `python tools/benchmark`. It measures MegaSNN beside other programs, side by side in one run.

A file for each case: layouts.py (a training step), pipeline.py (schedules), loading.py (data), kernels.py,
checkpoints.py, plans.py (beside the planner), and gpu.py for what tools/check_gpu.py does. All cases run in
harness.py; their ranks are started by ranks.py, which starts the ranks of the tests too.
"""
