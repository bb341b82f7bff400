"""Parts for every room: registry, random numbers, grid of ranks, files, memory, checks of values."""
