"""E-SpikeFormer."""
