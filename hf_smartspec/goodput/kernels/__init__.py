"""Compiled loops of the auction: at a step's few nodes, a numpy call takes longer than its work."""
