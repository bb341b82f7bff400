"""The planner: what a model costs on every layout, which one to take on given machines, and the files that run it."""
