"""Parts that every room uses: registry, random numbers, grid of ranks, files, memory, checks of values."""
