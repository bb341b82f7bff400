"""The pipeline: chunks of layers, transfers between ranks, and the executor that works off a schedule."""
