"""Pipeline parallelism: chunks of layers, transfers between ranks, and the executor of schedules."""
