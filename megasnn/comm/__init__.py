"""Communication: groups, counted collectives, the spike codec and the autograd duals of tensor parallelism."""
