"""The planner: a model's costs on every layout, the best layout on given machines, and the files to run it."""
