"""A training run: the loop around an Engine, with data, log and checkpoints; the only part that sees everything.

program.py    the run as a program: ranks join, errors end all of them, exit status
loop.py       iterations, exit conditions, evaluation, log
data.py       what it trains and evaluates on, and how long it is by that
starting.py   what it starts from
saving.py     what it saves
watch.py      what is measured for the log and TensorBoard
"""

from megasnn.training.main import run as run
