"""Training of the small target and draft models that the demos use."""
