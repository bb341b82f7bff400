"""Optimizers, learning rates, and norms that do not depend on the layout."""
