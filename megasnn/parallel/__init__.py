"""Data parallelism over groups of ranks: gradients, weights and statistics; replicas that stay equal."""
