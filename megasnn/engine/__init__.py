"""What trains, evaluates and predicts on this rank of a layout; the loop of a run and the benchmark use nothing else.

engine.py              a model with its optimizer: steps, evaluation, predictions, weights, checkpoints
batches.py             from whole batches to this rank's micro-batches
setup.py               from the configuration to ranks, neuron, types and chunks
distributed_model.py   a model's chunks on this rank, forward and backward
"""

from megasnn.engine.engine import Engine as Engine
