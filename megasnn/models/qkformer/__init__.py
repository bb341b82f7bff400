"""QKFormer."""
