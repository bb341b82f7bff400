"""The benchmark: `python tools/benchmark`. It measures MegaSNN beside other programs, side by side in one run.

A file for each case: layouts.py (a training step), pipeline.py (schedules), rehearsal.py (schedules without computing),
loading.py (data), readers.py (recordings), kernels.py, memory.py, checkpoints.py, scale.py (many ranks, without them),
and gpu.py for what tools/check_gpu.py does. Beside the planner: plans.py, capacity.py and devices.py, of real ranks,
which share two_ranks.py and steps_rank.py; plans_asleep.py of ranks that sleep (sleeping.py). Files that begin with a
case's name belong to it; nccl_like.py, links.py and queued_device.py are a transport, of tests too. All cases run in
harness.py; their ranks are started by ranks.py, which starts the ranks of the tests too.
"""
