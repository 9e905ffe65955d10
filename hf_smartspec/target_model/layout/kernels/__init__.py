"""Compiled loops of a forward's layout."""
