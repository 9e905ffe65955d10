"""Compiled loops over the nodes of trees: at a step's few nodes, a numpy call takes longer than its work."""
