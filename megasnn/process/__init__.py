"""A rank as a program: how it is launched, how signals and failures end it, and the folder that a job saves in."""
