"""A training run: the loop around an Engine, with data, log and checkpoints; the only part that sees everything.

main.py         the run as a program: ranks join, errors end all of them, exit status
loop.py         iterations, exit conditions, evaluation
data.py         samples that it trains and evaluates on, and how long it is by them
resume.py       where it starts from. saving.py: its checkpoints
startup_log.py  what it prints before the first step. memory.py: the forecast of memory
metrics.py      spikes, memory, time and traffic for log and TensorBoard. profiling.py: charts, traces, pictures
"""

from megasnn.training.main import run as run
