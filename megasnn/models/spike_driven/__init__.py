"""Spike-driven Transformer."""
