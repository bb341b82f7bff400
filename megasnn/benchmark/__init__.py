"""Side-by-side timing of MegaSNN's layouts and of SpikingJelly's own model; the program is tools/benchmark.py."""
