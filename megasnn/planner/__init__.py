"""The planner: a model's costs on every layout, the best one on given machines, and files to run it."""
