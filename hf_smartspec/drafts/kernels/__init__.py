"""Compiled loops over the nodes of trees: with a step's few nodes, the overhead of a numpy call exceeds its work."""
