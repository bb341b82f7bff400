"""E-SpikeFormer: its dimensions, its layers, and the names of its published weights."""
