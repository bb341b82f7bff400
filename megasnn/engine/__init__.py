"""What trains, evaluates and predicts on this rank of a layout; the loop of a run and the benchmark use nothing else.

engine.py              what is called from Python: steps, evaluation, predictions, weights, checkpoints
batches.py             from whole batches, which are checked, to this rank's micro-batches
steps.py               what becomes of micro-batches, up to the new weights
checkpoints.py         what is saved of all that, and how it is loaded
setup.py               from the configuration to ranks, neuron, types and chunks
distributed_model.py   a model's chunks on this rank, forward and backward
"""

from megasnn.engine.engine import Engine as Engine
