"""Benches of drafters that learn from the requests that they draft for."""
