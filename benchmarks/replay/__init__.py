"""Benches of the model-free sources on recorded text."""
