"""The Engine: a model in training on this rank of a layout.

A replica is a data-parallel copy of the model, on one rank or several. A `DistributedModel`, in variables
`distributed`, is this rank's part of a replica.

engine.py       the Python interface
trainer.py      forward, backward, reduction, clip, update, statistics, average
step_sums.py    sums over all ranks
model.py        this rank's chunks, run over micro-batches
loss.py         loss and metrics of a step
evaluation.py   loss and metrics of an evaluation, answers of a prediction
batch.py        from whole batches to this rank's micro-batches
share.py        the samples of a batch that one rank reads
windows.py      truncated backpropagation
calibration.py  spike amplitudes from the first batch
build.py        from model and flags to configuration, context and plan
assemble.py     from a plan to chunks, gradients and executor
checkpoint.py   checkpoints: contents, saving, loading
not_finite.py   the first layer or gradient with nan or infinities
"""

from megasnn.engine.engine import Engine as Engine
