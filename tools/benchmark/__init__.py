"""The benchmark: `python tools/benchmark`. It measures MegaSNN beside other programs, side by side in one run.

A file for each case: layouts.py (a training step), pipeline.py (schedules), rehearsal.py (schedules without computing),
loading.py (data), readers.py (recordings), checkpoints.py, and gpu.py for what tools/check_gpu.py does. Files that
begin with a case's name belong to it; nccl_like.py, links.py and queued_device.py are a transport, of tests too. All
cases run in harness.py; their ranks are started by ranks.py, which starts the ranks of the tests too.
"""
