"""Products of spikes on a CPU as sums of rows of the other operand, one for each spike.

`products` decides and calls, `loops` sums, `lists` finds the spikes.
"""
