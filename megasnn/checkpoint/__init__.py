"""Checkpoints of global tensors that any layout can load."""
