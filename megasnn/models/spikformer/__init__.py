"""Spikformer: its dimensions, its layers, and its names in other programs."""
