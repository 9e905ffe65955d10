"""Forwards of drafters that use the target's layers, hidden states or cache."""
