"""The Engine: a model in training on this rank of a layout.

engine.py       the Python interface
step.py         forward, backward, reduction, check, clip, update, statistics, average
step_sums.py    sums over all ranks
model.py        this rank's chunks, and their runs over micro-batches
loss.py         loss and metrics
batch.py        whole batches, checked and cut into this rank's micro-batches
windows.py      time windows, for truncated backpropagation
build.py        configuration, layer context and pipeline plan from model and flags
replica.py      this rank's chunks, gradients and executor from a plan
checkpoint.py   checkpoint contents
not_finite.py   the first layer or gradient with nan or infinities
"""

from megasnn.engine.engine import Engine as Engine
