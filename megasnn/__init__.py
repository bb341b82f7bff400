"""MegaSNN: training of spiking neural networks with data, tensor and pipeline parallelism in one design."""

__version__ = "0.1.0"
