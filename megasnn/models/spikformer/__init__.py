"""Spikformer."""
