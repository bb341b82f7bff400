"""A training run: the loop around an Engine, with data, log and checkpoints.

main.py         the run as a program: ranks join, errors end all of them, exit status. signals.py: requests to stop
loop.py         iterations, exit conditions, evaluation
data.py         training and validation samples, and the length of the run
start.py        which checkpoint it starts from. loading.py: loads it. saving.py: the checkpoints it saves
micro_batch.py  the largest micro-batch that fits in memory, for --micro-batch-size auto
startup_log.py  lines before the first step. memory.py: the forecast of memory
metrics.py      spikes, time and traffic, pictures and traces. operations.py: synaptic operations of an evaluation
engine_log.py   the same logs for a user's own loop around an Engine
"""

from megasnn.training.main import run as run
