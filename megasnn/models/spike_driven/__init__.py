"""Spike-driven Transformer: its dimensions, its layers, and its names in SpikingJelly."""
