"""The Engine: a model in training on this rank of a layout.

engine.py       the Python interface: steps, evaluation, predictions, weights, checkpoints
step.py         training step: forward, backward, reduction, check, clip, update, statistics, average
step_sums.py    sums of a step over all ranks
model.py        this rank's chunks, and their runs over micro-batches
loss.py         loss and metrics of micro-batches
batch.py        whole batches, checked and cut into this rank's micro-batches
windows.py      windows of time steps, for truncated backpropagation
build.py        configuration, layer context and pipeline plan from model and flags
replica.py      this rank's chunks, gradients and executor from a plan
checkpoint.py   contents of checkpoints
not_finite.py   the first layer or gradient in a step with nan or infinities
"""

from megasnn.engine.engine import Engine as Engine
