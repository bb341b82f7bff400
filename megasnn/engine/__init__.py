"""A model that is trained, evaluated and asked for predictions on this rank of a layout.

engine.py       what is called from Python
step.py         the training step: zero, forward and backward, reduce, check, clip, update, statistics, average
model.py        this rank's chunks, and what runs micro-batches through them
batch.py        from whole batches, which are checked, to this rank's micro-batches
build.py        from model and flags to configuration, description, context, plan and chunks
mesh.py         the grid of ranks, and torch's arithmetic
checkpoint.py   what is saved. debug.py: where a step went wrong. faults.py: an error ends all ranks
"""

from megasnn.engine.engine import Engine as Engine
