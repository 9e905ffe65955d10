"""Measure what a forward costs, and keep the profile on disk."""
