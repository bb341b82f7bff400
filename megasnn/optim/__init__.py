"""Optimizers, learning rates and layout-independent norms."""
