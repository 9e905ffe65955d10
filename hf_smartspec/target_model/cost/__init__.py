"""Measurement of a forward's cost, and its profile on disk."""
