"""Continuous batching: requests enter and leave while others run."""
