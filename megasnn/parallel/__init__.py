"""Data parallelism: gradients, weights and statistics over replicas that stay equal."""
