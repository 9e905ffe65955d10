"""Forwards of the target: packed, or row by row on transformers' own inputs and caches."""
