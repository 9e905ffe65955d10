"""Capabilities of a model, found by its architecture, by probes, and by changes that were made to it."""
