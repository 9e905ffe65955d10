"""Layers that keep a state in place of keys and values (linear attention, state spaces, short convolutions)."""
