"""Training of drafters for a frozen target."""
