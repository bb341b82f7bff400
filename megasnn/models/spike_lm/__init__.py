"""SpikeLM."""
