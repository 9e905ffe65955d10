"""Continuous batching: requests come and go while others run."""
