"""Medusa heads, and the source that drafts with them."""
