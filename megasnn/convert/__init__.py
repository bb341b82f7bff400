"""Checkpoints and weights between layouts and programs, from one process without a GPU."""
